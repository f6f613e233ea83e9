"""How requests come: so many clients at once, or so many a second; all sides of a run in turn."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import httpx

from server.bench.client import Measured, ServerFault
from server.bench.side import Side


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop: ``clients`` that each ask again when answered. Open loop: ``rate`` requests a second, whatever is
    answered. One of the two is given."""

    clients: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.clients} client" + ("s" if self.clients != 1 else "")

    def requests(self, num_prompts: int) -> int:
        """Of one side in one round: every prompt once, and again from the first until each client has one."""
        return max(num_prompts, self.clients or 0)


class LoadError(Exception):
    """A load is named wrongly; one line."""


def parse_clients(text: str) -> list[Load]:
    """``1,8`` is a load of 1 client and one of 8. Raises LoadError."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text, re.ASCII) is None:
        raise LoadError(f"clients are whole numbers from 1 with commas between them, as in 1,8; not {text!r}")
    return [Load(clients=count) for count in dict.fromkeys(map(int, text.split(",")))]


def split_clients(text: str) -> tuple[str, list[Load]]:
    """``NAME@1,8`` is NAME under loads of its own; any other text is a name without loads. Raises LoadError."""
    found = re.fullmatch(r"(.+)@([\d,]+)", text)
    return (found[1], parse_clients(found[2])) if found else (text, [])


@dataclass(frozen=True, slots=True)
class Course:
    """rounds: times each side answers every prompt. seed: of the arrivals. run: tells this run's prompts from an
    earlier run's, which the server may still have cached."""

    rounds: int
    seed: int = 0
    run: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that a peer did not give. reason: one line."""

    reason: str


Outcome = Measured | Failure


@dataclass(slots=True)
class Part:
    """One side's answers of one round, in the order of the requests. seconds: wall time in which they were made."""

    side: str
    round: int
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def answers(self) -> list[Measured]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Measured)]

    @property
    def failures(self) -> list[Failure]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]


def rotated(sides: Sequence[Side], turn: int) -> list[Side]:
    """Their order in a turn: each comes first equally often."""
    first = turn % len(sides)
    return [*sides[first:], *sides[:first]]


def arrivals(count: int, rate: float, seed: int, turn: int) -> list[float]:
    """When each of ``count`` requests is due, in seconds: a Poisson process of ``rate`` a second."""
    draw = random.Random(f"{seed} {turn}")
    return list(accumulate(draw.expovariate(rate) for _ in range(count)))


async def measure_load(
    sides: Sequence[Side], prompts: Sequence[str], load: Load, course: Course, advance: Callable[[Outcome], None]
) -> list[Part]:
    """Every side answers every prompt in each round (``Load.requests``): in turn prompt by prompt where there is one
    client, else a whole round at a time, since clients must be at once on one side. Raises what a side of ours raises.
    """
    run = _Run(prompts, load, course, advance, all(side.is_ours for side in sides))
    for side in sides:  # warms the connection and the server
        await _outcome(side, 0, prompts[0], f"{course.run}/warm-up")
    parts: list[Part] = []
    for turn in range(course.rounds):
        by_side = {side.name: Part(side.name, turn) for side in sides}
        for group in run.groups():
            for side in rotated(sides, turn + group.start):
                part = by_side[side.name]
                began = time.perf_counter()
                part.outcomes += await run.answers(side, group, turn)
                part.seconds += time.perf_counter() - began
        parts += by_side.values()
    return parts


@dataclass(frozen=True, slots=True)
class _Run:
    """all_ours: no side is another's server, which may keep prompts whatever the salt."""

    prompts: Sequence[str]
    load: Load
    course: Course
    advance: Callable[[Outcome], None]
    all_ours: bool

    def groups(self) -> list[range]:
        """What one side answers before the next side's turn."""
        every = range(self.load.requests(len(self.prompts)))
        return [every[i : i + 1] for i in every] if self.load.clients == 1 else [every]

    async def answers(self, side: Side, group: range, turn: int) -> list[Outcome]:
        if self.load.rate is not None:
            return await self._open(side, group, turn)
        return await self._closed(side, group, turn)

    async def _closed(self, side: Side, group: range, turn: int) -> list[Outcome]:
        """Each client takes the next prompt when its last one is answered."""
        queue = iter(group)
        found: dict[int, Outcome] = {}

        async def client() -> None:
            for index in queue:
                found[index] = await self._one(side, index, turn)

        await asyncio.gather(*(client() for _ in range(min(self.load.clients or 1, len(group)))))
        return [found[index] for index in group]

    async def _open(self, side: Side, group: range, turn: int) -> list[Outcome]:
        """Each request goes out when it is due, and waits for no other; its times count from then."""
        assert self.load.rate is not None
        began = time.perf_counter()
        due = arrivals(len(group), self.load.rate, self.course.seed, turn)

        async def request(index: int, at: float) -> Outcome:
            await asyncio.sleep(at - (time.perf_counter() - began))
            late = time.perf_counter() - began - at
            outcome = await self._one(side, index, turn)
            if isinstance(outcome, Measured):
                outcome.count_from(max(late, 0.0))
            return outcome

        return await asyncio.gather(*map(request, group, due))

    async def _one(self, side: Side, index: int, turn: int) -> Outcome:
        # A round's prompts are new to the server, so that no side finds what another one left in the prefix cache.
        # Neither does a prompt that is asked again in a round find itself there.
        again, place = divmod(index, len(self.prompts))
        turn_of = f"{self.course.run}/{self.load.label}/{turn}/{again}"
        prompt = self.prompts[place] if self.all_ours else _unlike_earlier(self.prompts[place], turn_of)
        outcome = await _outcome(side, place, prompt, f"{turn_of}/{side.name}")
        self.advance(outcome)
        return outcome


def _unlike_earlier(prompt: str, turn: str) -> str:
    """The prompt behind a line that each turn has of its own, so that what another server kept of an earlier turn does
    not help it. Prompts of one turn still share what they begin with."""
    return f"Conversation {hashlib.sha256(turn.encode()).hexdigest()[:8]}.\n\n{prompt}"


async def _outcome(side: Side, index: int, prompt: str, salt: str) -> Outcome:
    try:
        return await side.answer(prompt, salt)
    except ServerFault as error:
        if side.is_ours:
            raise ServerFault(f"prompt {index}: {error}") from error
        return Failure(str(error))
    except httpx.HTTPError as error:
        if side.is_ours:
            raise
        return Failure(f"{type(error).__name__} {error}".rstrip())
