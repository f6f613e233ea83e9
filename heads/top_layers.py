"""What streams are trained on, beside the answers it belongs to: one file a shard, of which parts are read when wanted.

It holds 2 bytes for each hidden unit of each answer token, and for each number that the uppermost layers' caches keep
of each token, prompts included: of SmolLM2-135M with four layers 1,152 and 3,072 bytes, so that the files of a long run
may be larger than memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from heads.data import Answer, AnswerStore, TopLayers, opened
from heads.errors import HeadsError


class TopLayersStore:
    """Files beside the answers of ``store``. layers: how many of the model's uppermost ones are in them."""

    def __init__(self, store: AnswerStore, layers: int) -> None:
        self._store = store
        self._layers = layers

    def read(self, index: int) -> list[Answer]:
        """A shard's answers alone."""
        return self._store.read(index)

    def has_contexts(self, index: int) -> bool:
        return self._file(index).exists()

    def write_contexts(self, index: int, contexts: Sequence[TopLayers]) -> None:
        """Of every answer of a shard, in order; in half precision, like the answers' states."""
        tensors = {
            field.name: torch.cat([getattr(context, field.name) for context in contexts]).to(torch.float16).contiguous()
            for field in dataclasses.fields(TopLayers)
        }
        partial = self._file(index).with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, self._file(index))

    def read_with_contexts(self, index: int) -> list[Answer]:
        """The answers, each with a ``read_top`` of its own. Raises HeadsError for damaged files."""
        answers, path = self._store.read(index), self._file(index)
        counts = [len(answer.tokens) for answer in answers]
        entries = [len(answer.ask.prompt) + count - 1 for answer, count in zip(answers, counts, strict=True)]
        with opened(path) as file:
            shape = file.get_slice("keys").get_shape()
            if shape[:2] != [sum(entries), self._layers] or file.get_slice("states").get_shape()[0] != sum(counts):
                raise HeadsError(f"{path} does not belong to its answers; remove it to have it made again")
        ends, state_ends = (list(itertools.accumulate(sizes)) for sizes in (entries, counts))
        return [
            dataclasses.replace(
                answer, read_top=functools.partial(_read_part, path, (end - size, end), (state_end - count, state_end))
            )
            for answer, size, end, count, state_end in zip(answers, entries, ends, counts, state_ends, strict=True)
        ]

    def _file(self, index: int) -> Path:
        return self._store.folder / f"top{self._layers}-{index:05d}.safetensors"


def _read_part(path: Path, entries: tuple[int, int], rows: tuple[int, int]) -> TopLayers:
    """Raises HeadsError for a file that was damaged since."""
    with opened(path) as file:
        keys, values = (file.get_slice(name)[slice(*entries)] for name in ("keys", "values"))
        return TopLayers(keys, values, file.get_slice("states")[slice(*rows)])
