"""What the compiled step computes, against transformers' own eager modules: logits, hidden states, moved entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_models import (
    FAMILIES,
    WINDOW,
    Bench,
    Part,
    assert_close,
    eager,
    library,
    packed,
    random_model,
    random_tree,
    text,
    tree_logits,
)
from transformers import PreTrainedModel

from engine.compiled.runner import CompiledRunner
from engine.errors import ModelLoadError
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.tree import ROOT, DraftTree

SHAPES: dict[str, dict[str, Any]] = {
    "groups of 1": {"num_key_value_heads": 4},
    "groups of 2": {},
    "groups of 3": {"num_attention_heads": 6, "hidden_size": 96},
    "heads of 32": {"head_dim": 32},
    "heads of 64": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
    "tied": {"tie_word_embeddings": True},
}


def model_of(family: str, shape: str) -> PreTrainedModel:
    return random_model(family, **SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager_ones_however_the_rows_are_cut(family: str, shape: str) -> None:
    """One long prompt at once, in chunks, and under a tree."""
    model = model_of(family, shape)
    tokens, tree = text(75), random_tree(13, seed=4)
    expected = eager(model, tokens)
    bench = Bench(packed(model))
    assert_close(bench.prefill(bench.request(tokens)), expected)
    request = bench.request(tokens)
    assert_close(bench.prefill(request, (7, 1, 20, 3)), expected)
    rows = bench.logits(Part(request, len(tokens) - 1, len(tokens), tree))[0]
    assert_close(rows, torch.cat([expected[-1:], tree_logits(model, tokens, tree)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_one_batch_do_not_see_each_other(family: str) -> None:
    """A prompt, a chunk, a lone token and trees together."""
    model = model_of(family, "groups of 3")
    bench = Bench(packed(model))
    tokens = [text(length, seed=length) for length in (40, 61, 17, 33, 1)]
    requests = [bench.request(one) for one in tokens]
    trees = [None, None, random_tree(9, seed=1), random_tree(5, seed=2), random_tree(3, seed=3)]
    starts = [0, 30, 16, 32, 0]
    for request, start in zip(requests, starts, strict=True):
        if start:
            bench.forward(Part(request, 0, start))
    parts = [
        Part(request, start, request.num_tokens, tree)
        for request, start, tree in zip(requests, starts, trees, strict=True)
    ]
    for part, found in zip(parts, bench.logits(*parts), strict=True):
        expected = eager(model, part.request.token_ids)[part.start :]
        if part.tree is not None:
            expected = torch.cat([expected, tree_logits(model, part.request.token_ids, part.tree)])
        assert_close(found, expected)


def test_a_window_ends_where_it_should() -> None:
    """A token just outside of all windows changes nothing; one further in does (two layers see twice as far)."""
    model = random_model("mistral", num_hidden_layers=1)
    bench = Bench(packed(model))
    tokens = text(60)

    def last(changed: int) -> torch.Tensor:
        other = list(tokens)
        other[changed] = (other[changed] + 1) % 50
        return bench.logits(Part(bench.request(other, room=0), 0, 60))[0][-1]

    plain = bench.logits(Part(bench.request(tokens, room=0), 0, 60))[0][-1]
    assert torch.equal(last(60 - WINDOW - 1), plain)
    assert not torch.equal(last(60 - WINDOW), plain)


def test_biases_of_every_projection_count() -> None:
    model = random_model("llama", attention_bias=True, mlp_bias=True)
    bench = Bench(packed(model))
    assert_close(bench.prefill(bench.request(text(30))), eager(model, text(30)))


def test_layers_with_and_without_a_window() -> None:
    """Qwen decides layer by layer."""
    model = random_model("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1)
    weights = packed(model)
    assert weights.dimensions.windows == (0, 9)
    bench = Bench(weights)
    assert_close(bench.prefill(bench.request(text(50))), eager(model, text(50)))


def test_scaled_positions() -> None:
    """A RoPE that is not the plain one comes from the architecture's own table."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    model = random_model_with_rope(rope)
    bench = Bench(packed(model))
    found, expected = bench.prefill(bench.request(text(50))), eager(model, text(50))
    assert_close(found, expected)
    assert float((eager(random_model("llama"), text(50)) - expected).abs().max() / expected.abs().max()) > 1e-2


def random_model_with_rope(rope: dict[str, Any]) -> PreTrainedModel:
    # Not hashable, so past the cache.
    return random_model.__wrapped__("llama", rope_parameters=rope)


def states_of(model: PreTrainedModel, **inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output of each layer, then the last norm's: [tokens, hidden] each."""
    any_model: Any = model
    found: list[torch.Tensor] = []
    modules = [*any_model.model.layers, any_model.model.norm]

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [module.register_forward_hook(keep) for module in modules]
    with torch.inference_mode():
        any_model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_eager_ones(family: str) -> None:
    model = random_model(family, num_hidden_layers=3)
    bench = Bench(packed(model), hidden_layers=(2, 0))
    tokens = text(37)
    expected = states_of(model, input_ids=torch.tensor([tokens]))
    # Another request comes first, so rows of the batch and of the request are not the same.
    other = bench.request(text(5, seed=9))
    hidden = bench.forward(Part(other, 0, 5), Part(bench.request(tokens), 0, 37)).hidden
    assert hidden is not None
    assert_close(hidden.final[5:], expected[-1])
    assert set(hidden.layers) == {0, 2}
    for layer in (0, 2):
        assert_close(hidden.layers[layer][5:], expected[layer])


def test_hidden_states_are_there_when_they_are_needed_alone() -> None:
    weights = packed(random_model("llama"))
    plain, asked = Bench(weights), Bench(weights, needs_hidden=True)
    assert plain.forward(Part(plain.request(text(3)), 0, 3)).hidden is None
    hidden = asked.forward(Part(asked.request(text(3)), 0, 3)).hidden
    assert hidden is not None
    assert hidden.layers == {}
    assert hidden.final.shape == (3, 64)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("embedded", [False, True])
def test_extra_rows_see_their_path_and_change_nothing_else(family: str, embedded: bool) -> None:
    model = random_model(family)
    bench = Bench(packed(model), needs_hidden=True)
    tokens, tree = text(41), random_tree(5, seed=6)
    request = bench.request(tokens)
    expected = bench.logits(Part(request, 0, 41, tree))[0]
    torch.manual_seed(5)
    vectors = torch.randn(4, 64) * 0.1 if embedded else None
    extra = ExtraRows((3, 9, 27, 3), (ROOT, 2, len(tree) + 1, len(tree)), vectors)
    result = bench.forward(Part(request, 0, 41, tree, extra))
    assert torch.equal(result.logits, expected)
    assert result.hidden is not None
    table: torch.Tensor = model.get_input_embeddings().weight
    rows = table[list(extra.tokens)] if vectors is None else vectors
    below = tree.path_tokens(2)
    for row, (path, extras) in enumerate([([], [0]), (below, [1]), (below, [1, 2]), ([], [0, 3])]):
        inputs = torch.cat([table[[*tokens, *path]], rows[extras]])[None]
        assert_close(result.hidden.final[41 + len(tree) + row], states_of(model, inputs_embeds=inputs)[-1][-1])


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_accepted_branch_moves_onto_entries_that_move_too(family: str, is_int8: bool) -> None:
    """Nodes 1, 2 and 3 become entries 0, 1 and 2 of the tree's: each source but the first is a target."""
    bench = Bench(packed(random_model(family), is_int8=is_int8))
    tokens, branch = text(30), text(3, seed=8)
    tree = DraftTree()
    tree.add(59, ROOT, 0.9, "test")
    for depth, token in enumerate(branch):
        tree.add(token, ROOT if depth == 0 else depth, 0.5, "test")
    whole = bench.request([*tokens, *branch, 5])
    expected = bench.prefill(whole)[-1]
    request = bench.request([*tokens, *branch, 5])
    request.token_ids = request.token_ids[:30]
    bench.forward(Part(request, 0, 30, tree))
    bench.runner.move_kv(bench.slots(request, [31, 32, 33]), bench.slots(request, [30, 31, 32]))
    request.token_ids = [*tokens, *branch, 5]
    assert torch.equal(bench.logits(Part(request, 33, 34))[0][-1], expected)


def test_entries_can_change_places() -> None:
    """What a row sees of its past has no order of its own: RoPE is in the keys."""
    bench = Bench(packed(random_model("llama")))
    request = bench.request(text(40))
    before = bench.prefill(request)[-1]
    first, second = bench.slots(request, [3, 17, 30]), bench.slots(request, [17, 30, 3])
    stored = [array.copy() for array in (bench.runner._kv.keys, bench.runner._kv.values)]
    bench.runner.move_kv(first, second)
    assert not (bench.runner._kv.keys == stored[0]).all()
    assert_close(bench.logits(Part(request, 39, 40))[0][0], before, 1e-5)
    bench.runner.move_kv(second, first)
    assert torch.equal(bench.logits(Part(request, 39, 40))[0][0], before)


def test_nothing_to_move_is_no_error() -> None:
    Bench(packed(random_model("llama"))).runner.move_kv([], [])


def test_a_step_that_needs_no_logits_has_none() -> None:
    bench = Bench(packed(random_model("llama")))
    request = bench.request(text(20))
    expected = bench.prefill(request)[-1]
    quiet = bench.request(text(20), keeps_all=False)
    assert bench.forward(Part(quiet, 0, 19)).logits.shape == (0, 61)
    assert torch.equal(bench.forward(Part(quiet, 19, 20)).logits[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_branch_is_a_prefix_that_is_not_yet_sure(family: str) -> None:
    """It is longer than Mistral's window, whose beginning then lies within the draft."""
    model = random_model(family)
    bench = Bench(packed(model))
    tokens, tree, right, node = text(50), DraftTree(), [], ROOT
    for token in tokens[20:]:
        tree.add((token + 1) % 60, node, 0.5, "test")  # so that the branch has gaps
        node = tree.add(token, node, 0.5, "test")
        right.append(node)
    request = bench.request(tokens[:20], room=80)
    bench.forward(Part(request, 0, 19))
    rows = bench.logits(Part(request, 19, 20, tree))[0]
    assert_close(rows[[0, *(1 + node for node in right)]], eager(model, tokens)[19:])


def test_no_room_for_the_cache_is_one_sentence() -> None:
    with pytest.raises(
        ModelLoadError, match=r"not enough memory for a KV cache of .* set engine.kv_cache_memory lower"
    ):
        CompiledRunner(library(), packed(random_model("llama")), num_slots=1 << 50, block_size=16, threads=1)
