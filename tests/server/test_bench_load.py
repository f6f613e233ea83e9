"""How ``headlong bench`` sends its requests: whose turn it is, how many at once, and when."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import pytest

from server.bench.client import Measured, ServerFault
from server.bench.load import (
    Course,
    Failure,
    Load,
    LoadError,
    Outcome,
    Part,
    arrivals,
    measure_load,
    parse_clients,
    rotated,
    split_clients,
)

Call = tuple[str, str, str]  # side, prompt, salt


@dataclass
class Scripted:
    """A side that answers after ``turns`` of the event loop, and writes down who was asked what, and beside whom.

    live: names of the sides that are being asked, shared by all sides of a test. fails: what some prompts raise.
    """

    name: str
    calls: list[Call]
    live: list[str]
    is_ours: bool = True
    turns: int = 3
    fails: dict[str, Exception] = field(default_factory=dict)
    most_live: int = 0

    async def answer(self, prompt: str, salt: str) -> Measured:
        self.calls.append((self.name, prompt, salt))
        self.live.append(self.name)
        assert set(self.live) == {self.name}, "two sides were asked at once"
        self.most_live = max(self.most_live, len(self.live))
        try:
            for _ in range(self.turns + len(prompt)):
                await asyncio.sleep(0)
            question = prompt.rpartition("\n\n")[2]
            if question in self.fails:
                raise self.fails[question]
            return Measured(total=1.0, chunk_times=[0.25], completion_tokens=4, text=question)
        finally:
            self.live.remove(self.name)


class Bench:
    """Scripted sides and what came of them."""

    def __init__(self, *names: str) -> None:
        self.calls: list[Call] = []
        self.advanced: list[Outcome] = []
        live: list[str] = []
        self.sides = [Scripted(name, self.calls, live) for name in names]

    async def run(self, prompts: Sequence[str], load: Load, rounds: int = 1) -> list[Part]:
        course = Course(rounds, seed=3, run="run")
        return await measure_load(self.sides, prompts, load, course, self.advanced.append)

    @property
    def asked(self) -> list[Call]:
        """Without the warm-up: one request a side."""
        return self.calls[len(self.sides) :]

    @property
    def order(self) -> list[str]:
        """The sides in their turns."""
        names = [name for name, _, _ in self.asked]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def test_each_side_comes_first_equally_often() -> None:
    sides = Bench("on", "off", "peer").sides
    firsts = [[side.name for side in rotated(sides, turn)] for turn in range(4)]
    assert firsts == [["on", "off", "peer"], ["off", "peer", "on"], ["peer", "on", "off"], ["on", "off", "peer"]]


async def test_one_client_asks_the_sides_prompt_by_prompt() -> None:
    bench = Bench("on", "off")
    parts = await bench.run(["a", "b", "c"], Load(clients=1), rounds=2)
    asked = [(name, prompt) for name, prompt, _ in bench.asked]
    first_round = [("on", "a"), ("off", "a"), ("off", "b"), ("on", "b"), ("on", "c"), ("off", "c")]
    second_round = [("off", "a"), ("on", "a"), ("on", "b"), ("off", "b"), ("off", "c"), ("on", "c")]
    assert asked == first_round + second_round
    assert [(part.side, part.round) for part in parts] == [("on", 0), ("off", 0), ("on", 1), ("off", 1)]
    assert all([answer.text for answer in part.answers] == ["a", "b", "c"] for part in parts)
    assert all(part.seconds > 0 for part in parts)
    assert len(bench.advanced) == len(asked)


async def test_several_clients_ask_one_side_a_whole_round_at_a_time() -> None:
    bench = Bench("on", "off", "peer")
    prompts = [letter * length for letter, length in zip("abcdefg", (1, 9, 2, 8, 3, 7, 4), strict=True)]
    parts = await bench.run(prompts, Load(clients=3), rounds=3)
    # Each round begins with another side.
    assert bench.order == ["on", "off", "peer", "off", "peer", "on", "peer", "on", "off"]
    assert [side.most_live for side in bench.sides] == [3, 3, 3]
    # Long answers are overtaken, but stand in the order of their prompts.
    assert [[answer.text for answer in part.answers] for part in parts] == [prompts] * 9


async def test_a_client_asks_again_as_soon_as_it_is_answered() -> None:
    bench = Bench("on")
    await bench.run(["a" * 50, "b", "c", "d"], Load(clients=2))
    assert [prompt[0] for _, prompt, _ in bench.asked] == ["a", "b", "c", "d"]
    assert bench.sides[0].most_live == 2


async def test_every_client_has_a_prompt() -> None:
    bench = Bench("on", "off")
    assert Load(clients=5).requests(2) == 5
    assert Load(clients=2).requests(5) == Load(rate=1.0).requests(5) == 5
    parts = await bench.run(["a", "b"], Load(clients=5))
    assert [side.most_live for side in bench.sides] == [5, 5]
    assert [[answer.text for answer in part.answers] for part in parts] == [["a", "b", "a", "b", "a"]] * 2
    assert len(bench.advanced) == 10


async def test_nothing_that_was_answered_before_may_be_reused() -> None:
    bench = Bench("on", "off")
    await bench.run(["a", "b"], Load(clients=4), rounds=2)
    by_salt: dict[str, list[str]] = {}
    for _, prompt, salt in bench.calls:
        by_salt.setdefault(salt, []).append(prompt)
    assert by_salt.pop("run/warm-up") == ["a", "a"]
    # A round of one side shares a salt, so that what its prompts have in common is computed once; nothing else does.
    assert sorted(map(sorted, by_salt.values())) == [["a", "b"]] * 8
    assert {len({side for side, _, salt in bench.calls if salt == one}) for one in by_salt} == {1}


async def test_a_peer_is_asked_nothing_that_it_may_have_kept() -> None:
    bench = Bench("on", "peer")
    bench.sides[1].is_ours = False
    await bench.run(["a", "b"], Load(clients=4), rounds=2)
    ours, theirs = ([prompt for name, prompt, _ in bench.asked if name == side] for side in ("on", "peer"))
    assert sorted(ours) == sorted(theirs)
    begins: dict[str, list[str]] = {}
    for prompt in theirs:
        line, _, question = prompt.partition("\n\n")
        begins.setdefault(line, []).append(question)
    # Each time that the prompts are asked, twice in each of two rounds, they share a line that no other time has.
    assert sorted(map(sorted, begins.values())) == [["a", "b"]] * 4


async def test_a_failed_answer_of_a_peer_is_counted() -> None:
    bench = Bench("on", "peer")
    bench.sides[1].is_ours = False
    bench.sides[1].fails = {"b": ServerFault("500: out of memory"), "c": httpx.ReadTimeout("")}
    _, peer = await bench.run(["a", "b", "c"], Load(clients=2))
    assert peer.failures == [Failure("500: out of memory"), Failure("ReadTimeout")]
    assert [answer.text for answer in peer.answers] == ["a"]


@pytest.mark.parametrize("load", [Load(clients=1), Load(clients=2), Load(rate=1e6)])
async def test_a_failed_answer_of_ours_ends_the_run(load: Load) -> None:
    bench = Bench("on")
    bench.sides[0].fails = {"b": ServerFault("500: out of memory")}
    with pytest.raises(ServerFault, match="prompt 1: 500: out of memory"):
        await bench.run(["a", "b"], load)


def test_arrivals_are_drawn_by_the_seed() -> None:
    due = arrivals(2000, 4.0, 7, 0)
    assert due == arrivals(2000, 4.0, 7, 0)
    assert due == sorted(due)
    assert due != arrivals(2000, 4.0, 8, 0)
    assert due != arrivals(2000, 4.0, 7, 1)
    gaps = [after - before for before, after in zip([0.0, *due], due, strict=False)]
    # A Poisson process: gaps are as wide apart as they are long.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


async def test_open_loop_requests_wait_for_no_answer() -> None:
    bench = Bench("on", "off")
    for side in bench.sides:
        side.turns = 2000
    parts = await bench.run(["a", "b", "c", "d"], Load(rate=1e5), rounds=2)
    assert [side.most_live for side in bench.sides] == [4, 4]
    assert bench.order == ["on", "off", "on"]
    assert [[answer.text for answer in part.answers] for part in parts] == [["a", "b", "c", "d"]] * 4


async def test_a_request_that_goes_out_late_counts_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.bench.load.arrivals", lambda *_: [-5.0])
    (part,) = await Bench("on").run(["a"], Load(rate=1.0))
    (answer,) = part.answers
    assert answer.first_token == pytest.approx(5.25, abs=1.0)
    assert answer.total - answer.first_token == pytest.approx(0.75)


def test_loads_are_named() -> None:
    assert parse_clients("1,4,4,32") == [Load(clients=1), Load(clients=4), Load(clients=32)]
    assert [load.label for load in (Load(clients=1), Load(clients=8), Load(rate=2.5))] == [
        "1 client",
        "8 clients",
        "2.5 requests/s",
    ]
    assert split_clients("mt-bench@1,8") == ("mt-bench", [Load(clients=1), Load(clients=8)])
    assert split_clients("mt-bench") == ("mt-bench", [])
    assert split_clients("a@b.txt") == ("a@b.txt", [])


@pytest.mark.parametrize("text", ["", "0", "1,0", "1,", ",1", "1;2", "-1", "two", "1.5"])
def test_loads_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="whole numbers from 1"):
        parse_clients(text)


def test_a_dataset_with_no_clients_is_refused() -> None:
    with pytest.raises(LoadError, match="whole numbers from 1"):
        split_clients("edits@0")
