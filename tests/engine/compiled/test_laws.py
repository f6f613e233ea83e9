"""Laws 1, 3 and 5 over the compiled step, without any allowance for near-ties: tokens, log-probabilities and margins
are the same bits whatever drafts, batches, caches, chunks, preempts and computes beside a request."""

from __future__ import annotations

import dataclasses
import random

import pytest
from compiled_engine import (
    DRAFTERS,
    assert_same,
    compiled_core,
    drafters,
    plain_answers,
    run_counting,
    threads,
)
from compiled_models import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import EOS, VOCAB, Answer, Sizes, assert_all_free, collect, request, run

from engine.sampling_params import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("no_drafter_fails")

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy_penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "filters": SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 4.0), (9, -100.0), (EOS, 2.0)), min_tokens=5),
}
KINDS = (*DRAFTERS, "oracle")


@pytest.fixture(params=[False, True], ids=["float", "int8"])
def is_int8(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


def make_requests(max_tokens: int = 24) -> list[EngineRequest]:
    """One of each sampling, with prompts of all lengths, some of which begin alike."""
    draw = random.Random(5)
    shared = [draw.randrange(VOCAB - 1) for _ in range(40)]
    requests = []
    for index, (name, sampling) in enumerate(SAMPLINGS.items()):
        prompt = shared[: (0, 20, 40)[index % 3]] + [draw.randrange(VOCAB - 1) for _ in range(1 + 4 * index)]
        wanted = dataclasses.replace(
            sampling, seed=1000 + index, max_tokens=max_tokens, logprobs=2, return_margins=True,
            prompt_logprobs=1 if index % 3 == 2 else None,
        )  # fmt: skip
        requests.append(request(name, prompt, wanted))
    return requests


def accepted(answers: dict[str, Answer]) -> int:
    return sum(answer.accepted for answer in answers.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_nothing(kind: str, family: str, is_int8: bool) -> None:
    requests = make_requests()
    expected = plain_answers(family, is_int8, requests)
    assert sum(len(answer.ids) for answer in expected.values()) > 100
    core = compiled_core(family, is_int8, drafters(kind, family, expected, 5))
    found = run(core, requests)
    assert_same(found, expected)
    assert_all_free(core)
    if kind in ("oracle", "all"):
        assert accepted(found) > sum(len(answer.ids) for answer in found.values()) / 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [5, 17, 200])
def test_batches_and_chunks_change_nothing(budget: int, family: str, is_int8: bool) -> None:
    requests = make_requests()
    sizes = Sizes(prefix_caching=False, max_num_batched_tokens=budget)
    expected = plain_answers(family, is_int8, requests)
    assert_same(run(compiled_core(family, is_int8, (), sizes), requests), expected)
    assert_same(run(compiled_core(family, is_int8, (), sizes), requests[::-1]), expected)


@pytest.mark.parametrize("kind", ["none", "all"])
def test_threads_change_nothing(kind: str, is_int8: bool) -> None:
    requests = make_requests()
    expected = plain_answers("llama", is_int8, requests)
    with threads(2):
        core = compiled_core("llama", is_int8, drafters(kind, "llama", expected, 4))
    assert_same(run(core, requests), expected)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["none", "oracle", "medusa"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    prefix_caching: bool, kind: str, family: str, is_int8: bool
) -> None:
    requests = [
        request(
            f"r{i}",
            [7, 3, 9, i, 3, 9] * (1 + i),
            SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=60, ignore_eos=True, logprobs=1),
        )
        for i in range(6)
    ]
    expected = plain_answers(family, is_int8, requests)
    sizes = Sizes(num_blocks=11, prefix_caching=prefix_caching, max_num_batched_tokens=40)
    core = compiled_core(family, is_int8, drafters(kind, family, expected, 8), sizes)
    answers, preemptions = run_counting(core, requests, spoils=not prefix_caching)
    assert preemptions > 1
    assert_same(answers, expected)
    assert_all_free(core)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "oracle"])
def test_an_answer_from_the_prefix_cache_is_the_same(kind: str, family: str, is_int8: bool) -> None:
    """Also where the cached blocks were written by drafted rows."""
    requests = make_requests()
    expected = plain_answers(family, is_int8, requests)
    longer = [
        dataclasses.replace(
            one,
            request_id=f"{one.request_id} again",
            prompt_token_ids=(*one.prompt_token_ids, *expected[one.request_id].ids),
            sampling=dataclasses.replace(one.sampling, prompt_logprobs=None),
        )
        for one in requests
    ]
    expected = expected | plain_answers(family, is_int8, longer)
    core = compiled_core(family, is_int8, drafters(kind, family, expected, 3))
    run(core, requests)
    found = run(core, longer)
    assert_same(found, {one.request_id: expected[one.request_id] for one in longer})
    cached = [found[one.request_id].outputs[0].num_cached_tokens for one in longer]
    assert all(count >= (len(one.prompt_token_ids) - 1) // 16 * 16 for count, one in zip(cached, longer, strict=True))
    assert sum(cached) > 300


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_interleavings(is_int8: bool, data: st.DataObject) -> None:
    """Adds, aborts, chunks, preemptions and cache hits at random."""
    requests, family = make_requests(), data.draw(st.sampled_from(FAMILIES), label="family")
    expected = plain_answers(family, is_int8, requests)
    sizes = Sizes(
        num_blocks=data.draw(st.integers(10, 30), label="blocks"),
        max_num_seqs=data.draw(st.integers(1, 7), label="seqs"),
        max_num_batched_tokens=data.draw(st.integers(3, 60), label="budget"),
        prefix_caching=data.draw(st.booleans(), label="prefix caching"),
        max_draft_tokens=data.draw(st.integers(1, 12), label="draft"),
    )
    seed = data.draw(st.integers(0, 10_000), label="seed")
    kind = data.draw(st.sampled_from(KINDS), label="drafter")
    core = compiled_core(family, is_int8, drafters(kind, family, expected, seed), sizes)
    draw = random.Random(seed)
    pending, answers = draw.sample(requests, len(requests)), {}
    aborted: set[str] = set()
    for _ in range(3000):
        if pending and draw.random() < 0.4:
            core.add(pending.pop())
        if draw.random() < 0.03:
            victim = draw.choice(requests).request_id
            if victim not in [one.request_id for one in pending]:
                core.abort(victim)
                aborted.add(victim)
        collect(answers, core.step().outputs)
        if not pending and not core.has_work:
            break
    assert_all_free(core)
    assert_same(answers, {name: one for name, one in expected.items() if answers[name].finish_reason != "abort"})
    for name, answer in answers.items():
        if answer.finish_reason == "abort":
            assert name in aborted
            assert answer.ids == expected[name].ids[: len(answer.ids)]
