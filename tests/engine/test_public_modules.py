"""Public recursive modules in an engine: they draft what they mean, and the answer stays the model's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_engine import assert_same, loaded_model
from compiled_models import library
from own_kv import drafted_outputs
from tiny_eagle import DRAFT_IDS, authors_config, eagle_tensors, speculators_config, tiny_target, write_eagle
from tiny_engine import VOCAB, Answer, as_loaded, assert_all_free, request, run
from tiny_mtp import write_model

from engine.assembly import Drafters, assemble, make_drafters
from engine.backend import Backend, CompiledBackend, TransformersBackend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.core import EngineCore
from engine.draft_test import self_test
from engine.errors import ModelLoadError
from engine.loading import LoadedModel, load_model
from engine.sampling_params import SamplingParams
from engine.spec_decode.drafter import DraftContext
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.spec_decode.tree import DraftTree
from heads.lm_head import DraftLmHead
from heads.recursive import OwnKvModule

torch.set_num_threads(1)
KINDS = ("deepseek", "glm", "mimo")
# The last one shares blocks with the one before.
PROMPTS = [[5, 9, 3], list(range(1, 30)), [*range(1, 25), 50, 4]]
REQUESTS = [
    request(f"r{index}", prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for index, prompt in enumerate(PROMPTS)
]


def checkpoint(folder: Path, kind: str) -> LoadedModel:
    """A tiny model with its module, in fp64, where no two tokens are nearly equal."""
    write_model(folder, kind)
    loaded = load_model(ModelConfig(str(folder)), torch.device("cpu"), torch.float64, lambda _: None)
    loaded.model.set_experts_implementation("eager")  # torch's grouped product knows no fp64
    return loaded


def target() -> LoadedModel:
    return as_loaded(tiny_target(num_hidden_layers=8).double(), "tiny")


def eagle(folder: Path, form: str) -> str:
    if form == "authors":
        return str(write_eagle(folder, eagle_tensors(draft_ids=DRAFT_IDS), authors_config(), "pytorch_model.bin"))
    tensors = eagle_tensors(block="layers.0.", draft_ids=DRAFT_IDS)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(3))
    return str(write_eagle(folder, tensors, speculators_config()))


def core(loaded: LoadedModel, drafters: Sequence[OwnKvDrafter]) -> EngineCore:
    return assembled(TransformersBackend(loaded, packs=False), 4, torch.float64, drafters)


def assembled(backend: Backend, block_size: int, dtype: torch.dtype, drafters: Sequence[OwnKvDrafter]) -> EngineCore:
    """So small that prompts come in chunks, and that requests are preempted."""
    block_bytes = block_size * sum(shape.bytes_per_token(dtype) for shape in backend.shapes)
    block_bytes += sum(drafter.block_bytes(block_size, dtype) for drafter in drafters)
    blocks = 104 // block_size + 2
    settings = EngineSettings(
        ModelConfig(path="tiny", dtype="float64"),
        EngineConfig(
            device="cpu", block_size=block_size, kv_cache_memory=blocks * block_bytes, max_num_batched_tokens=24
        ),
        SpeculationConfig(max_draft_tokens=10),
    )
    return assemble(backend, settings, lambda _: None, drafters, measures_steps=False).core


def ids(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.ids for name, answer in answers.items()}


def require_law(loaded: LoadedModel, drafters: Drafters) -> None:
    """The text is the same with speculation as without, some drafts are right, and nothing is left behind."""
    expected = ids(run(core(loaded, ()), REQUESTS))
    served = core(loaded, drafters.drafters)  # type: ignore[arg-type]
    for _ in range(2):  # the second time the prompts lie in the prefix cache
        found = run(served, REQUESTS)
        assert ids(found) == expected
        assert sum(answer.accepted for answer in found.values()) > 0
    assert_all_free(served)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoints_own_module_drafts_by_default(
    tmp_path: Path, kind: str, no_drafter_fails: None, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = checkpoint(tmp_path, kind)
    with caplog.at_level(logging.INFO, "headlong"):
        drafters = make_drafters(SpeculationConfig(), loaded)
    assert drafters.methods == ("suffix", "mtp")
    assert "drafts with the MTP module of its own checkpoint" in caplog.text
    require_law(loaded, replace(drafters, drafters=drafters.drafters[1:]))


def test_an_eagle_folder_drafts(tmp_path: Path, no_drafter_fails: None) -> None:
    drafters = make_drafters(SpeculationConfig(heads=eagle(tmp_path, "authors")), target())
    assert drafters.methods == ("suffix", "eagle")
    require_law(target(), replace(drafters, drafters=drafters.drafters[1:]))


class Watched:
    """A drafter's proposals, with the text they are for."""

    def __init__(self, drafter: OwnKvDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], DraftTree]] = []
        propose = drafter.propose

        def watching(contexts: Sequence[DraftContext]) -> list[DraftTree]:
            trees = propose(contexts)
            texts = [list(context.token_ids) for context in contexts]
            self.seen.extend((text, tree) for text, tree in zip(texts, trees, strict=True) if len(tree))
            return trees

        monkeypatch.setattr(drafter, "propose", watching)


def likeliest(tree: DraftTree) -> list[int]:
    """The first children from the root on down."""
    chain: list[int] = []
    parent = -1
    while parent in tree.parents:
        parent = tree.parents.index(parent)
        chain.append(tree.tokens[parent])
    return chain


@torch.inference_mode()
def meant(module: OwnKvModule, lm_head: DraftLmHead, loaded: LoadedModel, text: list[int], depth: int) -> list[int]:
    """The module's greedy chain behind ``text``, over states that transformers itself computes."""
    ids = torch.tensor(text)
    result = loaded.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    # hidden_states[0] is the embedding; the last one is normed, so no module here may read the last layer.
    layers = {layer: result.hidden_states[layer + 1][0].float() for layer in module.hidden_layers}
    states = module.condition(result.hidden_states[-1][0].float(), layers)
    chain: list[int] = []
    for _ in range(depth):
        tokens = torch.tensor([*text, *chain])
        output = drafted_outputs(module, states, tokens, len(text), len(chain) + 1)[0][-1:]
        chain.append(int(lm_head.token_ids[module.logits(lm_head, output, len(chain) + 1)[0].argmax()]))
    return chain


def require_drafts(loaded: LoadedModel, drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafters.drafters[1]
    assert isinstance(drafter, OwnKvDrafter)
    watched = Watched(drafter, monkeypatch)
    run(core(loaded, [drafter]), REQUESTS)
    require_chains(watched, drafter, loaded)


def require_chains(watched: Watched, drafter: OwnKvDrafter, loaded: LoadedModel) -> None:
    """Whatever was chunked, cached and accepted before: the chain of first children is the module's greedy one."""
    loaded.model.set_attn_implementation("eager")
    checked = 0
    for text, tree in watched.seen[::4]:
        chain = likeliest(tree)[:3]
        assert chain == meant(drafter._heads, drafter._lm_head, loaded, text, len(chain)), text
        checked += len(chain) > 1
    assert checked > 3


@pytest.mark.parametrize("kind", KINDS)
def test_in_an_engine_a_checkpoints_module_drafts_what_it_means(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = checkpoint(tmp_path, kind)
    require_drafts(loaded, make_drafters(SpeculationConfig(), loaded), monkeypatch)


@pytest.mark.parametrize("form", ["authors", "speculators"])
def test_in_an_engine_an_eagle_module_drafts_what_it_means(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = target()
    require_drafts(loaded, make_drafters(SpeculationConfig(heads=eagle(tmp_path, form)), loaded), monkeypatch)


@pytest.mark.parametrize("is_int8", [False, True], ids=["float", "int8"])
def test_beside_the_compiled_step_an_eagle_module_drafts(
    tmp_path: Path, is_int8: bool, no_drafter_fails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = eagle_tensors(draft_ids=DRAFT_IDS, target=64)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(3))
    config = authors_config(target_hidden_size=64, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    loaded = loaded_model("llama", num_hidden_layers=6)
    folder = str(write_eagle(tmp_path, tensors, config))
    drafter = make_drafters(SpeculationConfig(heads=folder), loaded).drafters[1]
    assert isinstance(drafter, OwnKvDrafter)
    backend = CompiledBackend(loaded, library(), "int8" if is_int8 else "none")
    plain = run(assembled(backend, 16, torch.float32, []), REQUESTS)
    watched = Watched(drafter, monkeypatch)
    assert_same(run(assembled(backend, 16, torch.float32, [drafter]), REQUESTS), plain)
    assert len(watched.seen) > 20
    if not is_int8:  # rounded products may rank two children the other way round
        require_chains(watched, drafter, loaded_model("llama", num_hidden_layers=6))


def test_a_checkpoints_module_can_be_left_out(tmp_path: Path) -> None:
    loaded = checkpoint(tmp_path, "glm")
    assert make_drafters(SpeculationConfig(drafters=("suffix",)), loaded).methods == ("suffix",)
    assert make_drafters(SpeculationConfig(enabled=False), loaded).methods == ()
    assert make_drafters(SpeculationConfig(drafters=("mtp",)), loaded).methods == ("mtp",)
    with pytest.raises(ModelLoadError, match="drafters names eagle, but there are no eagle heads"):
        make_drafters(SpeculationConfig(drafters=("eagle",)), loaded)


def test_the_self_test_knows_the_vocabulary(tmp_path: Path) -> None:
    loaded = checkpoint(tmp_path, "mimo")
    drafters = make_drafters(SpeculationConfig(), loaded)
    assert drafters.heads is not None
    assert drafters.heads.config.vocab_size == VOCAB
    assert self_test(core(loaded, drafters.drafters[1:]), drafters.heads.config).length >= 1.0  # type: ignore[arg-type]
