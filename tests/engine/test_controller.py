"""Drafts are sized so that they pay: the controller against brute force, and the cost curve."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.spec_decode.controller import MIN_GAIN, Controller, DraftRoom, StepCosts
from engine.spec_decode.tree import DraftTree

CURVE = {1: 10.0, 2: 10.5, 4: 12.0, 8: 20.0, 16: 21.0, 32: 40.0}


def decoding(name: str, survivals: Sequence[float], speculation: SpeculationParams | None = None) -> Request:
    source = EngineRequest(name, (1,), SamplingParams(max_tokens=99), speculation or SpeculationParams())
    request = Request.from_source(source, ())
    request.token_ids.append(2)
    request.num_computed_tokens = 1
    tree = DraftTree()
    for node, survival in enumerate(survivals):
        tree.add(node, node - 1, survival, "suffix")
    request.proposal = tree
    return request


def limits(requests: Sequence[Request]) -> dict[str, tuple[int, int]]:
    return {request.request_id: (16, 16) for request in requests}


def test_the_curve_interpolates_and_never_falls() -> None:
    costs = StepCosts({1: 10.0, 4: 8.0, 8: 20.0})
    assert costs(1) == 8.0
    assert costs(4) == 8.0
    assert costs(6) == 14.0
    assert costs(16) == 44.0


def test_measuring_takes_the_best_of_several_runs() -> None:
    busy = iter([9.0] * 4 + [1.0] * 4 + [5.0] * 8)
    assert StepCosts.measured(lambda rows: next(busy) * rows, 4).as_dict() == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all_sizes(seed: int) -> None:
    draw = random.Random(seed)
    requests = [
        decoding(f"r{i}", sorted((draw.random() ** 2 for _ in range(draw.randint(0, 8))), reverse=True))
        for i in range(draw.randint(1, 3))
    ]
    other_rows, costs, room = draw.choice([0, 0, 5]), StepCosts(CURVE), draw.choice([99, 4])
    batch = len(requests) + (others := 2 if other_rows else 0)
    choices = Controller(costs).choose(requests, limits(requests), DraftRoom(other_rows, room, others))

    def rate(sizes: Sequence[int]) -> float:
        expected = len(requests) + sum(sum(r.proposal.survival[:n]) for r, n in zip(requests, sizes, strict=True))
        plain_rows = len(requests) + other_rows
        # Their share of a plain step of the whole batch, and what the drafted rows add to this one.
        added = costs(plain_rows + sum(sizes)) - costs(plain_rows)
        return expected / (costs(batch) * len(requests) / batch + added)

    sizes = itertools.product(*(range(len(r.proposal) + 1) for r in requests))
    best = max(rate(each) for each in sizes if sum(each) <= room)
    taken = [len(choices[r.request_id].tree) for r in requests]
    chosen = rate(taken)
    assert sum(taken) <= room
    assert chosen >= best / MIN_GAIN
    assert chosen >= rate([0] * len(requests))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nodes_under_the_least_survival_are_never_verified(count: int) -> None:
    costs = StepCosts(CURVE)
    least = costs.least_survival(count, 16 * count)
    requests = [decoding(f"r{i}", [0.99 * least] * 16) for i in range(count)]
    choices = Controller(costs).choose(requests, limits(requests), DraftRoom(0, 99))
    assert not any(len(choice.tree) for choice in choices.values())
    # Just above it they are, where there are as many as it takes.
    requests = [decoding(f"r{i}", [1.2 * MIN_GAIN * least + 0.05] * 16) for i in range(count)]
    choices = Controller(costs).choose(requests, limits(requests), DraftRoom(0, 99))
    assert any(len(choice.tree) for choice in choices.values())


def test_the_least_survival_is_what_the_cheapest_rows_cost() -> None:
    costs = StepCosts({1: 10.0, 2: 12.0, 4: 12.5, 8: 30.0})
    assert costs.least_survival(1, 1) == pytest.approx(0.2)
    assert costs.least_survival(1, 7) == pytest.approx(0.25 / 3)  # three rows more cost a quarter of the step
    assert costs.least_survival(4, 99) == pytest.approx(4 * (30.0 / 12.5 - 1) / 4)
    assert StepCosts({1: 5.0}).least_survival(3, 8) == 0.0


def test_a_prompt_in_the_step_makes_no_draft_cheaper() -> None:
    costs = StepCosts({1: 10.0, 2: 12.0, 128: 264.0})  # 2 a row
    for survival, taken in ((0.15, 0), (0.5, 4)):
        request = decoding("r", [survival] * 4)
        for other_rows in (0, 100):
            choice = Controller(costs).choose([request], limits([request]), DraftRoom(other_rows, 20))["r"]
            assert len(choice.tree) == taken
    # With seven more that will decode beside it, a token costs 3 instead of 10, so half a token for 2 is no bargain.
    request = decoding("r", [0.5] * 4)
    choice = Controller(costs).choose([request], limits([request]), DraftRoom(100, 20, 7))["r"]
    assert len(choice.tree) == 0


def test_a_hopeless_draft_is_not_verified() -> None:
    request = decoding("r", [0.01] * 4)
    choice = Controller(StepCosts(CURVE)).choose([request], limits([request]), DraftRoom(0, 99))["r"]
    assert (len(choice.tree), choice.reason) == (0, "low_acceptance")


@pytest.mark.parametrize(
    ("survivals", "speculation", "nodes", "enabled", "reason"),
    [
        ([0.9], SpeculationParams(enabled=False), 16, True, "request"),
        ([0.9], SpeculationParams(max_draft_tokens=0), 0, True, "request"),
        ([0.9], None, 16, False, "disabled"),
        ([0.9], None, 0, True, "limit"),
        ([], None, 16, True, "no_draft"),
    ],
)
def test_a_plain_step_says_why(
    survivals: list[float], speculation: SpeculationParams | None, nodes: int, enabled: bool, reason: str
) -> None:
    request = decoding("r", survivals, speculation)
    choice = Controller(StepCosts(CURVE), enabled=enabled).choose([request], {"r": (nodes, 16)}, DraftRoom(0, 99))["r"]
    assert (len(choice.tree), choice.reason) == (0, reason)
