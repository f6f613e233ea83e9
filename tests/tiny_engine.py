"""Tiny random models in fp64 and engines over them, where exhaustive checking needs speed.

fp64 makes a near-tie so unlikely that token identity can be asked for without a margin.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.assembly import assemble
from engine.backend import TransformersBackend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.core import EngineCore
from engine.loading import LoadedModel
from engine.model_runner import ModelRunner
from engine.outputs import RequestOutput, TokenOutput
from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.controller import Controller
from engine.spec_decode.drafter import DraftContext, Drafter, DraftFeedback, ExtraRows, KvOwner
from engine.spec_decode.tree import ROOT, DraftTree

# Tiny matrices gain nothing from a team of threads, and lose whole time slices to it on a busy machine.
torch.set_num_threads(1)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
VOCAB = 61
EOS = 60
MAX_LEN = 96

_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=MAX_LEN,
    bos_token_id=0,
    eos_token_id=EOS,
    pad_token_id=0,
    tie_word_embeddings=False,
)


def tiny_config(architecture: str) -> Any:
    if architecture == "llama":
        return LlamaConfig(**_SIZES)
    if architecture == "qwen2":
        return Qwen2Config(**_SIZES)
    if architecture == "qwen3":
        return Qwen3Config(**_SIZES)
    if architecture == "mistral":
        return MistralConfig(**_SIZES, sliding_window=9)
    layers = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(**_SIZES, sliding_window=7, layer_types=layers, query_pre_attn_scalar=8)


@functools.cache
def tiny_model(architecture: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model whose next-token distribution is neither flat nor certain (an entropy of one to two nats)."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture)).to(dtype).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.mul_(3.0)
    model.lm_head.weight.mul_(5.0)
    return model


@dataclass(frozen=True)
class Sizes:
    """Knobs of a tiny engine; small enough that chunks, preemption and eviction happen all the time."""

    block_size: int = 4
    num_blocks: int = 200
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    prefix_caching: bool = True
    max_draft_tokens: int = 12
    verifier: str = "match"


def as_loaded(model: PreTrainedModel, name: str = "tiny", digest: str = "0" * 64) -> LoadedModel:
    """What loading ``model`` from a folder would give."""
    return LoadedModel(
        model=model,
        path=Path("tiny"),
        digest=digest,
        name=name,
        architecture=type(model).__name__,
        eos_token_ids=(EOS,),
        max_position_embeddings=MAX_LEN,
    )


def tiny_core(
    architecture: str, drafters: Sequence[Drafter] = (), sizes: Sizes | None = None, *, measures_steps: bool = False
) -> EngineCore:
    """A core that asks every drafter at every step and verifies every proposed node, whatever they cost.

    measures_steps: times steps all the same, as a server does when it starts, and writes the times to the cache.
    """
    sizes = sizes or Sizes()
    model = tiny_model(architecture)
    text = model.config.get_text_config()
    block_bytes = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * 8 * sizes.block_size
    block_bytes += sum(d.block_bytes(sizes.block_size, model.dtype) for d in drafters if isinstance(d, KvOwner))
    settings = EngineSettings(
        ModelConfig(path="tiny", dtype="float64"),
        EngineConfig(
            device="cpu",
            block_size=sizes.block_size,
            kv_cache_memory=block_bytes * sizes.num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            prefix_caching=sizes.prefix_caching,
        ),
        SpeculationConfig(max_draft_tokens=sizes.max_draft_tokens, verifier=sizes.verifier),  # type: ignore[arg-type]
    )
    backend = TransformersBackend(as_loaded(model, architecture))
    core = assemble(backend, settings, lambda _: None, list(drafters), measures_steps=measures_steps).core
    core.scheduler.controller = Controller(None)
    return core


@dataclass
class Answer:
    """What one request got, joined."""

    tokens: list[TokenOutput] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def accepted(self) -> int:
        return sum(token.depth > 0 for token in self.tokens)


def collect(answers: dict[str, Answer], outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None, "an output came after the terminal one"
        answer.tokens += output.tokens
        answer.outputs.append(output)


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """Runs requests to their end, all handed in at once."""
    answers: dict[str, Answer] = {}
    for request in requests:
        core.add(request)
    for _ in range(10_000):
        if not core.has_work:
            return answers
        collect(answers, core.step().outputs)
    raise AssertionError("the engine did not finish")


def request(
    name: str, prompt: Sequence[int], sampling: SamplingParams, speculation: SpeculationParams | None = None
) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, speculation or SpeculationParams())


def assert_all_free(core: EngineCore) -> None:
    """Law 3: nothing is left and every block is free."""
    assert not core.has_work
    pool = core.scheduler.pool
    pool.check_invariants()
    assert pool.num_free == pool.num_blocks
    for drafter in core.drafting.drafters:
        assert not getattr(drafter, "_requests", None), "a drafter still remembers a request"


class ScriptedDrafter:
    """Base of test drafters: no hidden states, nothing learned."""

    method = "scripted"
    needs_hidden = False
    hidden_layers: tuple[int, ...] = ()
    max_extra_rows = 0

    def prepare(self, compute: HeadCompute, runner: ModelRunner) -> None:
        pass

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        pass

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        return None

    def observe(self, feedback: DraftFeedback) -> None:
        assert feedback.emitted

    def release(self, request_id: str) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        raise NotImplementedError


class OracleDrafter(ScriptedDrafter):
    """Knows the right continuation (from a plain run) and hides it in a tree of wrong branches.

    ``truth`` maps a request id to its answer. Each node is right with probability ``skill``.
    """

    method = "oracle"

    def __init__(self, truth: dict[str, list[int]], seed: int, skill: float = 0.85) -> None:
        self._truth = truth
        self._random = random.Random(seed)
        self._skill = skill

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._grow(context) for context in contexts]

    def _grow(self, context: DraftContext) -> DraftTree:
        tree, draw = DraftTree(), self._random
        done = len(context.token_ids) - context.prompt_length
        node, survival = ROOT, 1.0
        for token in self._truth[context.request_id][done : done + draw.randint(1, 8)]:
            siblings = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 2))]
            if draw.random() < self._skill:
                siblings.insert(draw.randint(0, len(siblings)), token)
            for sibling in siblings:
                tree.add(sibling, node, survival * draw.uniform(0.1, 1.0), self.method)
            step = tree.child(node, token)
            if step is None:
                break
            node, survival = step, tree.survival[step]
        return tree


class HostileDrafter(ScriptedDrafter):
    """Random tokens, EOS, repeats of one token, far too many nodes and far too deep."""

    method = "hostile"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [self._grow() for _ in contexts]

    def _grow(self) -> DraftTree:
        tree, draw = DraftTree(), self._random
        for _ in range(draw.randint(0, 40)):
            parent = draw.choice([ROOT, len(tree) - 1, draw.randrange(-1, max(1, len(tree)))])
            parent = min(parent, len(tree) - 1)
            token = draw.choice([EOS, 0, 5, draw.randrange(VOCAB)])
            tree.add(token, parent, draw.random(), self.method)
        return tree
