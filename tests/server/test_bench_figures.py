"""The figures of ``headlong bench``, from answers whose times and tokens are known."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.bench.acceptance import acceptance_figures, in_loop
from server.bench.client import Measured
from server.bench.datasets import Dataset
from server.bench.figures import Bounds, Cell, percentiles, ratios, rows, spread
from server.bench.folder import check_out, write_out
from server.bench.load import Failure, Load, Outcome, Part
from server.bench.markdown import markdown
from server.bench.report import ReportError

BOUNDS = Bounds(ttft=0.5, per_token=0.1)


def answer(first: float, per_token: float, tokens: int = 5, **changes: Any) -> Measured:
    """One token a chunk."""
    times = [first + per_token * index for index in range(tokens)]
    fields: dict[str, Any] = {"has_usage": True, "completion_tokens": tokens, "text": "same", "finish_reason": "length"}
    return Measured(total=times[-1], chunk_times=times, **(fields | changes))


def cell(**sides: Sequence[tuple[float, Sequence[Outcome]]]) -> Cell:
    """Of each side, its rounds: wall time and answers."""
    parts = [
        Part(side, turn, list(outcomes), seconds)
        for side, rounds in sides.items()
        for turn, (seconds, outcomes) in enumerate(rounds)
    ]
    return Cell(Dataset("edits", ("a", "b"), 2), Load(clients=2), list(sides), parts)


def test_percentiles_are_milliseconds_between_the_values() -> None:
    assert percentiles(index / 1000 for index in range(101)) == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
    assert percentiles([0.001, 0.002]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([0.004]) == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


def test_the_spread_is_over_the_rounds_that_have_a_value() -> None:
    assert spread([3.0, None, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [3.0, None, 1.0, 2.0]}
    assert spread([None, None]) is None


def test_a_row_of_a_side() -> None:
    slow, fast = answer(0.6, 0.2), answer(0.1, 0.05)
    (row,) = rows(cell(peer=[(2.0, [slow, fast]), (1.0, [fast, fast])]), BOUNDS, ())
    assert (row["dataset"], row["load"], row["clients"], row["rate"], row["side"]) == (
        ("edits", "2 clients", 2, None, "peer")
    )
    assert row["total_tokens_per_second"] == {"median": 7.5, "min": 5.0, "max": 10.0, "rounds": [5.0, 10.0]}
    # (tokens - 1) / (total - first): 5 and 20, median over the prompts of a round.
    assert row["decode_tokens_per_second"]["rounds"] == pytest.approx([12.5, 20.0])
    assert row["ttft_ms"] == pytest.approx({"p50": 100, "p90": 450, "p99": 585})
    assert row["tpot_ms"] == pytest.approx({"p50": 50, "p90": 155, "p99": 195.5})
    assert row["gap_ms"] == pytest.approx({"p50": 50, "p90": 200, "p99": 200})
    assert row["goodput"] == {"share": 0.75, "requests_per_second": 1.0}
    assert (row["requests"], row["errors"], row["first_error"], row["completion_tokens"]) == (4, 0, None, 20)
    assert row["acceptance"] is None
    assert row["tokens_counted_from"] == "usage"


def test_failed_requests_are_not_good_and_have_no_times() -> None:
    found = [Failure("500: first"), Failure("500: second"), answer(0.1, 0.05, has_usage=False)]
    (row,) = rows(cell(peer=[(2.0, found), (1.0, [Failure("gone")])]), BOUNDS, ())
    assert (row["requests"], row["errors"], row["first_error"]) == (4, 3, "500: first")
    assert row["goodput"] == {"share": 0.25, "requests_per_second": 1 / 3}
    assert row["ttft_ms"]["p99"] == pytest.approx(100)
    assert row["total_tokens_per_second"]["rounds"] == [2.5, None]
    assert row["tokens_counted_from"] == "chunks"


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (answer(0.5, 0.05), True),
        (answer(0.51, 0.05), False),
        (answer(0.1, 0.2), False),
        (answer(0.1, 0.0, tokens=1), True),
    ],
)
def test_goodput_asks_for_both_bounds(found: Measured, good: bool) -> None:
    assert BOUNDS.hold(found) == good


def test_our_side_is_compared_with_every_other_side_round_by_round() -> None:
    fast, slow = answer(0.1, 0.05), answer(0.4, 0.1)
    other = answer(0.1, 0.05, text="other")
    both = cell(
        on=[(1.0, [fast, fast]), (2.0, [fast, fast]), (1.0, [fast, fast])],
        off=[(2.0, [slow, slow]), (2.0, [fast, fast]), (4.0, [slow, slow])],
        peer=[(1.0, [other, fast]), (2.0, [fast, Failure("gone")]), (1.0, [Failure("gone")] * 2)],
    )
    off, peer = ratios(both)
    assert (off["against"], peer["against"]) == ("off", "peer")
    assert off["total_tokens_per_second"] == {"median": 2.0, "min": 1.0, "max": 4.0, "rounds": [2.0, 1.0, 4.0]}
    assert off["decode_tokens_per_second"]["rounds"] == pytest.approx([2.0, 1.0, 2.0])
    assert off["ttft"]["rounds"] == pytest.approx([4.0, 1.0, 4.0])
    assert (off["pairs"], off["same_text"], off["identical"]) == (6, 6, 6)
    assert peer["total_tokens_per_second"]["rounds"] == [1.0, 2.0, None]
    assert (peer["pairs"], peer["same_text"]) == (3, 2)
    assert "identical" not in peer


def test_a_difference_names_its_prompt_though_it_was_asked_again() -> None:
    told = [answer(0.1, 0.1, token_ids=[5] * 5) for _ in range(5)]
    changed = [*told[:3], answer(0.1, 0.1, token_ids=[5, 5, 6, 5, 5]), told[4]]
    (off,) = ratios(cell(on=[(1.0, told)], off=[(1.0, changed)]))
    assert (off["identical"], off["pairs"]) == (4, 5)
    assert off["differences"] == [{"prompt": 1, "round": 0, "kind": "token", "token": 2, "margin": None}]


def test_a_loop_begins_with_the_third_time() -> None:
    run = list(range(10, 18))
    assert in_loop([*run, *run]) == [False] * 16
    assert in_loop([1, *run, 2, *run, 3, *run, 4]) == [False] * 19 + [True] * 8 + [False]
    # Of one token over and over, the third run begins with the third token.
    assert in_loop([7] * 12) == [False] * 2 + [True] * 10
    assert in_loop([1, 2, 3]) == [False] * 3


def test_acceptance_with_and_without_loops() -> None:
    # Ten tokens of text, one forward each; then a loop of 24 tokens in forwards of four.
    loop = [50, 51, 52, 53, 54, 55, 56, 57]
    ids = [*range(10), *loop * 3]
    depths = [0] * 10 + [1, 2, 3, 0] * 6
    accepted = Counter({("suffix", 1): 4, ("medusa", 1): 2, ("suffix", 2): 6, ("suffix", 3): 6})
    found = acceptance_figures(
        [
            Measured(
                completion_tokens=34,
                token_ids=ids,
                depths=depths,
                accepted=accepted,
                acceptance={"num_decode_steps": 16},
            )
        ],
        ["medusa", "suffix"],
    )
    assert found["length"] == 34 / 16
    assert found["loop_share"] == 8 / 34
    assert found["length_without_loops"] == 26 / 14
    assert list(found["by_drafter"]) == ["medusa", "suffix"]
    assert found["by_drafter"]["suffix"]["tokens_per_forward"] == 1.0
    assert found["by_drafter"]["suffix"]["accepted_by_depth"] == [4, 6, 6]
    assert found["by_drafter"]["medusa"]["tokens_per_forward"] == 0.125


def test_without_depths_there_is_no_acceptance_without_loops() -> None:
    found = acceptance_figures([Measured(completion_tokens=2, token_ids=[1, 2])], [])
    assert (found["length"], found["length_without_loops"], found["loop_share"]) == (None, None, 0.0)


def report() -> dict[str, Any]:
    """What a run of two sides and a peer that failed once gives."""
    fast, slow = answer(0.1, 0.05), answer(0.4, 0.1, has_usage=False)
    found = cell(on=[(1.0, [fast, fast])], off=[(2.0, [fast, fast])], peer=[(4.0, [slow, Failure("500: a | b")])])
    load = Load(rate=2.0)
    clocked = Cell(found.dataset, load, ["on"], [Part("on", 0, [fast, fast], 1.0)])
    return {
        "command": ["headlong", "bench", "--note", "a secret handshake", "--n", "2", "--note", "second"],
        "started": "2000-01-01T00:00:00+00:00",
        "headlong": "1.2.3",
        "python": "3.11.0",
        "machine": "x86_64",
        "cores": 2,
        "load_average": [0.0, 1.5],
        "server": {
            "url": "http://ours",
            "version": "1.2.3",
            "model": {"id": "tiny", "methods": ["suffix"], "runner": "compiled", "verifier": "match"},
        },
        "peers": {"peer": {"url": "http://theirs", "model": "big", "facts": {}}},
        "datasets": {"edits": {"prompts": 2, "sha256": found.dataset.digest}},
        "sampling": {"max_tokens": 5, "temperature": 0.0, "seed": 3, "margins": False},
        "rounds": 1,
        "goodput_bounds": BOUNDS.as_dict(),
        "notes": ["`peer`: started by hand"],
        "rows": [row for one in (found, clocked) for row in rows(one, BOUNDS, ["suffix"])],
        "ratios": ratios(found),
    }


def test_the_report_can_be_read() -> None:
    text = markdown(report(), ["edits.svg"])
    assert "`headlong bench --n 2`" in text
    assert "seed 3" in text
    assert "runner compiled, verifier match, drafters suffix" in text
    assert "`peer`: big on http://theirs" in text
    assert "- `peer`: started by hand" in text
    assert report()["datasets"]["edits"]["sha256"] in text
    assert "| edits | 2 clients | off | 2.00 (2.00-2.00) | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | 2/2 |" in text
    assert "| edits | 2 clients | peer | 1.2 (1.2-1.2) | 10.0 (10.0-10.0) | 0.50 (0.25/s) | 1/2 |" in text
    assert "| edits | 2 clients | on | 100 / 100 / 100 | 50 / 50 / 50 | 50 / 50 / 50 |" in text
    assert "`peer`, edits, 2 clients: tokens counted from chunks" in text
    assert "`peer`, edits, 2 clients: 1 of 2 requests failed, first: 500: a | b" in text
    assert "![edits.svg](edits.svg)" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_folder_holds_json_markdown_and_plots(tmp_path: Path) -> None:
    out = tmp_path / "results"
    check_out(out)
    write_out(out, report())
    assert sorted(path.name for path in out.iterdir()) == ["edits-open.svg", "edits.svg", "report.json", "report.md"]
    assert json.loads((out / "report.json").read_text()) == report()
    assert "![edits-open.svg](edits-open.svg)" in (out / "report.md").read_text()
    drawn = {path.name: path.read_bytes() for path in out.glob("*.svg")}
    assert all(picture.startswith(b"<?xml") for picture in drawn.values())
    write_out(out, report())
    assert drawn == {path.name: path.read_bytes() for path in out.glob("*.svg")}, "equal figures give other files"


def test_several_loads_are_drawn_as_lines(tmp_path: Path) -> None:
    made = report()
    made["rows"] += [row | {"load": "8 clients", "clients": 8} for row in made["rows"] if row["clients"]]
    write_out(tmp_path, made)
    assert (tmp_path / "edits.svg").stat().st_size > 1000


def test_a_name_that_ends_in_json_is_one_file(tmp_path: Path) -> None:
    out = tmp_path / "one.json"
    check_out(out)
    write_out(out, report())
    assert json.loads(out.read_text()) == report()
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_place_that_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "folder.json").mkdir()
    for out, reason in (
        (tmp_path / "absent" / "results", "its folder does not exist"),
        (tmp_path / "absent" / "one.json", "its folder does not exist"),
        (tmp_path / "folder.json", "it is a folder"),
        (file, "neither a folder nor a name that ends in .json"),
    ):
        with pytest.raises(ReportError, match=reason):
            check_out(out)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no folder that takes no files whoever asks")
@pytest.mark.parametrize("name", ["results", "one.json"])
def test_a_folder_that_takes_no_files_is_told_before(name: str) -> None:
    with pytest.raises(ReportError, match="cannot write in /proc: "):
        check_out(Path("/proc") / name)


def test_plots_without_matplotlib_are_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ReportError, match="pip install matplotlib"):
        check_out(tmp_path / "results")
    check_out(tmp_path / "one.json")
