"""Heads that know the drafted tokens compute in the engine what they computed in training: an MTP module over the
engine's own KV cache, Markov heads beside it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from compiled_engine import backend as compiled_backend
from compiled_models import random_model
from tiny_engine import VOCAB, as_loaded, tiny_model
from tiny_heads import random_markov, random_mtp
from transformers import PreTrainedModel

from engine.backend import Backend, RunnerNeeds, TransformersBackend
from engine.batch import build_batch
from engine.contexts import ContextReader
from engine.errors import ModelLoadError
from engine.loading.heads import output_head
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.candidates import PlainHeadCompute
from engine.spec_decode.draft_block import Committed, DepthRows
from engine.spec_decode.markov import MarkovDrafter
from engine.spec_decode.tree import DraftTree
from heads.batch import make_batch
from heads.data import Answer, Ask
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule

BLOCK = 16
DEPTHS = 3


def made(kind: str, family: str) -> tuple[PreTrainedModel, Backend]:
    """(a whole model, a backend over it)"""
    if kind == "compiled":
        return random_model(family), compiled_backend(family, False)
    model = tiny_model(family, torch.float32)
    return model, TransformersBackend(as_loaded(copy.deepcopy(model), family), packs=False)


def prefilled(backend: Backend, tokens: list[int], blocks: list[int]) -> tuple[ModelRunner, torch.Tensor]:
    """A runner that knows all but the last token, and their final states."""
    runner = backend.make_runner(RunnerNeeds(32 * BLOCK, BLOCK, needs_hidden=True, passes=4))
    request = Request.from_source(EngineRequest("r", tuple(tokens), SamplingParams(max_tokens=1)), ())
    request.block_ids = blocks
    batch = build_batch([ScheduledRequest(request, 0, len(tokens) - 1, DraftTree())], [None])
    hidden = runner.forward(batch).hidden
    assert hidden is not None
    return runner, hidden.final.float().clone()


def as_answer(backend: Backend, prompt: list[int], tokens: list[int], states: torch.Tensor) -> Answer:
    answer = Answer(Ask(tuple(prompt), 0.0, 0), tuple(tokens), states[len(prompt) - 1 :])
    context = ContextReader(backend, 64, BLOCK)(answer)
    return Answer(answer.ask, answer.tokens, answer.states, context)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("compiled", name) for name in ("llama", "qwen3", "mistral")]
    + [("transformers", name) for name in ("llama", "qwen2", "gemma3")],
)
@torch.inference_mode()
def test_drafting_computes_what_training_did(kind: str, family: str) -> None:
    """Two requests in one pass, their blocks scattered; drafted is what the text goes on with, so that training's
    outputs at that row are the truth, and beside it a token that is wrong, which must not be seen by the others."""
    model, backend = made(kind, family)
    module = random_mtp(model, DEPTHS)
    lm_head = DraftLmHead(output_head(model), torch.arange(0, VOCAB, 2))
    draw = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCAB - 1, (40,), generator=draw).tolist()
    prompt, tokens = text[:19], text[19:]
    _, states = prefilled(backend, text, [0, 1, 2])
    batch = make_batch([as_answer(backend, prompt, tokens, states)], lm_head)
    expected = [module.logits(lm_head, output, depth) for depth, output in enumerate(module.outputs(batch), start=1)]
    at = [4, 13]  # rows of the answer that each request has come to
    runner, _ = prefilled(backend, text, [5, 3, 9])
    drafting = runner.make_block(copy.deepcopy(module), copy.deepcopy(lm_head)).begin(
        [Committed([5, 3, 9], len(prompt) + row) for row in at]
    )
    before = torch.stack([states[len(prompt) - 1 + row] for row in at])
    paths: list[list[int]] = [[], []]
    for depth in range(1, DEPTHS + 1):
        right = [tokens[row + depth - 1] for row in at]
        pairs: list[Any] = []
        for owner in range(2):
            first = 0 if depth == 1 else 2 * depth - 3
            pairs.append((right[owner], owner, [*paths[owner], first]))
            if depth > 1:  # a sibling
                pairs.append(((right[owner] + 1) % VOCAB, owner, [*paths[owner], first + 1]))
            paths[owner] = [*paths[owner], first]
        given = before if depth == 1 else before.repeat_interleave(2, 0)
        rows = DepthRows(given, [p[0] for p in pairs], [p[1] for p in pairs], [p[2] for p in pairs], depth)
        found, logits = drafting.run(rows)
        step = 1 if depth == 1 else 2
        before = found[::step]
        for owner, row in enumerate(at):
            wanted = expected[depth - 1][row]
            # Contexts are kept in half precision.
            assert torch.allclose(logits[owner * step], wanted, atol=0.02 * float(wanted.abs().max())), (depth, owner)


def test_a_width_that_the_kernels_cannot_take_is_refused() -> None:
    model, backend = made("compiled", "llama")
    shape = dataclasses.replace(random_mtp(model).shape, intermediate=10)
    module = MtpModule(model.config.hidden_size, shape, DEPTHS)
    runner = backend.make_runner(RunnerNeeds(2 * BLOCK, BLOCK, needs_hidden=True, passes=1))
    with pytest.raises(ModelLoadError, match="10 wide inside, which is not a multiple of 16"):
        runner.make_block(module, DraftLmHead(output_head(model), None))


@pytest.mark.parametrize("kind", ["plain", "float", "int8"])
@torch.inference_mode()
def test_markov_heads_draft_what_they_were_trained_to(kind: str) -> None:
    """Two of three requests draft; beside each right token a wrong one, whose row gets the bias of the wrong token."""
    model = random_model("llama")
    lm_head = DraftLmHead(output_head(model), torch.arange(0, VOCAB, 2))
    heads = random_markov(lm_head, DEPTHS)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB - 1, (20,), generator=draw).tolist()
    states = torch.randn(20, heads.hidden_size, generator=draw)
    compute = PlainHeadCompute() if kind == "plain" else compiled_backend("llama", kind == "int8").head_compute
    drafter = MarkovDrafter(copy.deepcopy(heads), copy.deepcopy(lm_head))
    drafter.prepare(compute, None)  # type: ignore[arg-type]
    assert drafter._block is not None
    drafting = drafter._block.begin([Committed([0], row) for row in (4, 0, 13)])
    at, before = {0: 4, 2: 13}, states[[4, 13]]  # rows of the answer that the requests have come to, by owner
    for depth in range(1, DEPTHS + 1):
        pairs = []
        for owner, row in at.items():
            right = tokens[row + depth - 1]
            pairs += [(owner, right)] if depth == 1 else [(owner, right), (owner, (right + 1) % VOCAB)]
        given = before if depth == 1 else before.repeat_interleave(2, 0)
        owners, drafted = [owner for owner, _ in pairs], [token for _, token in pairs]
        _, logits = drafting.run(DepthRows(given, drafted, owners, [[0]] * len(pairs), depth))
        for (owner, token), found in zip(pairs, logits, strict=True):
            text = list(tokens)
            text[at[owner] + depth - 1] = token
            batch = make_batch([Answer(Ask((1,), 0.0, 0), tuple(text), states)], lm_head)
            output = list(heads.outputs(batch))[depth - 1]
            wanted = heads.logits(lm_head, output, depth)[at[owner]]
            atol = 0.05 if kind == "int8" else 1e-4
            assert torch.allclose(found, wanted, atol=atol * float(wanted.abs().max())), (depth, owner, token)
