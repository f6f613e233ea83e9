"""What speculation gave to answers of this server: by drafter, and without the loops that flatter it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from server.bench.client import Measured

LOOP_TOKENS = 8
LOOP_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DrafterShare:
    """What one drafter gave to a run.

    by_depth[d - 1]: its drafted tokens that were kept at depth d. decode_steps: forwards of the whole run, so that
    the shares of all drafters and the one token that a forward always gives add up to the acceptance length, but for
    answers that end inside a draft.
    """

    drafter: str
    by_depth: tuple[int, ...]
    decode_steps: int

    @property
    def accepted_tokens(self) -> int:
        return sum(self.by_depth)

    @property
    def tokens_per_forward(self) -> float:
        """What it added to the acceptance length."""
        return self.accepted_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def rate_by_depth(self) -> list[float]:
        """The share of all forwards that kept a token of this drafter at depth 1, 2, ..."""
        return [count / self.decode_steps for count in self.by_depth] if self.decode_steps else []

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "accepted_by_depth": list(self.by_depth),
        }


def drafter_shares(answers: Iterable[Measured], drafters: Sequence[str]) -> list[DrafterShare]:
    """One for each of ``drafters``, in their order, and for any other that had a token accepted."""
    accepted: Counter[tuple[str, int]] = Counter()
    steps = 0
    for answer in answers:
        accepted.update(answer.accepted)
        steps += answer.acceptance.get("num_decode_steps", 0)
    names = dict.fromkeys([*drafters, *sorted({name for name, _ in accepted})])
    return [_share(name, accepted, steps) for name in names]


def _share(drafter: str, accepted: Counter[tuple[str, int]], decode_steps: int) -> DrafterShare:
    deepest = max((depth for name, depth in accepted if name == drafter), default=0)
    by_depth = tuple(accepted[drafter, depth] for depth in range(1, deepest + 1))
    return DrafterShare(drafter, by_depth, decode_steps)


def in_loop(tokens: Sequence[int]) -> list[bool]:
    """Of each token, whether it lies in a run of ``LOOP_TOKENS`` tokens that the answer holds for the
    ``LOOP_REPEATS``-th time or later."""
    seen: Counter[tuple[int, ...]] = Counter()
    inside = [False] * len(tokens)
    for end in range(LOOP_TOKENS, len(tokens) + 1):
        run = tuple(tokens[end - LOOP_TOKENS : end])
        seen[run] += 1
        if seen[run] >= LOOP_REPEATS:
            inside[end - LOOP_TOKENS : end] = [True] * LOOP_TOKENS
    return inside


def acceptance_figures(answers: Sequence[Measured], drafters: Sequence[str]) -> dict[str, Any]:
    """``length``: output tokens over decode forwards. ``length_without_loops``: the same of tokens outside of loops,
    over the forwards that began outside of one; None where the answers do not tell the depth of their tokens."""
    tokens = sum(answer.completion_tokens for answer in answers)
    steps = sum(answer.acceptance.get("num_decode_steps", 0) for answer in answers)
    looping, straight, straight_steps = 0, 0, 0
    for answer in answers:
        inside = in_loop(answer.token_ids)
        looping += sum(inside)
        if len(answer.depths) == len(inside):
            straight += inside.count(False)
            # A forward's tokens end with the one that was not drafted, so the token after it begins the next forward.
            begins = [index == 0 or answer.depths[index - 1] == 0 for index in range(len(inside))]
            straight_steps += sum(begin and not loop for begin, loop in zip(begins, inside, strict=True))
    return {
        "length": tokens / steps if steps else None,
        "length_without_loops": straight / straight_steps if straight_steps else None,
        "loop_share": looping / tokens if tokens else 0.0,
        "decode_steps": steps,
        "by_drafter": {share.drafter: share.as_dict() for share in drafter_shares(answers, drafters)},
    }
