"""Tiny random models of the families that the compiled step knows, and runners over them without an engine.

Their vocabulary is that of ``tiny_engine``, so its drafters and helpers serve here too; it is no multiple of 16.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_engine import EOS, VOCAB
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from engine.batch import build_batch
from engine.compiled.build import CompiledStepError, build_library
from engine.compiled.library import Library
from engine.compiled.runner import CompiledRunner
from engine.compiled.weights import PackedWeights, pack_weights
from engine.model_runner import ForwardResult
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.drafter import ExtraRows
from engine.spec_decode.tree import DraftTree

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
FAMILIES = tuple(CONFIGS)
KERNELS = ("baseline", "avx2", "avx512-vnni")
BLOCK = 16
POSITIONS = 512
WINDOW = 23

# 112 is a multiple of 16 and not of 32: every size of rotation occurs.
_SIZES: dict[str, Any] = dict(  # noqa: C408
    vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=EOS,
    pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip


@functools.cache
def library(kernels: str | None = None) -> Library:
    """Skips the test where this CPU lacks the kernels, or where nothing can compile them."""
    try:
        return Library(build_library(lambda _: None), kernels)
    except CompiledStepError as error:
        pytest.skip(str(error))


@functools.cache
def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """A float32 model whose every weight matters: biases and norms are random too. Not to be packed: see ``packed``."""
    config = CONFIGS[family](**(_SIZES | ({"sliding_window": WINDOW} if family == "mistral" else {}) | changes))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(3.0)
        elif name.endswith("bias"):
            parameter.normal_(std=0.2)
        else:
            parameter.uniform_(0.6, 1.4)
    if not config.tie_word_embeddings:
        model.lm_head.weight.mul_(5.0)
    return model


def packed(
    model: PreTrainedModel, *, is_int8: bool = False, kernels: str | None = None, positions: int = POSITIONS
) -> PackedWeights:
    """Of a copy of ``model``, which stays whole."""
    return pack_weights(copy.deepcopy(model), library(kernels), is_int8=is_int8, positions=positions)


def eager(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab]: the logits of transformers' own modules."""
    any_model: Any = model
    with torch.inference_mode():
        logits: torch.Tensor = any_model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB - 1) for _ in range(length)]


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-4) -> None:
    """Within ``bound`` as a share of the largest number expected."""
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max() / expected.abs().max())
    assert difference <= bound, f"differs by {difference:.1e} of the largest"


def random_tree(nodes: int, seed: int, vocab: int = VOCAB) -> DraftTree:
    """Chains, forks and long branches mixed."""
    draw, tree = random.Random(seed), DraftTree()
    while len(tree) < nodes:
        parent = draw.choice([-1, len(tree) - 1, len(tree) - 1, draw.randrange(-1, max(1, len(tree)))])
        tree.add(draw.randrange(vocab - 1), min(parent, len(tree) - 1), 0.5, "test")
    return tree


def chain(tokens: Sequence[int]) -> DraftTree:
    tree = DraftTree()
    for depth, token in enumerate(tokens):
        tree.add(token, depth - 1, 0.5, "test")
    return tree


@dataclass(frozen=True)
class Part:
    """Rows of one request in a step: tokens [start, end), then a tree, then a drafter's rows."""

    request: Request
    start: int
    end: int
    tree: DraftTree | None = None
    extra: ExtraRows | None = None


class Bench:
    """A runner and its KV blocks, which are handed out in random order, so that no request lies in one piece."""

    def __init__(self, weights: PackedWeights, *, kernels: str | None = None, threads: int = 1, **needs: Any) -> None:
        self.weights = weights
        self.runner = CompiledRunner(
            library(kernels), weights, num_slots=64 * BLOCK, block_size=BLOCK, threads=threads, **needs
        )
        # What no row has written yet must not matter.
        self.runner._kv.keys.fill(float("nan"))
        self.runner._kv.values.fill(float("nan"))
        self._blocks = list(range(64))
        random.Random(3).shuffle(self._blocks)

    def request(self, tokens: Sequence[int], room: int = 2 * BLOCK, *, keeps_all: bool = True) -> Request:
        """room: entries behind the tokens. keeps_all: keep every row's logits, else the last token's and a tree's."""
        source = EngineRequest("r", tuple(tokens), SamplingParams(prompt_logprobs=0 if keeps_all else None))
        request = Request.from_source(source, ())
        count = -(-(len(tokens) + room) // BLOCK)
        request.block_ids, self._blocks = self._blocks[:count], self._blocks[count:]
        return request

    def free(self, request: Request) -> None:
        """Its blocks are the next to be used, with all that lies in them."""
        self._blocks = request.block_ids + self._blocks

    def forward(self, *parts: Part) -> ForwardResult:
        items = [
            ScheduledRequest(part.request, part.start, part.end - part.start, part.tree or DraftTree())
            for part in parts
        ]
        return self.runner.forward(build_batch(items, [part.extra for part in parts]))

    def logits(self, *parts: Part) -> list[torch.Tensor]:
        """Of each part: its tokens' rows, then its tree's."""
        sizes = [part.end - part.start + (0 if part.tree is None else len(part.tree)) for part in parts]
        return [rows.clone() for rows in self.forward(*parts).logits.split(sizes)]

    def prefill(self, request: Request, sizes: Sequence[int] = ()) -> torch.Tensor:
        """Logits of all its tokens, computed in chunks of ``sizes``, over and over; () is one chunk."""
        rows, start, turn = [], 0, 0
        while start < request.num_tokens:
            end = min(request.num_tokens, start + (sizes[turn % len(sizes)] if sizes else request.num_tokens))
            rows += self.logits(Part(request, start, end))
            start, turn = end, turn + 1
        return torch.cat(rows)

    def slots(self, request: Request, entries: Sequence[int]) -> list[int]:
        return [request.block_ids[entry // BLOCK] * BLOCK + entry % BLOCK for entry in entries]


def tree_logits(model: PreTrainedModel, tokens: Sequence[int], tree: DraftTree) -> torch.Tensor:
    """[nodes, vocab]: each node's logits after the tokens and its own path, by transformers' own modules."""
    return torch.stack([eager(model, [*tokens, *tree.path_tokens(node)])[-1] for node in range(len(tree))])
