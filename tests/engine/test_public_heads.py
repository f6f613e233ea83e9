"""Public Medusa checkpoints in an engine: they draft, and the answer stays the model's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from compiled_engine import compiled_core, loaded_model
from compiled_engine import run_counting as run_compiled
from compiled_models import library
from tiny_engine import VOCAB, as_loaded, request, run, tiny_core, tiny_model

from engine.assembly import make_drafters
from engine.compiled.heads import CompiledHeadCompute, CompiledLinear
from engine.compiled.library import Team
from engine.config import SpeculationConfig
from engine.core import EngineCore
from engine.draft_test import self_test
from engine.errors import ModelLoadError
from engine.loading import LoadedModel
from engine.loading.heads import find_heads, output_head, require_heads_folder
from engine.sampling_params import EngineRequest, SamplingParams
from engine.spec_decode.candidates import HeadCompute, PlainHeadCompute
from engine.spec_decode.drafter import Drafter
from engine.spec_decode.medusa import MedusaDrafter
from heads.checkpoint import load_heads
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads

REQUESTS = [
    request(f"r{index}", prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for index, prompt in enumerate([[5, 9, 3], [7], list(range(20))])
]
OWN = pytest.mark.parametrize("is_own", [True, False], ids=["own", "shared"])


def write(
    folder: Path, model: LoadedModel, *, is_own: bool = True, vocab: int = VOCAB, base: str = "org/llama"
) -> Path:
    """Heads that mostly repeat the model's own prediction, which is right often enough."""
    weight = output_head(model.model).weight.float()
    draw = torch.Generator().manual_seed(4)
    weights = {}
    for head in range(3):
        hidden = weight.shape[1]
        weights[f"{head}.0.linear.weight"] = 0.01 * torch.randn(hidden, hidden, generator=draw)
        weights[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        if is_own:
            weights[f"{head}.1.weight"] = weight[:vocab] + 0.01 * torch.randn(vocab, hidden, generator=draw)
    torch.save(weights, folder / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": base}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny() -> LoadedModel:
    return as_loaded(tiny_model("llama"), "llama")


def made(folder: Path, model: LoadedModel) -> tuple[Drafter, ...]:
    return make_drafters(SpeculationConfig(heads=str(folder), drafters=("medusa",)), model).drafters


@OWN
def test_a_tiny_engine_drafts_with_them_and_answers_as_without(
    tmp_path: Path, is_own: bool, no_drafter_fails: None
) -> None:
    expected = run(tiny_core("llama"), REQUESTS)
    drafters = made(write(tmp_path, tiny(), is_own=is_own), tiny())
    found = run(tiny_core("llama", drafters), REQUESTS)
    assert {name: answer.ids for name, answer in found.items()} == {n: answer.ids for n, answer in expected.items()}
    assert sum(answer.accepted for answer in found.values()) > 0


@OWN
@pytest.mark.parametrize("is_int8", [False, True], ids=["float", "int8"])
def test_the_compiled_step_packs_them(tmp_path: Path, is_own: bool, is_int8: bool, no_drafter_fails: None) -> None:
    def answers(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[int]]:
        found = run_compiled(core, requests, spoils=False)[0]
        accepted.append(sum(answer.accepted for answer in found.values()))
        return {name: answer.ids for name, answer in found.items()}

    accepted: list[int] = []
    model = loaded_model("llama")
    drafters = made(write(tmp_path, model, is_own=is_own), model)
    expected = answers(compiled_core("llama", is_int8), REQUESTS)
    assert answers(compiled_core("llama", is_int8, drafters), REQUESTS) == expected
    assert accepted[0] == 0
    assert accepted[1] > 0
    heads = drafters[0]._heads  # type: ignore[attr-defined]
    packed = [module for module in heads.modules() if isinstance(module, CompiledLinear)]
    assert len(packed) == (6 if is_own else 3)


def computes() -> dict[str, HeadCompute]:
    team = Team(library(), 1)
    return {
        "torch": PlainHeadCompute(),
        "float": CompiledHeadCompute(team, False),
        "int8": CompiledHeadCompute(team, True),
    }


@pytest.mark.parametrize("name", ["torch", "float", "int8"])
@pytest.mark.parametrize("token_ids", [None, torch.arange(0, VOCAB, 2)], ids=["whole", "reduced"])
def test_packed_lm_heads_compute_what_plain_ones_do(tmp_path: Path, name: str, token_ids: torch.Tensor | None) -> None:
    model = tiny()
    heads = load_heads(write(tmp_path, model)).heads
    assert isinstance(heads, MedusaHeads)
    lm_head = DraftLmHead(output_head(model.model), token_ids)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    expected = heads.all_logits(lm_head, states)
    MedusaDrafter(heads, lm_head).prepare(computes()[name], None)  # type: ignore[arg-type]
    found = heads.all_logits(lm_head, states)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < (0.03 if name == "int8" else 1e-5)
    assert lm_head.linear.weight.is_meta, "the shared matrix is not kept beside the heads' own"


@OWN
def test_the_self_test_runs_on_the_models_vocabulary(tmp_path: Path, is_own: bool) -> None:
    write(tmp_path, tiny(), is_own=is_own)
    drafting = make_drafters(SpeculationConfig(heads=str(tmp_path)), tiny())
    assert drafting.methods == ("suffix", "medusa")
    assert drafting.heads is not None
    assert drafting.heads.config.vocab_size == VOCAB
    assert self_test(tiny_core("llama", drafting.drafters), drafting.heads.config).length >= 1.0


@pytest.mark.parametrize(("base", "warns"), [("org/LLaMA", False), ("llama", False), ("org/other", True), ("", True)])
def test_another_name_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, base: str, warns: bool) -> None:
    with caplog.at_level(logging.WARNING, "headlong"):
        assert find_heads(str(write(tmp_path, tiny(), base=base)), tiny()) is not None
    name = "other" if base else "an unnamed model"
    assert (f"were trained on {name}, this model is llama; the self-test tells" in caplog.text) == warns


def test_other_sizes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny(), vocab=VOCAB - 1)
    require_heads_folder(SpeculationConfig(heads=str(folder)))
    with pytest.raises(ModelLoadError, match=rf"a vocabulary of {VOCAB - 1} tokens .llama.; llama has {VOCAB}"):
        find_heads(str(folder), tiny())
    write(tmp_path, loaded_model("llama"), is_own=False)
    with pytest.raises(ModelLoadError, match=r"for states of 64 numbers .llama.; llama has 32"):
        find_heads(str(folder), tiny())
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(ModelLoadError, match="holds no weights of Medusa heads"):
        find_heads(str(folder), tiny())
