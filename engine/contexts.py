"""What heads that attend need of an answer: the base model's last-layer KV and its states over the prompt.

Read by running the text through the model again, many rows at a time, which costs a fraction of having written it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.backend import Backend, RunnerNeeds
from engine.batch import build_batch
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.tree import DraftTree
from heads.data import Answer, AnswerStore, Context

_ROWS = 256  # of a forward


class ContextReader:
    """Reads one answer at a time with a runner of its own."""

    def __init__(self, backend: Backend, longest: int, block_size: int) -> None:
        """longest: tokens of the longest prompt with its answer. Raises ModelLoadError if there is no memory for it."""
        self._block_size = block_size
        self._blocks = list(range(-(-longest // block_size)))
        self._layer = len(backend.shapes) - 1
        self._runner = backend.make_runner(
            RunnerNeeds(num_slots=len(self._blocks) * block_size, block_size=block_size, needs_hidden=True)
        )

    def __call__(self, answer: Answer) -> Context:
        prompt = answer.ask.prompt
        tokens = (*prompt, *answer.tokens)
        request = Request.from_source(EngineRequest("context", tokens, SamplingParams(max_tokens=1)), ())
        request.block_ids = self._blocks
        count = len(tokens) - 1  # so no row is the last, and none needs logits
        states: list[torch.Tensor] = []
        for start in range(0, count, _ROWS):
            item = ScheduledRequest(request, start, min(_ROWS, count - start), DraftTree())
            hidden = self._runner.forward(build_batch([item], [None])).hidden
            assert hidden is not None, "the runner was built without hidden states"
            if start < len(prompt) - 1:
                states.append(hidden.final[: len(prompt) - 1 - start].to("cpu", torch.float16))
        keys, values = self._runner.read_kv(self._layer, range(count))
        return Context(
            keys.to("cpu", torch.float16),
            values.to("cpu", torch.float16),
            torch.tensor(prompt),
            torch.cat(states) if states else torch.empty(0, 0, dtype=torch.float16),
        )


def add_contexts(
    store: AnswerStore, shards: int, make_reader: Callable[[], ContextReader], progress: Callable[[int], None]
) -> None:
    """Adds contexts to the first ``shards`` shards that lack them; the reader is made when the first is wanted."""
    reader: ContextReader | None = None
    for index in range(shards):
        if not store.has_contexts(index):
            reader = reader or make_reader()
            store.write_contexts(index, _of_shard(reader, store.read(index)))
        progress(index + 1)


def _of_shard(reader: ContextReader, answers: Sequence[Answer]) -> list[Context]:
    return [reader(answer) for answer in answers]
