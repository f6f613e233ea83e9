"""A request whose numbers are not finite takes nobody along, and leaves nothing behind in the cache."""

from __future__ import annotations

import pytest
import torch
from compiled_engine import assert_same, compiled_core, loaded_model, plain_answers
from compiled_models import KERNELS, Bench, Part, library, packed, random_model, random_tree, text
from tiny_engine import request, run

from engine.attention.check import check_tokens
from engine.backend import CompiledBackend, RunnerNeeds
from engine.errors import ModelLoadError
from engine.sampling_params import SamplingParams
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.tree import ROOT
from engine.step_bench import StepBench

POISON = 59  # ``text`` has only lower ids where it is told so
BAD = [float("nan"), float("inf"), -float("inf")]


def clean(length: int, seed: int = 0) -> list[int]:
    return [token % POISON for token in text(length, seed)]


def poisoned(is_int8: bool, kernels: str | None, bad: float, family: str = "llama") -> Bench:
    """A bench whose token POISON has an embedding of which one number is ``bad``."""
    weights = packed(random_model(family), is_int8=is_int8, kernels=kernels)
    weights.embedding.numpy()[POISON, 17] = bad
    return Bench(weights, kernels=kernels, needs_hidden=True)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_only_the_request_itself_has_nan(is_int8: bool, kernels: str, bad: float) -> None:
    bench = poisoned(is_int8, kernels, bad)
    tokens = [clean(30, 1), clean(9, 2), [*clean(20, 3), POISON, *clean(5, 4)], clean(17, 5)]
    requests = [bench.request(one) for one in tokens]
    trees = [random_tree(6, seed=1, vocab=POISON), None, random_tree(4, seed=2, vocab=POISON), None]
    alone = [bench.logits(Part(one, 0, one.num_tokens, tree))[0] for one, tree in zip(requests, trees, strict=True)]
    parts = [Part(one, 0, one.num_tokens, tree) for one, tree in zip(requests, trees, strict=True)]
    found = bench.logits(*parts)
    for index in (0, 1, 3):
        assert bool(found[index].isfinite().all())
        assert torch.equal(found[index], alone[index])
    # Every number of every row that can see it, so that no token of them could be taken for an answer.
    assert bool(found[2][20:].isnan().all())
    assert bool(alone[2][20:].isnan().all())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_drafted_token_that_gives_nan_spoils_its_branch_alone(is_int8: bool, kernels: str) -> None:
    bench = poisoned(is_int8, kernels, float("nan"))
    tokens, tree = clean(30), random_tree(8, seed=1, vocab=POISON)
    request = bench.request(tokens)
    expected = bench.logits(Part(request, 0, 30, tree))[0]
    worse = tree.copy()
    bad = worse.add(POISON, 2, 0.1, "test")
    worse.add(3, bad, 0.1, "test")
    worse.add(5, 3, 0.1, "test")
    found = bench.logits(Part(request, 0, 30, worse))[0]
    assert torch.equal(found[:38], expected)
    assert bool(found[38:40].isnan().all())
    assert bool(found[40].isfinite().all())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_extra_rows_with_nan_spoil_themselves_alone(is_int8: bool, kernels: str) -> None:
    bench = Bench(packed(random_model("mistral"), is_int8=is_int8, kernels=kernels), kernels=kernels, needs_hidden=True)
    tokens, tree, other = text(30), random_tree(5, seed=2), text(11, seed=4)
    request, neighbour = bench.request(tokens), bench.request(other)
    expected = bench.logits(Part(request, 0, 30, tree), Part(neighbour, 0, 11))
    vectors = torch.full((2, 64), float("nan"))
    extra = ExtraRows((1, 1), (ROOT, 1), vectors)
    parts = (Part(request, 0, 30, tree, extra), Part(neighbour, 0, 11))
    result = bench.forward(*parts)
    assert torch.equal(result.logits, torch.cat(expected))
    assert result.hidden is not None
    assert bool(result.hidden.final[35:37].isnan().all())
    assert bool(result.hidden.final[:35].isfinite().all())
    assert bool(result.hidden.final[37:].isfinite().all())


@pytest.mark.parametrize("is_int8", [False, True])
def test_what_it_leaves_in_its_blocks_is_never_seen(is_int8: bool) -> None:
    bench = poisoned(is_int8, None, float("nan"))
    tokens = clean(40)
    expected = bench.prefill(bench.request(tokens))
    bad = bench.request([POISON] * 40)
    assert bool(bench.prefill(bad).isnan().all())
    bench.free(bad)
    after = bench.request(tokens)
    assert set(after.block_ids) & set(bad.block_ids)
    assert torch.equal(bench.prefill(after, (7,)), expected)
    tree = random_tree(6, seed=3, vocab=POISON)
    assert bool(bench.logits(Part(after, 39, 40, tree))[0].isfinite().all())


@pytest.mark.parametrize("is_int8", [False, True])
def test_an_engine_ends_that_request_with_an_error_and_the_others_as_ever(is_int8: bool) -> None:
    # A prompt of ordinary tokens cannot draw the poisoned one.
    sampling = SamplingParams(
        temperature=0.8, seed=4, max_tokens=20, ignore_eos=True, logprobs=1, logit_bias=((POISON, -100.0),)
    )
    good = [request(f"r{i}", clean(5 + 9 * i, i), sampling) for i in range(3)]
    expected = plain_answers("llama", is_int8, good)
    core = compiled_core("llama", is_int8)
    table = core._runner._weights.embedding.numpy()  # type: ignore[attr-defined]
    kept = table[POISON].copy()
    table[POISON] = float("nan")
    try:
        found = run(core, [good[0], request("bad", [1, POISON, 2], sampling), *good[1:]])
    finally:
        table[POISON] = kept
    assert found.pop("bad").finish_reason == "error"
    assert_same(found, expected)


def test_a_checkpoint_with_a_weight_that_is_not_finite_is_refused() -> None:
    """int8 has no word for it, so it would otherwise pass for a number."""
    for quantization in ("none", "int8"):
        loaded = loaded_model("llama")
        loaded.model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
        backend = CompiledBackend(loaded, library(), quantization)
        bench = StepBench(backend.make_runner(RunnerNeeds(num_slots=64, block_size=16)), 16, 4)
        with pytest.raises(ModelLoadError, match="differs from the model's own"):
            backend.check(bench.logits(check_tokens(61)))
