"""Streams in the engine: they draft over the model's own KV what they were trained to, and for no model they cannot."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_engine import backend as compiled_backend
from compiled_models import random_model
from tiny_engine import VOCAB, as_loaded, tiny_core, tiny_model
from tiny_heads import random_streams, streaming_drafter
from transformers import PreTrainedModel

from engine.assembly import make_drafters
from engine.backend import Backend, CompiledBackend, RunnerNeeds, TransformersBackend
from engine.batch import build_batch
from engine.config import SpeculationConfig
from engine.contexts import TopLayersReader
from engine.errors import ModelLoadError
from engine.loading.heads import output_head
from engine.loading.streaming import attach_layers, new_streams, stream_sizes
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.draft_block import Committed
from engine.spec_decode.drafter import DraftContext, HiddenStates
from engine.spec_decode.tree import DraftTree
from heads.batch import make_batch
from heads.checkpoint import save_heads
from heads.config import BaseModel, HeadsConfig
from heads.data import Answer, Ask
from heads.lm_head import DraftLmHead
from heads.settings import TrainSettings
from heads.streaming import Rows, StreamingHeads

BLOCK = 16
STREAMS, LAYERS = 3, 2
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
deep_model = functools.partial(random_model, num_hidden_layers=3)


@functools.cache
def backend(kind: str, family: str) -> Backend:
    loaded = dataclasses.replace(as_loaded(copy.deepcopy(deep_model(family)), family), max_position_embeddings=256)
    if kind == "transformers":
        return TransformersBackend(loaded)
    return CompiledBackend(loaded, compiled_backend("llama", False)._library, "int8" if kind == "int8" else "none")


def prefilled(backend: Backend, tokens: Sequence[int], blocks: list[int]) -> tuple[ModelRunner, HiddenStates]:
    """A runner that knows all but the last token, and their states."""
    needs = RunnerNeeds(32 * BLOCK, BLOCK, needs_hidden=True, hidden_layers=(0,), passes=4)
    runner = backend.make_runner(needs)
    request = Request.from_source(EngineRequest("r", tuple(tokens), SamplingParams(max_tokens=1)), ())
    request.block_ids = blocks
    batch = build_batch([ScheduledRequest(request, 0, len(tokens) - 1, DraftTree())], [None])
    hidden = runner.forward(batch).hidden
    assert hidden is not None
    return runner, hidden


def random_text(length: int) -> list[int]:
    return torch.randint(0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["compiled", "int8", "transformers"])
@torch.inference_mode()
def test_drafting_computes_what_training_did(kind: str, family: str) -> None:
    """Two requests in one pass, their blocks scattered, at rows of one text, whose outputs in training are true."""
    model, its = deep_model(family), backend(kind, family)
    heads = random_streams(model, STREAMS, LAYERS)
    lm_head = DraftLmHead(output_head(model), torch.arange(0, VOCAB, 2))
    text = random_text(60)
    prompt, tokens = text[:29], text[29:]
    plain = Answer(Ask(tuple(prompt), 0.0, 0), tuple(tokens), torch.zeros(len(tokens), heads.hidden_size))
    top = TopLayersReader(its, 64, BLOCK, LAYERS)(plain)
    batch = make_batch([dataclasses.replace(plain, read_top=lambda: top)], lm_head)
    expected = [heads.logits(lm_head, output, depth) for depth, output in enumerate(heads.outputs(batch), start=1)]
    runner, hidden = prefilled(its, text, [5, 3, 9, 0])
    draft = runner.make_streams(copy.deepcopy(heads), copy.deepcopy(lm_head))
    at = [4, 23]  # rows of the answer that each request has come to
    requests = [Committed([5, 3, 9, 0], len(prompt) + row) for row in at]
    states = hidden.layers[heads.entry][[len(prompt) - 1 + row for row in at]].float()
    found = draft(requests, states)
    assert found.shape == (STREAMS, 2, len(lm_head.token_ids))
    assert found.dtype == torch.float32
    bound = 0.1 if kind == "int8" else 0.01  # contexts are kept in half precision
    for depth in range(STREAMS):
        wanted = expected[depth][at]
        assert torch.allclose(found[depth], wanted, atol=bound * float(wanted.abs().max())), depth
    alone = draft(requests[1:], states[1:])
    assert torch.allclose(alone[:, 0], found[:, 1], atol=1e-4 * float(found.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_new_first_stream_in_the_place_of_the_main_row_computes_what_it_did(family: str) -> None:
    """Given the entries before the row alone, it sees what the main row saw: so the layers are the model's own."""
    its = backend("compiled", family)
    heads = new_streams(deep_model(family), TrainSettings(num_heads=1, stream_layers=LAYERS))
    text = random_text(40)
    runner, hidden = prefilled(its, text, [0, 1, 2])
    row = 30
    parts = [runner.read_kv(layer, range(row)) for layer in (1, 2)]
    keys, values = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
    found = heads(hidden.layers[0][row][None], Rows(torch.tensor([row]), [(keys, values)], [slice(0, 1)]))[0, 0]
    assert torch.allclose(found, hidden.final[row], atol=1e-3 * float(found.abs().max()))


@pytest.mark.parametrize("kind", ["compiled", "transformers"])
@torch.inference_mode()
def test_a_pass_leaves_no_trace_in_the_cache(kind: str) -> None:
    its, model = backend(kind, "llama"), deep_model("llama")
    runner, hidden = prefilled(its, random_text(40), [4, 7, 2])
    slots = range(32 * BLOCK)
    before = [torch.nan_to_num(part) for layer in range(3) for part in runner.read_kv(layer, slots)]
    draft = runner.make_streams(random_streams(model, STREAMS, LAYERS), DraftLmHead(output_head(model), None))
    assert draft([Committed([4, 7, 2], 39)], hidden.layers[0][[38]]).isfinite().all()
    after = [torch.nan_to_num(part) for layer in range(3) for part in runner.read_kv(layer, slots)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_each_request_drafts_from_its_own_state() -> None:
    """The states and lengths that reach the streams, with a request between that has none."""
    made = streaming_drafter(tiny_model("llama"))
    asked: list[Any] = []

    class Runner:
        def make_streams(self, heads: StreamingHeads, lm_head: DraftLmHead) -> Any:
            def draft(requests: Sequence[Committed], states: torch.Tensor) -> torch.Tensor:
                asked.append((list(requests), states))
                logits = torch.zeros(3, len(requests), VOCAB)
                for request, state in enumerate(states):
                    logits[torch.arange(3), request, int(state[0]) + torch.arange(3)] = 9.0
                return logits

            return draft

    made.prepare(made._ranking.compute, Runner())  # type: ignore[arg-type]

    def context(name: str, state: float | None, length: int) -> DraftContext:
        states = None if state is None else HiddenStates(torch.zeros(32), {0: torch.full((32,), state)})
        tokens, greedy = list(range(length)), SamplingParams(temperature=0.0)
        return DraftContext(name, tokens, 1, greedy, 8, 3, states, block_ids=[length])

    trees = made.propose([context("a", 10.0, 5), context("b", None, 6), context("c", 20.0, 7)])
    assert [list(tree.tokens) for tree in trees] == [[10, 11, 12], [], [20, 21, 22]]
    assert [tree.max_depth for tree in trees] == [3, 0, 3]
    ((requests, states),) = asked
    assert requests == [Committed([5], 4), Committed([7], 6)]
    assert states[:, 0].tolist() == [10.0, 20.0]
    assert made.hidden_layers == (0,), "the layer below the streams' lowest"


def test_streams_draft_inside_an_engine() -> None:
    made = streaming_drafter(tiny_model("llama"))
    core = tiny_core("llama", [made])
    proposed: list[int] = []
    propose = made.propose

    def spy(contexts: Sequence[DraftContext]) -> list[DraftTree]:
        trees = propose(contexts)
        proposed.extend(len(tree) for tree in trees)
        return trees

    made.propose = spy  # type: ignore[method-assign]
    core.add(EngineRequest("r", (1, 2, 3), SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)))
    while core.has_work:
        core.step()
    assert len(proposed) > 5
    assert min(proposed) > 0


@pytest.mark.parametrize(
    ("model", "layers", "reason"),
    [
        (lambda: tiny_model("gemma3"), 1, "layers of Llama's kind .*, not of Gemma3ForCausalLM"),
        (lambda: tiny_model("llama"), 2, "streams through 2 layers need a model of more; LlamaForCausalLM has 2"),
        (lambda: random_model("llama", hidden_act="gelu"), 1, "compute the activation silu; LlamaForCausalLM has gelu"),
    ],
    ids=["architecture", "layers", "activation"],
)
def test_models_they_cannot_run_through_are_refused(model: Any, layers: int, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as refused:
        new_streams(model(), TrainSettings(stream_layers=layers))
    assert "\n" not in str(refused.value)


def test_streams_of_other_layers_are_refused() -> None:
    model = tiny_model("llama")
    sizes = dataclasses.replace(stream_sizes(model, 1), intermediate=64)
    with pytest.raises(ModelLoadError, match=r"8 numbers and 64 intermediate ones; LlamaForCausalLM has .* and 48"):
        attach_layers(StreamingHeads(32, 2, sizes, 4), model)


def write(folder: Path, model: PreTrainedModel, **changes: int) -> Path:
    heads = random_streams(model)
    sizes = dataclasses.replace(heads.sizes, **changes)
    heads = StreamingHeads(32, 3, sizes, 4)
    config = HeadsConfig("streaming", 3, 32, VOCAB, BaseModel("llama", "0" * 64), rank=4, streaming=sizes)
    save_heads(folder, heads, config, None, "")
    return folder


def test_which_models_get_a_folder_of_streams(tmp_path: Path) -> None:
    loaded = as_loaded(tiny_model("llama"), "llama")
    folder = write(tmp_path / "fitting", tiny_model("llama"))
    made = make_drafters(SpeculationConfig(heads=str(folder)), loaded)
    assert made.methods == ("suffix", "streaming")
    assert made.drafters[1].hidden_layers == (0,)
    other = write(tmp_path / "other", tiny_model("llama"), kv_heads=4)
    with pytest.raises(ModelLoadError, match="streams were made for layers of 4 heads and 4 KV heads"):
        make_drafters(SpeculationConfig(heads=str(other)), loaded)
    gemma = dataclasses.replace(as_loaded(tiny_model("gemma3"), "llama"))
    with pytest.raises(ModelLoadError, match="not of Gemma3ForCausalLM"):
        make_drafters(SpeculationConfig(heads=str(folder)), gemma)
