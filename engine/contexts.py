"""What heads that attend need of an answer: KV of the base model's upper layers, and states on the way there.

Read by running the text through the model again, many rows at a time, which costs a fraction of having written it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from engine.backend import Backend, RunnerNeeds
from engine.batch import build_batch
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.drafter import HiddenStates
from engine.spec_decode.tree import DraftTree
from heads.data import Answer, Context, TopLayers

_ROWS = 256  # of a forward
_LARGEST = torch.finfo(torch.float16).max

ContextT = TypeVar("ContextT")
WrittenT = TypeVar("WrittenT", contravariant=True)


class _Rereader:
    """Runs one answer at a time through the model, with a runner of its own."""

    def __init__(self, backend: Backend, longest: int, block_size: int, hidden_layers: Sequence[int] = ()) -> None:
        """longest: tokens of the longest prompt with its answer. Raises ModelLoadError if there is no memory for it."""
        self._block_size = block_size
        self._blocks = list(range(-(-longest // block_size)))
        self._runner = backend.make_runner(
            RunnerNeeds(
                num_slots=len(self._blocks) * block_size,
                block_size=block_size,
                needs_hidden=True,
                hidden_layers=hidden_layers,
            )
        )

    def states(self, tokens: Sequence[int]) -> Iterator[tuple[int, HiddenStates]]:
        """Of all tokens but the last, in parts, each with its first position."""
        request = Request.from_source(EngineRequest("context", tuple(tokens), SamplingParams(max_tokens=1)), ())
        request.block_ids = self._blocks
        count = len(tokens) - 1  # so no row is the last, and none needs logits
        for start in range(0, count, _ROWS):
            item = ScheduledRequest(request, start, min(_ROWS, count - start), DraftTree())
            hidden = self._runner.forward(build_batch([item], [None])).hidden
            assert hidden is not None, "the runner was built without hidden states"
            yield start, hidden

    def kv(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first ``count`` positions that were run last."""
        keys, values = self._runner.read_kv(layer, range(count))
        return keys.to("cpu", torch.float16), values.to("cpu", torch.float16)


class ContextReader:
    """Reads what MTP modules are trained on."""

    def __init__(self, backend: Backend, longest: int, block_size: int) -> None:
        """As ``_Rereader``."""
        self._rereader = _Rereader(backend, longest, block_size)
        self._layer = len(backend.shapes) - 1

    def __call__(self, answer: Answer) -> Context:
        prompt, tokens = answer.ask.prompt, (*answer.ask.prompt, *answer.tokens)
        states = [
            hidden.final[: len(prompt) - 1 - start].to("cpu", torch.float16)
            for start, hidden in self._rereader.states(tokens)
            if start < len(prompt) - 1
        ]
        keys, values = self._rereader.kv(self._layer, len(tokens) - 1)
        return Context(
            keys, values, torch.tensor(prompt), torch.cat(states) if states else torch.empty(0, 0, dtype=torch.float16)
        )


class TopLayersReader:
    """Reads what streams are trained on."""

    def __init__(self, backend: Backend, longest: int, block_size: int, layers: int) -> None:
        """layers: how many of the model's uppermost ones; else as ``_Rereader``."""
        count = len(backend.shapes)
        self._layers = range(count - layers, count)
        self._rereader = _Rereader(backend, longest, block_size, (self._layers[0] - 1,))

    def __call__(self, answer: Answer) -> TopLayers:
        entry = self._layers[0] - 1
        prompt, tokens = answer.ask.prompt, (*answer.ask.prompt, *answer.tokens)
        states = [
            # What goes through no norm may be beyond half precision.
            hidden.layers[entry][max(0, len(prompt) - 1 - start) :].clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16)
            for start, hidden in self._rereader.states(tokens)
        ]
        parts = [self._rereader.kv(layer, len(tokens) - 1) for layer in self._layers]
        keys, values = (torch.stack(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return TopLayers(keys, values, torch.cat(states))


class ContextStore(Protocol[WrittenT]):
    """Where contexts lie, shard by shard, beside their answers."""

    def read(self, index: int) -> list[Answer]: ...

    def has_contexts(self, index: int) -> bool: ...

    def write_contexts(self, index: int, contexts: Sequence[WrittenT]) -> None: ...


def add_contexts(
    store: ContextStore[ContextT],
    shards: int,
    make_reader: Callable[[], Callable[[Answer], ContextT]],
    progress: Callable[[int], None],
) -> None:
    """Adds contexts to the first ``shards`` shards that lack them; the reader is made when the first is wanted."""
    reader: Callable[[Answer], ContextT] | None = None
    for index in range(shards):
        if not store.has_contexts(index):
            reader = reader or make_reader()
            store.write_contexts(index, [reader(answer) for answer in store.read(index)])
        progress(index + 1)
