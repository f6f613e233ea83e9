"""Law 1 and law 5: the same tokens whatever drafts, batches, caches, chunks and preempts beside a request."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import (
    ARCHITECTURES,
    EOS,
    VOCAB,
    Answer,
    HostileDrafter,
    OracleDrafter,
    Sizes,
    assert_all_free,
    collect,
    request,
    run,
    tiny_core,
    tiny_model,
)
from tiny_heads import markov_drafter, medusa_drafter, mtp_drafter, own_kv_drafter

from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.spec_decode.suffix import SuffixDrafter

pytestmark = pytest.mark.usefixtures("no_drafter_fails")

KINDS = [
    *("suffix", "oracle", "hostile", "merged", "medusa", "medusa_suffix", "medusa_hostile"),
    *("markov", "markov_hostile", "mtp", "mtp_hostile"),
]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.1, top_p=0.8),
    "min_p": SamplingParams(temperature=1.3, min_p=0.05),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    "greedy_penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 4.0), (9, -100.0), (EOS, 2.0))),
    "min_tokens": SamplingParams(temperature=1.0, logit_bias=((EOS, 6.0),), min_tokens=7),
    "stop_ids": SamplingParams(temperature=1.0, stop_token_ids=(4, 11, 30), min_tokens=2),
    "bad_words": SamplingParams(temperature=0.7, bad_words=((5,), (7, 8), (1, 2, 3))),
    "ignore_eos": SamplingParams(temperature=0.9, ignore_eos=True, logit_bias=((EOS, 3.0),)),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=((2, 1.0),),
        bad_words=((6, 6),),
        min_tokens=3,
    ),
}


def make_requests(seed: int, count: int, max_tokens: int = 24) -> list[EngineRequest]:
    """Requests with all kinds of sampling; several share a beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCAB - 1) for _ in range(14)]
    kinds = list(SAMPLINGS.values())
    requests = []
    for index in range(count):
        prompt = shared[: draw.choice([0, 5, 14])] + [draw.randrange(VOCAB - 1) for _ in range(draw.randint(1, 20))]
        sampling = dataclasses.replace(
            kinds[(seed + index) % len(kinds)], seed=draw.getrandbits(64), max_tokens=draw.randint(1, max_tokens)
        )
        requests.append(request(f"r{index}", prompt, sampling))
    return requests


def plain_answers(architecture: str, requests: list[EngineRequest]) -> dict[str, Answer]:
    """Each request alone, on an engine of its own that neither drafts nor caches: the reference."""
    sizes = Sizes(prefix_caching=False, max_draft_tokens=0)
    core = tiny_core(architecture, (), sizes)
    answers: dict[str, Answer] = {}
    for one in requests:
        off = dataclasses.replace(one, speculation=SpeculationParams(enabled=False))
        answers |= run(core, [off])
    return answers


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, reference in expected.items():
        assert found[name].ids == reference.ids, name
        assert found[name].finish_reason == reference.finish_reason, name


def drafters_for(kind: str, truth: dict[str, Answer], seed: int, architecture: str = "llama") -> list[object]:
    if kind.startswith("medusa"):
        medusa = medusa_drafter(architecture, coupling=seed % 2 == 0, draft_vocab=None if seed % 3 else 40)
        others = {"medusa": [], "medusa_suffix": [SuffixDrafter()], "medusa_hostile": [HostileDrafter(seed)]}
        return [*others[kind], medusa]
    if kind.startswith(("markov", "mtp", "own")):
        vocab = None if seed % 3 else 40
        make = {"markov": markov_drafter, "mtp": mtp_drafter, "own": own_kv_drafter}[kind.removesuffix("_hostile")]
        made = make(tiny_model(architecture), coupling=seed % 2 == 0, draft_vocab=vocab)
        return [HostileDrafter(seed), made] if kind.endswith("_hostile") else [made]
    oracle = OracleDrafter({name: answer.ids for name, answer in truth.items()}, seed)
    return {
        "suffix": [SuffixDrafter()],
        "oracle": [oracle],
        "hostile": [HostileDrafter(seed)],
        "merged": [SuffixDrafter(), oracle, HostileDrafter(seed)],
    }[kind]


@pytest.mark.parametrize(
    ("architecture", "kind"), [*itertools.product(ARCHITECTURES, KINDS), ("llama", "own"), ("gemma3", "own")]
)
def test_every_sampling_parameter_with_every_drafter(architecture: str, kind: str) -> None:
    requests = [
        request(f"{name}", [7, 3, 9, 3, 9, index], dataclasses.replace(sampling, seed=1000 + index, max_tokens=20))
        for index, (name, sampling) in enumerate(SAMPLINGS.items())
    ]
    expected = plain_answers(architecture, requests)
    core = tiny_core(architecture, drafters_for(kind, expected, 5, architecture), Sizes(num_blocks=400))
    found = run(core, requests)
    assert_same(found, expected)
    assert_all_free(core)
    if kind in ("oracle", "merged"):
        accepted = sum(answer.accepted for answer in found.values())
        assert accepted > sum(len(answer.ids) for answer in found.values()) / 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("kind", ["suffix", "oracle", "medusa_suffix"])
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    architecture: str, prefix_caching: bool, kind: str
) -> None:
    requests = [
        request(f"r{i}", [7, 3, 9, i, 3, 9], SamplingParams(temperature=0.9, seed=i, max_tokens=60, ignore_eos=True))
        for i in range(6)
    ]
    expected = plain_answers(architecture, requests)
    sizes = Sizes(num_blocks=29, prefix_caching=prefix_caching, max_num_batched_tokens=24)
    core = tiny_core(architecture, drafters_for(kind, expected, 8, architecture), sizes)
    answers: dict[str, Answer] = {}
    preemptions = 0
    for one in requests:
        core.add(one)
    while core.has_work:
        step = core.step()
        preemptions += step.stats.preemptions
        collect(answers, step.outputs)
        # What a freed block held must not be what makes a resumed request right.
        for tensor in (*core._runner._cache.keys, *core._runner._cache.values):
            free = [block * 4 + offset for block in core.scheduler.pool._free for offset in range(4)]
            if not prefix_caching:
                tensor[:, free] = 77.0
    assert preemptions > 3
    assert_same(answers, expected)
    assert_all_free(core)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rejection_rule_ends_every_request_and_agrees_where_it_must(architecture: str) -> None:
    """It is not seed-identical; greedily it must be, it must accept drafts, and it must repeat itself."""
    requests = make_requests(3, 6)
    greedy = [
        dataclasses.replace(one, request_id=f"g{i}", sampling=dataclasses.replace(one.sampling, temperature=0.0))
        for i, one in enumerate(requests)
    ]
    expected = plain_answers(architecture, [*requests, *greedy])

    def answer() -> dict[str, Answer]:
        sizes = Sizes(num_blocks=60, verifier="rejection")
        core = tiny_core(architecture, drafters_for("oracle", expected, 5), sizes)
        found = run(core, [*requests, *greedy])
        assert_all_free(core)
        return found

    found, again = answer(), answer()
    assert_same({name: found[name] for name in expected}, {f"g{i}": expected[f"g{i}"] for i in range(6)})
    assert sum(found[one.request_id].accepted for one in requests) > 0
    assert all(found[name].ids == again[name].ids for name in expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_interleavings(architecture: str, data: st.DataObject) -> None:
    """Adds, aborts, chunks, preemptions and cache hits at random: laws 1, 3, 4 and 5 together."""
    seed = data.draw(st.integers(0, 10_000), label="seed")
    requests = make_requests(seed, data.draw(st.integers(2, 7), label="requests"))
    expected = plain_answers(architecture, requests)
    sizes = Sizes(
        num_blocks=data.draw(st.integers(29, 60), label="blocks"),
        max_num_seqs=data.draw(st.integers(1, 6), label="seqs"),
        max_num_batched_tokens=data.draw(st.integers(3, 40), label="budget"),
        prefix_caching=data.draw(st.booleans(), label="prefix caching"),
        max_draft_tokens=data.draw(st.integers(0, 12), label="draft"),
    )
    kind = data.draw(st.sampled_from((*KINDS, "own")), label="drafter")
    core = tiny_core(architecture, drafters_for(kind, expected, seed, architecture), sizes)
    draw = random.Random(seed)
    pending, aborted, answers = list(requests), set(), {}
    for _ in range(5000):
        if pending and draw.random() < 0.4:
            core.add(pending.pop(0))
        if draw.random() < 0.05 and len(pending) < len(requests):
            victim = draw.choice(requests[: len(requests) - len(pending)]).request_id
            core.abort(victim)
            aborted.add(victim)
        collect(answers, core.step().outputs)
        core.scheduler.pool.check_invariants()
        if not pending and not core.has_work:
            break
    assert_all_free(core)
    for one in requests:
        found, reference = answers[one.request_id], expected[one.request_id]
        assert found.finish_reason is not None
        if found.finish_reason == "abort":
            assert one.request_id in aborted
            assert found.ids == reference.ids[: len(found.ids)]
        else:
            assert found.ids == reference.ids
            assert found.finish_reason == reference.finish_reason
