"""Public EAGLE-3 folders: each form gives the logits that the format means, and what is wrong is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_kv import causal, drafted_outputs, gated, rms, rotated
from tiny_eagle import (
    DRAFT_IDS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Tensors,
    authors_config,
    eagle_tensors,
    speculators_config,
    tiny_target,
    write_eagle,
)
from tiny_engine import VOCAB, as_loaded

from engine.config import SpeculationConfig
from engine.errors import ModelLoadError
from engine.loading.eagle import EagleModule
from engine.loading.heads import find_heads, output_head, require_heads_folder
from heads.checkpoint import LoadedHeads, load_heads
from heads.config import HeadsConfig
from heads.eagle import parse_eagle
from heads.errors import HeadsError
from heads.lm_head import DraftLmHead

TOKENS = torch.tensor([7, 3, 60, 3, 21, 14, 9, 0, 33, 8, 52, 2])
DEPTHS = 3
torch.set_num_threads(1)


def found_in(folder: Path, **changes: Any) -> LoadedHeads:
    heads = find_heads(str(folder), as_loaded(tiny_target(**changes), "tiny"))
    assert heads is not None
    assert isinstance(heads.heads, EagleModule)
    return heads


def base_states(width: int = HIDDEN) -> dict[int, torch.Tensor]:
    draw = torch.Generator().manual_seed(8)
    return {layer: torch.randn(len(TOKENS), width, generator=draw) for layer in range(LAYERS)}


def meant(
    w: Tensors,
    embedding: torch.Tensor,
    fused: torch.Tensor,
    length: int,
    *,
    norm_before_residual: bool = False,
    theta: float = 500.0,
) -> tuple[torch.Tensor, ...]:
    """(outputs [DEPTHS, HIDDEN], keys, values) of a chain behind ``length`` tokens, by whole passes without a cache.

    w: under the block's plain names. fused: [n, HIDDEN], what fc makes of the base model's states.
    """
    before, outputs = fused[: length - 1], []
    keys = values = before
    for depth in range(DEPTHS):
        positions = torch.arange(1, length + depth)
        normed = rms(before, w["hidden_norm.weight"], 1e-5)
        joined = torch.cat([rms(embedding[TOKENS[positions]], w["input_layernorm.weight"], 1e-5), normed], dim=-1)
        queries = (joined @ w["self_attn.q_proj.weight"].T).view(-1, HEADS, HEAD_DIM)
        keys = (joined @ w["self_attn.k_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        values = (joined @ w["self_attn.v_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM)
        if "self_attn.q_norm.weight" in w:
            queries = rms(queries, w["self_attn.q_norm.weight"], 1e-5)
            keys = rms(keys, w["self_attn.k_norm.weight"], 1e-5)
        queries, keys = rotated(queries, positions, theta), rotated(keys, positions, theta)
        mixed = causal(queries, keys, values, HEAD_DIM**-0.5) @ w["self_attn.o_proj.weight"].T
        x = (normed if norm_before_residual else before) + mixed
        x = x + gated(rms(x, w["post_attention_layernorm.weight"], 1e-5), w, "mlp")
        outputs.append(rms(x[-1], w["norm.weight"], 1e-5))
        before = torch.cat([before, x[-1:]])  # what goes on is not normed
    return torch.stack(outputs), keys, values


def require_meant(
    heads: LoadedHeads, tensors: Tensors, layers: tuple[int, ...], depth: int = LAYERS, **how: Any
) -> None:
    """The module drafts the logits that ``tensors`` mean. layers: of the base model, of ``depth``, whose outputs it
    fuses."""
    module, block = heads.heads, "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    assert module.hidden_layers == layers
    w = {name.removeprefix(block): tensor for name, tensor in tensors.items()}
    base = tiny_target(num_hidden_layers=depth)
    embedding = w.get("embed_tokens.weight", base.get_input_embeddings().weight)
    states = base_states(w["fc.weight"].shape[1] // len(layers))
    joined = torch.cat([states[layer] for layer in layers], dim=-1)
    if "input_norm.weight" in w:
        joined = rms(joined, w["input_norm.weight"], 1e-5)
    fused = joined @ w["fc.weight"].T
    condition = module.condition(torch.full((len(TOKENS), HIDDEN), torch.nan), states)
    torch.testing.assert_close(condition, fused, atol=1e-5, rtol=1e-5)
    ids = heads.token_ids.tolist() if heads.token_ids is not None else list(range(VOCAB))
    if heads.lm_head is None:
        lm_head, matrix = DraftLmHead(output_head(base), heads.token_ids), base.lm_head.weight[ids]
    else:
        lm_head = DraftLmHead.of_module(heads.lm_head, heads.token_ids, VOCAB)
        drafts = DRAFT_IDS if "d2t" in w else list(range(VOCAB))
        matrix = torch.stack([w["lm_head.weight"][drafts.index(token)] for token in ids])
    assert (lm_head.token_ids.tolist(), lm_head.vocab_size) == (ids, VOCAB)
    for length in (2, 3, 7, 9):
        outputs, entries = drafted_outputs(module, condition, TOKENS, length, DEPTHS)
        expected, keys, values = meant(w, embedding, fused, length, **how)
        for depth in range(1, DEPTHS + 1):
            logits = module.logits(lm_head, outputs[depth - 1 : depth], depth)[0]
            torch.testing.assert_close(logits, matrix @ expected[depth - 1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(entries.keys), keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(entries.values), values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors", "shards"])
@pytest.mark.parametrize("block", ["midlayer.", "layers.0."])
def test_the_authors_form(tmp_path: Path, block: str, file: str) -> None:
    """Which reads what goes into layers 2, 4 and 5 of a base model of 8."""
    tensors = eagle_tensors(block=block, draft_ids=DRAFT_IDS)
    folder = write_eagle(tmp_path, tensors, authors_config(), file)
    heads = found_in(folder, num_hidden_layers=8)
    assert (heads.config.method, heads.config.hidden_size, heads.config.vocab_size) == ("eagle", HIDDEN, VOCAB)
    assert heads.token_ids is not None
    assert heads.token_ids.tolist() == sorted(DRAFT_IDS)
    require_meant(heads, tensors, (1, 3, 4), depth=8)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("query_norms", [False, True])
def test_the_form_of_speculators(tmp_path: Path, query_norms: bool, norm_before_residual: bool) -> None:
    tensors = eagle_tensors(block="layers.0.", draft_ids=DRAFT_IDS, query_norms=query_norms)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    config = speculators_config(
        {"model_type": "qwen3" if query_norms else "llama"},
        norm_before_residual=norm_before_residual,
        eagle_aux_hidden_state_layer_ids=[5, 1, 3],
    )
    heads = found_in(write_eagle(tmp_path, tensors, config))
    require_meant(heads, tensors, (0, 2, 4), norm_before_residual=norm_before_residual)


def test_fused_states_may_be_normed_and_the_rotation_be_another(tmp_path: Path) -> None:
    tensors = eagle_tensors(block="layers.0.", draft_ids=DRAFT_IDS)
    tensors["input_norm.weight"] = torch.rand(3 * HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5
    layer = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}}
    config = speculators_config(layer, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[1, 3, 6])
    heads = found_in(write_eagle(tmp_path, tensors, config))
    require_meant(heads, tensors, (0, 2, 5), norm_before_residual=True, theta=70.0)


@pytest.mark.parametrize("has_lm_head", [False, True])
def test_the_whole_vocabulary_and_the_models_lm_head(tmp_path: Path, has_lm_head: bool) -> None:
    tensors = eagle_tensors()
    if not has_lm_head:
        del tensors["lm_head.weight"]
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}
    config = authors_config(draft_vocab_size=VOCAB, eagle_config=ids)
    heads = found_in(write_eagle(tmp_path, tensors, config))
    assert heads.token_ids is None
    require_meant(heads, tensors, (1, 3, 5))


def test_a_module_may_be_narrower_than_its_model(tmp_path: Path) -> None:
    tensors = eagle_tensors(draft_ids=DRAFT_IDS, target=24)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    config = authors_config(target_hidden_size=24, eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    heads = found_in(write_eagle(tmp_path, tensors, config), hidden_size=24)
    assert (heads.config.hidden_size, heads.heads.hidden_size) == (24, HIDDEN)
    require_meant(heads, tensors, (1, 2, 3))


def test_entries_are_what_a_step_stores(tmp_path: Path) -> None:
    config = authors_config(eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    module = found_in(write_eagle(tmp_path, eagle_tensors(draft_ids=DRAFT_IDS), config)).heads
    given: list[torch.Tensor] = []

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        given.extend((keys, values))
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], 1)

    rows, states = torch.tensor([2, 5, 5]), base_states()[0]
    module.step(states[rows], TOKENS[rows], rows, attend)
    keys, values = module.entries(states[rows], TOKENS[rows], rows)
    torch.testing.assert_close(keys, given[0])
    torch.testing.assert_close(values, given[1])


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        ({}, (1, 15, 28)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (1, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (1, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (1, 15, 28)),
        ({"eagle_config": None}, (1, 15, 28)),
    ],
)
def test_two_ways_to_count_layers(raw: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert parse_eagle(raw).fused(32) == layers


def test_it_cannot_be_trained_further(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, eagle_tensors(draft_ids=DRAFT_IDS), speculators_config())
    require_heads_folder(SpeculationConfig(heads=str(folder)))
    assert HeadsConfig.read(folder).base_model.name == "tiny"
    with pytest.raises(HeadsError, match="can be served but not trained further"):
        load_heads(folder)


Damage = Callable[[Path], None]


def said(**changes: Any) -> Damage:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **changes}))

    return apply


def changed(name: str, tensor: torch.Tensor | None) -> Damage:
    def apply(folder: Path) -> None:
        tensors = eagle_tensors(draft_ids=DRAFT_IDS)
        tensors.pop(name, None)
        write_eagle(folder, tensors if tensor is None else {**tensors, name: tensor}, OWN)

    return apply


def first_eagle(folder: Path) -> None:
    """A module of EAGLE: its layer reads one state, made of two."""
    tensors = {name: t for name, t in eagle_tensors(block="layers.0.").items() if "hidden_norm" not in name}
    write_eagle(folder, tensors, OWN)


OWN = authors_config(eagle_aux_hidden_state_layer_ids=[2, 3, 4])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (changed("fc.weight", None), "fc.weight is absent, should be 16x48"),
        (changed("fc.weight", torch.ones(16, 32)), "fc.weight is 16x32, should be 16x48"),
        (changed("fc.bias", torch.ones(16)), "fc.bias is 16, should be absent"),
        (changed("midlayer.self_attn.q_proj.weight", torch.ones(24, 16)), "q_proj.weight is 24x16, should be 24x32"),
        (changed("norm.weight", torch.full((16,), torch.nan)), "norm.weight holds values that are not finite"),
        (changed("layers.0.mlp.up_proj.weight", torch.ones(24, 16)), "holds layers.0.mlp.up_proj.weight twice"),
        (changed("layers.1.mlp.up_proj.weight", torch.ones(24, 16)), "EAGLE-3 module of several layers"),
        (
            changed("norm.weight", torch.ones(16).to(torch.float8_e4m3fn)),
            "stores weights as torch.float8_e4m3fn; quantized modules",
        ),
        (changed("d2t", None), "an lm_head of 10 of 61 tokens and no d2t"),
        (changed("d2t", torch.tensor(DRAFT_IDS)), "d2t must lead to distinct tokens below 61; it holds offsets"),
        (changed("d2t", torch.arange(10).neg()), "d2t must lead to distinct tokens"),
        (changed("d2t", torch.zeros(9, dtype=torch.int64)), "d2t names 9 tokens, lm_head has 10"),
        (changed("d2t", torch.zeros(10)), "d2t is not a list of offsets"),
        (changed("lm_head.weight", torch.ones(10, 17)), "lm_head.weight is 10x17, should be 10x16"),
        (changed("embed_tokens.weight", torch.ones(60, 16)), "embed_tokens.weight is 60x16, should be 61x16"),
        (first_eagle, r"layers\.0\.hidden_norm\.weight is absent \(modules of EAGLE and EAGLE-2 cannot be served\)"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights of an EAGLE-3 module"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "truncated or corrupt"),
        (said(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), r"outputs of layers \[1, 2, 8\].*tiny has 6 layers"),
        (said(eagle_aux_hidden_state_layer_ids=[0, 2, 3]), r"outputs of layers \[-1, 1, 2\].*tiny has 6 layers"),
        (said(eagle_aux_hidden_state_layer_ids="2"), "does not describe an EAGLE-3 module: eagle_aux_hidden"),
        (said(eagle_config={"use_aux_hidden_state": False}), "does not describe an EAGLE-3 module: eagle_config/use"),
        (said(quantization_config={"quant_method": "fp8"}), "does not describe an EAGLE-3 module: quantization_config"),
        (said(speculators_model_type="eagle"), "does not describe an EAGLE-3 module: speculators_model_type"),
        (said(speculators_model_type="eagle3"), "an EAGLE-3 module: the file: 'transformer_layer_con"),
        (said(hidden_size=None), "does not describe a decoder layer"),
        (said(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "names dynamic RoPE"),
        (said(vocab_size=60), "d2t must lead to distinct tokens below 60|vocabulary of 60 tokens"),
        (said(vocab_size=62), "for a vocabulary of 62 tokens .an unnamed model.; tiny has 61"),
        (said(target_hidden_size=20), "fc.weight is 16x48, should be 16x60"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, damage: Damage, reason: str) -> None:
    write_eagle(tmp_path, eagle_tensors(draft_ids=DRAFT_IDS), OWN)
    damage(tmp_path)
    with pytest.raises(ModelLoadError, match=reason) as refused:
        find_heads(str(tmp_path), as_loaded(tiny_target(), "tiny"))
    assert "\n" not in str(refused.value)


def test_one_for_a_wider_model_is_refused(tmp_path: Path) -> None:
    write_eagle(tmp_path, eagle_tensors(draft_ids=DRAFT_IDS), OWN)
    with pytest.raises(ModelLoadError, match=r"is 16 wide, the model 24, and it has no embed_tokens\.weight"):
        find_heads(str(tmp_path), as_loaded(tiny_target(hidden_size=24), "tiny"))
