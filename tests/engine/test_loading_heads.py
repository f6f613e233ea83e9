"""Which heads a model gets, and which it refuses."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import ARCHITECTURES, VOCAB, as_loaded, tiny_model
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, PreTrainedModel

from engine import assembly
from engine.assembly import make_drafters
from engine.config import SpeculationConfig
from engine.errors import ModelLoadError
from engine.loading import LoadedModel
from engine.loading.heads import find_heads, output_head, require_heads_folder
from heads.checkpoint import save_heads
from heads.config import BaseModel, HeadsConfig, MtpSizes
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.settings import KvSource

DIGEST = "0" * 64
CONFIG = HeadsConfig("medusa", 2, 32, VOCAB, BaseModel("llama", DIGEST))


def loaded(architecture: str = "llama", **changes: str) -> LoadedModel:
    return dataclasses.replace(as_loaded(tiny_model(architecture), architecture, DIGEST), **changes)


def write(folder: Path, **changes: object) -> Path:
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    save_heads(folder, MedusaHeads(config.hidden_size, config.num_heads), config, None, "")
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 16}, "made for states of 16 numbers .llama.; llama has 32"),
        ({"vocab_size": 70}, f"made for a vocabulary of 70 tokens .llama.; llama has {VOCAB}"),
        ({"base_model": BaseModel("other", "1" * 64)}, "were trained on other, not on llama"),
    ],
)
def test_heads_of_another_model_are_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason) as refused:
        find_heads(str(write(tmp_path, **changes)), loaded())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kv", "sizes", "reason"),
    [
        ("base", (2, 4), "reads 2 KV heads of 4 numbers; llama has 2 of 8"),
        ("base", (4, 8), "reads 4 KV heads of 8 numbers; llama has 2 of 8"),
        ("own", (2, 4), "has heads of 4 numbers; llama rotates 8"),
        ("own", (4, 8), None),
    ],
)
def test_a_module_must_fit_the_cache_it_reads_or_the_rotation_it_shares(
    tmp_path: Path, kv: KvSource, sizes: tuple[int, int], reason: str | None
) -> None:
    shape = MtpSizes(kv, 48, 4, *sizes, 1e-5)
    config = dataclasses.replace(CONFIG, method="mtp", mtp=shape)
    save_heads(tmp_path, MtpModule(32, shape, 2), config, None, "")
    if reason is None:
        assert find_heads(str(tmp_path), loaded()) is not None
        return
    with pytest.raises(ModelLoadError, match=reason):
        find_heads(str(tmp_path), loaded())


def test_the_same_model_from_another_file_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headlong.engine"):
        assert find_heads(str(write(tmp_path)), loaded(digest="2" * 64)) is not None
    assert "other weights of the name llama" in caplog.text


def test_the_same_weights_under_another_name_are_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_heads(str(write(tmp_path)), loaded(name="renamed")) is not None
    assert not caplog.records


def test_heads_that_come_along_are_chosen_by_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "a", base_model=BaseModel("a", "a" * 64))
    write(tmp_path / "b", base_model=BaseModel("b", "b" * 64))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("broken")
    found = find_heads(None, loaded(digest="b" * 64), tmp_path)
    assert found is not None
    assert found.folder == tmp_path / "b"
    assert find_heads(None, loaded(digest="d" * 64), tmp_path) is None


def test_a_folder_without_heads_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder of heads"):
        require_heads_folder(SpeculationConfig(heads=str(tmp_path)))
    require_heads_folder(SpeculationConfig(heads=str(tmp_path), enabled=False))
    require_heads_folder(SpeculationConfig())


@pytest.mark.parametrize(
    ("drafters", "with_heads", "expected"),
    [
        (None, False, ("suffix",)),
        (None, True, ("suffix", "medusa")),
        (("medusa",), True, ("medusa",)),
        (("medusa", "suffix"), True, ("medusa", "suffix")),
        (("suffix",), False, ("suffix",)),
    ],
)
def test_which_drafters_there_are(
    tmp_path: Path, drafters: tuple[str, ...] | None, with_heads: bool, expected: tuple[str, ...]
) -> None:
    folder = str(write(tmp_path)) if with_heads else None
    assert make_drafters(SpeculationConfig(drafters=drafters, heads=folder), loaded()).methods == expected


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [(None, ("suffix", "medusa")), (("suffix",), ("suffix",)), (("medusa",), ("medusa",))],
)
def test_heads_that_come_along_are_on_by_default_and_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafters: tuple[str, ...] | None, expected: tuple[str, ...]
) -> None:
    write(tmp_path / "llama")
    monkeypatch.setattr(assembly, "find_heads", functools.partial(find_heads, pretrained=tmp_path))
    made = make_drafters(SpeculationConfig(drafters=drafters), loaded())
    assert made.methods == expected
    assert (made.heads is not None) == ("medusa" in expected), "heads that draft nothing are not tried at load"


def test_drafters_that_contradict_the_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="names medusa, but there are no medusa heads for llama"):
        make_drafters(SpeculationConfig(drafters=("suffix", "medusa")), loaded())
    with pytest.raises(ModelLoadError, match="leaves medusa out"):
        make_drafters(SpeculationConfig(drafters=("suffix",), heads=str(write(tmp_path))), loaded())
    with pytest.raises(ModelLoadError, match="unknown drafter 'hydra'; available: suffix, medusa"):
        make_drafters(SpeculationConfig(drafters=("hydra",)), loaded())


def test_without_speculation_no_heads_are_read() -> None:
    assert make_drafters(SpeculationConfig(enabled=False, heads="/absent"), loaded()).methods == ()


def states_and_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model's own forward pass makes of a few tokens: after the last norm, and after its head."""
    any_model: Any = model
    kept, attention = [], model.config._attn_implementation
    handle = any_model.get_output_embeddings().register_forward_pre_hook(lambda _, given: kept.append(given[0][0]))
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = any_model(input_ids=torch.tensor([[3, 9, 27, 4]]), use_cache=False).logits[0]
    finally:
        handle.remove()
        model.set_attn_implementation(attention)
    return kept[0], logits


def assert_shared(model: PreTrainedModel, token_ids: torch.Tensor | None) -> None:
    shared = DraftLmHead(output_head(model), token_ids)
    states, logits = states_and_logits(model)
    wanted = logits if token_ids is None else logits[:, token_ids]
    torch.testing.assert_close(shared(states.float()), wanted.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("token_ids", [None, torch.tensor([1, 4, 5, 40, 60])], ids=["whole", "reduced"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shared_head_computes_the_models_own_logits(architecture: str, token_ids: torch.Tensor | None) -> None:
    model = tiny_model(architecture)
    before = model.config._attn_implementation
    assert output_head(model).weight.shape == (VOCAB, 32)
    assert model.config._attn_implementation == before
    assert_shared(model, token_ids)


def test_a_head_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model.config, "logit_scale", 0.5, raising=False)
    with pytest.raises(ModelLoadError, match="in a way that heads cannot share"):
        output_head(model)


def test_softcap_and_scale_are_read_from_the_configuration() -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, final_logit_softcapping=0.5)).eval()
    assert output_head(gemma).softcap == 0.5
    assert_shared(gemma, torch.tensor([2, 7, 8]))
    cohere = AutoModelForCausalLM.from_config(CohereConfig(**sizes, logit_scale=0.25)).eval()
    assert output_head(cohere).scale == 0.25
    assert_shared(cohere, torch.tensor([2, 7, 8]))
