"""Modules inside public checkpoints: each layout gives the logits it means, and what is wrong is one sentence."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path

import pytest
import torch
from own_kv import causal, drafted_outputs, gated, rms, rotated
from safetensors.torch import load_file, save_file
from tiny_engine import VOCAB, as_loaded
from tiny_mtp import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Tensors, mtp_tensors, tiny_base, write, write_model

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.loading import LoadedModel, load_model
from engine.loading.checkpoint_mtp import read_checkpoint_mtp
from engine.loading.heads import find_heads, output_head
from heads.lm_head import DraftLmHead

KINDS = ("deepseek", "glm", "mimo", "qwen")
THETA = 10000.0
DEPTHS = 3
TOKENS = torch.tensor([7, 3, 60, 3, 21, 14, 9, 0, 33, 8, 52, 2])
torch.set_num_threads(1)


def at(folder: Path, kind: str, tensors: Tensors, shards: int = 1) -> LoadedModel:
    """The tiny model, as if it had been loaded from a folder with ``tensors``."""
    return dataclasses.replace(as_loaded(tiny_base(kind), kind), path=write(folder, tensors, shards))


def states() -> torch.Tensor:
    return torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(8))


# What the layouts mean, written out. x: [rows, HIDDEN], the block's input; w: the block's tensors.


def layer(kind: str, x: torch.Tensor, w: Tensors, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, keys, values) of the decoder layer."""
    plus = 1.0 if kind == "qwen" else 0.0
    normed = rms(x, w["input_layernorm.weight"] + plus, EPS[kind])
    mixed, keys, values = latent(normed, w, positions) if kind == "deepseek" else plain(kind, normed, w, positions)
    x = x + mixed @ w["self_attn.o_proj.weight"].T
    normed = rms(x, w["post_attention_layernorm.weight"] + plus, EPS[kind])
    return x + (gated(normed, w, "mlp") if kind == "mimo" else mixture(kind, normed, w)), keys, values


EPS = {"deepseek": 1e-6, "glm": 1e-5, "mimo": 1e-6, "qwen": 1e-6}


def plain(kind: str, x: torch.Tensor, w: Tensors, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Grouped queries; norms of queries and keys (GLM, Qwen3-Next), partial rotation and a gate (Qwen3-Next)."""
    dim = HIDDEN // HEADS if kind == "mimo" else HEAD_DIM
    width = {"mimo": dim, "glm": dim // 2, "qwen": dim // 4}[kind]
    plus = 1.0 if kind == "qwen" else 0.0

    def project(part: str) -> torch.Tensor:
        bias = w.get(f"self_attn.{part}_proj.bias", torch.zeros(()))
        return x @ w[f"self_attn.{part}_proj.weight"].T + bias

    queries, gate = project("q"), torch.ones(())
    if kind == "qwen":
        both = queries.view(len(x), HEADS, 2 * dim)
        queries, gate = both[..., :dim], both[..., dim:].flatten(1).sigmoid()
    queries, keys = queries.reshape(len(x), HEADS, dim), project("k").view(len(x), KV_HEADS, dim)
    if kind != "mimo":
        queries = rms(queries, w["self_attn.q_norm.weight"] + plus, EPS[kind])
        keys = rms(keys, w["self_attn.k_norm.weight"] + plus, EPS[kind])
    queries, keys = rotated(queries, positions, THETA, width), rotated(keys, positions, THETA, width)
    values = project("v").view(len(x), KV_HEADS, dim)
    return causal(queries, keys, values, dim**-0.5) * gate, keys, values


def latent(x: torch.Tensor, w: Tensors, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """DeepSeek's: 6 numbers of a head without position, 4 with, stored in pairs; values of 5."""

    def turned(pairs: torch.Tensor) -> torch.Tensor:
        return rotated(torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1), positions, THETA)

    queries = rms(x @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"])
    queries = (queries @ w["self_attn.q_b_proj.weight"].T).view(len(x), HEADS, 10)
    queries = torch.cat([queries[..., :6], turned(queries[..., 6:])], dim=-1)
    packed = x @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    both = rms(packed[:, :6], w["self_attn.kv_a_layernorm.weight"]) @ w["self_attn.kv_b_proj.weight"].T
    both = both.view(len(x), HEADS, 11)
    shared = turned(packed[:, None, 6:]).expand(-1, HEADS, -1)
    keys, values = torch.cat([both[..., :6], shared], dim=-1), both[..., 6:]
    return causal(queries, keys, values, 10**-0.5), keys, values


def mixture(kind: str, x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """The two best of four experts, row by row; DeepSeek and GLM choose within the better of two groups."""
    scores = x @ w["mlp.gate.weight"].T
    rows = []
    for row, score in zip(x, scores, strict=True):
        if kind == "qwen":
            best = score.topk(2).indices.tolist()
            shares = score.softmax(0)[best]
            mixed = torch.sigmoid(row @ w["mlp.shared_expert_gate.weight"][0]) * gated(row, w, "mlp.shared_expert")
            shares = shares / shares.sum()
        else:
            biased = score.sigmoid() + w["mlp.gate.e_score_correction_bias"]
            best = [0, 1] if biased[:2].sum() > biased[2:].sum() else [2, 3]
            shares = score.sigmoid()[best]
            shares = 1.5 * shares / shares.sum()
            mixed = gated(row, w, "mlp.shared_experts")
        for expert, share in zip(best, shares, strict=True):
            mixed = mixed + share * gated(row, w, f"mlp.experts.{expert}")
        rows.append(mixed)
    return torch.stack(rows)


NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
BEHIND = f"model.layers.{LAYERS}."
PREFIX = {"deepseek": BEHIND, "glm": BEHIND, "mimo": "model.mtp_layers.0.", "qwen": "mtp."}


def meant(kind: str, tensors: Tensors, embedding: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """(outputs [DEPTHS, HIDDEN], keys, values) of a chain behind ``length`` tokens, by whole passes without a cache."""
    block = PREFIX[kind] + ("layers.0." if kind == "qwen" else "")
    w = {name.removeprefix(block): tensor for name, tensor in tensors.items()}
    own = [tensors[f"{PREFIX[kind]}{name}.weight"] for name in NAMES[kind]]
    if kind == "qwen":
        own = [own[0] + 1, own[1] + 1, own[2], own[3] + 1]
    before, outputs = states()[: length - 1], []
    keys = values = before
    for depth in range(DEPTHS):
        positions = torch.arange(1, length + depth)
        parts = [rms(embedding[TOKENS[positions]], own[0], EPS[kind]), rms(before, own[1], EPS[kind])]
        joined = torch.cat(parts[::-1] if kind == "mimo" else parts, dim=-1) @ own[2].T
        out, keys, values = layer(kind, joined, w, positions)
        outputs.append(rms(out[-1], own[3], EPS[kind]))
        before = torch.cat([before, outputs[-1][None]])
    return torch.stack(outputs), keys, values


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_logits_it_means(tmp_path: Path, kind: str, shards: int) -> None:
    tensors = mtp_tensors(kind)
    loaded = at(tmp_path, kind, tensors, shards)
    heads = read_checkpoint_mtp(loaded)
    assert heads is not None
    module, lm_head = heads.heads, DraftLmHead(output_head(loaded.model), None)
    assert (heads.config.method, heads.lm_head, module.hidden_layers) == ("mtp", None, ())
    assert not any(parameter.requires_grad for parameter in module.parameters())
    embedding = loaded.model.get_input_embeddings().weight
    for length in (2, 3, 7, 9):
        outputs, entries = drafted_outputs(module, states(), TOKENS, length, DEPTHS)
        expected, keys, values = meant(kind, tensors, embedding, length)
        for depth in range(1, DEPTHS + 1):
            found = module.logits(lm_head, outputs[depth - 1 : depth], depth)
            torch.testing.assert_close(
                found[0], loaded.model.get_output_embeddings().weight @ expected[depth - 1], atol=1e-5, rtol=1e-5
            )
        torch.testing.assert_close(torch.stack(entries.keys), keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(entries.values), values, atol=1e-5, rtol=1e-5)
        assert keys.shape[1:] == (module.kv_heads, module.key_dim)
        assert values.shape[1:] == (module.kv_heads, module.value_dim)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_what_a_step_stores(tmp_path: Path, kind: str) -> None:
    heads = read_checkpoint_mtp(at(tmp_path, kind, mtp_tensors(kind)))
    assert heads is not None
    given: list[torch.Tensor] = []

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        given.extend((keys, values))
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], 1)

    rows = torch.tensor([2, 5, 5])
    heads.heads.step(states()[rows], TOKENS[rows], rows, attend)
    keys, values = heads.heads.entries(states()[rows], TOKENS[rows], rows)
    torch.testing.assert_close(keys, given[0])
    torch.testing.assert_close(values, given[1])


def test_several_modules_are_the_first_one_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = mtp_tensors("mimo")
    second = {name.replace("layers.0.", "layers.1."): t for name, t in mtp_tensors("mimo", seed=4).items()}
    with caplog.at_level(logging.INFO, "headlong"):
        heads = read_checkpoint_mtp(at(tmp_path, "mimo", {**first, **second}))
    assert heads is not None
    assert "has 2 MTP modules; the first of them drafts at every depth" in caplog.text
    embedding = tiny_base("mimo").get_input_embeddings().weight
    found = drafted_outputs(heads.heads, states(), TOKENS, 7, DEPTHS)[0]
    torch.testing.assert_close(found, meant("mimo", first, embedding, 7)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_own", [False, True], ids=["copies", "own"])
def test_copies_of_embedding_and_lm_head_are_shared(tmp_path: Path, is_own: bool) -> None:
    base = tiny_base("glm")
    embedding = base.get_input_embeddings().weight + float(is_own)
    lm_head = base.get_output_embeddings().weight + float(is_own)
    copies = {"embed_tokens.weight": embedding.clone(), "shared_head.head.weight": lm_head.clone()}
    tensors = mtp_tensors("glm") | {f"{PREFIX['glm']}{name}": tensor for name, tensor in copies.items()}
    heads = read_checkpoint_mtp(at(tmp_path, "glm", tensors))
    assert heads is not None
    assert (heads.lm_head is not None) == is_own
    if heads.lm_head is not None:
        assert torch.equal(heads.lm_head, lm_head)
    found = drafted_outputs(heads.heads, states(), TOKENS, 7, DEPTHS)[0]
    torch.testing.assert_close(found, meant("glm", mtp_tensors("glm"), embedding, 7)[0], atol=1e-5, rtol=1e-5)


def test_the_scale_is_the_architectures_own(tmp_path: Path) -> None:
    """YaRN sharpens DeepSeek's attention."""
    yarn = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    base = tiny_base("deepseek", rope_parameters=yarn)
    loaded = dataclasses.replace(as_loaded(base), path=write(tmp_path, mtp_tensors("deepseek")))
    heads = read_checkpoint_mtp(loaded)
    assert heads is not None
    assert heads.heads.scale == pytest.approx(10**-0.5 * (0.1 * math.log(4) + 1) ** 2)


def test_a_model_without_one_has_none(tmp_path: Path) -> None:
    assert read_checkpoint_mtp(as_loaded(tiny_base("glm"))) is None
    save_file({"model.layers.1.enorm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    assert read_checkpoint_mtp(dataclasses.replace(as_loaded(tiny_base("glm")), path=tmp_path)) is None


def without(tensors: Tensors, name: str) -> Tensors:
    return {its: tensor for its, tensor in tensors.items() if its != name}


GLM = mtp_tensors("glm")
EXPERT = f"{PREFIX['glm']}mlp.experts.1.up_proj.weight"
ENORM = f"{PREFIX['glm']}enorm.weight"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (without(GLM, ENORM), r"model\.layers\.2\.enorm\.weight is absent, should be 16"),
        ({**GLM, ENORM: torch.ones(17)}, r"model\.layers\.2\.enorm\.weight is 17, should be 16"),
        ({**GLM, ENORM: torch.full((16,), torch.inf)}, r"2\.enorm\.weight holds values that are not finite"),
        ({**GLM, f"{PREFIX['glm']}new.weight": torch.ones(3)}, r"model\.layers\.2\.new\.weight is 3, should be absent"),
        (without(GLM, EXPERT), r"the experts of model\.layers\.2\.mlp\.experts are not whole, or not of one size"),
        ({**GLM, EXPERT: torch.ones(3, 16)}, r"the experts of model\.layers\.2\.mlp\.experts are not whole"),
        (without(GLM, f"{PREFIX['glm']}self_attn.q_norm.weight"), r"self_attn\.q_norm\.weight is absent, should be 8"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_cannot_be_run_is_refused(tmp_path: Path, tensors: Tensors, reason: str, shards: int) -> None:
    with pytest.raises(ModelLoadError, match=reason) as refused:
        read_checkpoint_mtp(at(tmp_path, "glm", tensors, shards))
    assert "\n" not in str(refused.value)
    assert "model.safetensors" in str(refused.value)


def load(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(str(folder)), torch.device("cpu"), torch.float32, lambda _: None)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["deepseek", "glm", "mimo"])
def test_a_model_loads_without_its_module(tmp_path: Path, kind: str, shards: int) -> None:
    """transformers knows the numbers of the released sizes alone; the module is found all the same."""
    loaded = load(write_model(tmp_path, kind, shards))
    before, after = tiny_base(kind).state_dict(), loaded.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    heads = find_heads(None, loaded)
    assert heads is not None
    embedding = loaded.model.get_input_embeddings().weight
    found = drafted_outputs(heads.heads, states(), TOKENS, 7, DEPTHS)[0]
    torch.testing.assert_close(found, meant(kind, mtp_tensors(kind), embedding, 7)[0], atol=1e-5, rtol=1e-5)
    assert heads.config.vocab_size == VOCAB


def test_other_unknown_weights_are_refused_still(tmp_path: Path) -> None:
    write_model(tmp_path, "glm")
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**tensors, "model.layers.1.new.weight": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"weights that its configuration does not know: model\.layers\.1\.new"):
        load(tmp_path)


def test_quantized_modules_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{PREFIX['deepseek']}eh_proj.weight"
    write(tmp_path, {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelLoadError, match="stores weights as F8_E4M3; quantized checkpoints cannot be served yet"):
        load(tmp_path)


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    loaded = at(tmp_path, "glm", GLM, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="lacks weight files its index names: model-00002-of-00003"):
        read_checkpoint_mtp(loaded)
