"""``CompiledRunner``: turns batches into calls of the compiled step, over a KV cache in the step's own layout."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch, RowSpan
from engine.compiled.draft_block import PASS_TILES, BaseLayers, CompiledDraftBlock, CompiledOwnKvBlock
from engine.compiled.library import TILE, Layer, Library, Model, Segment, Step
from engine.compiled.streams import CompiledStreamPass
from engine.compiled.weights import PackedWeights
from engine.errors import ModelLoadError
from engine.model_runner import ForwardResult
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.drafter import HiddenStates
from engine.spec_decode.own_kv import OwnKvBlock, PoolShape, TorchOwnKvBlock
from engine.spec_decode.tree import ROOT
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule
from heads.streaming import StreamingHeads

Ints = npt.NDArray[np.int32]


class CompiledKV:
    """keys: [layers, kv_heads, tiles, head_dim, 16], so that 16 scores are computed at once; values: [layers,
    kv_heads, slots, head_dim]. Pages become resident as they are first written."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, num_slots: int) -> None:
        """num_slots: a multiple of 16. Raises ModelLoadError if there is no memory for them."""
        self.num_tiles = num_slots // TILE
        self._head_dim = head_dim
        shape = (layers, kv_heads, num_slots * head_dim)
        try:
            self.keys = np.empty(shape, dtype=np.float32)
            self.values = np.empty(shape, dtype=np.float32)
        except (MemoryError, ValueError) as error:
            raise ModelLoadError(
                f"not enough memory for a KV cache of {num_slots} tokens; set engine.kv_cache_memory lower"
            ) from error

    def read(self, layer: int, slots: npt.NDArray[np.integer[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the entries in ``slots``: each [slots, kv_heads, head_dim]."""
        heads = len(self.keys[layer])
        keys = self.keys[layer].reshape(heads, self.num_tiles, self._head_dim, TILE)
        values = self.values[layer].reshape(heads, self.num_tiles * TILE, self._head_dim)
        # Indices on both sides of a slice come first in numpy's result.
        found = keys[:, slots // TILE, :, slots % TILE]
        return torch.from_numpy(found), torch.from_numpy(values[:, slots].swapaxes(0, 1).copy())


class CompiledRunner:
    """Computes batches with the compiled step. The logits of a result are valid until the next ``forward``."""

    def __init__(
        self,
        library: Library,
        weights: PackedWeights,
        *,
        num_slots: int,
        block_size: int,
        threads: int,
        needs_hidden: bool = False,
        hidden_layers: Sequence[int] = (),
        passes: int = 0,
    ) -> None:
        """block_size: a multiple of 16. passes: requests that a draft block may draft for at once.

        Raises ModelLoadError if memory runs out."""
        sizes = weights.dimensions
        self._library = library
        self._weights = weights
        self._block_size = block_size
        self._needs_hidden = needs_hidden or bool(hidden_layers)
        self._hidden_layers = tuple(hidden_layers)
        self._capture_layers = np.array(self._hidden_layers, dtype=np.int32)
        self._pool_tiles = num_slots // TILE
        self._pass_tiles = passes * PASS_TILES
        self._kv = CompiledKV(sizes.num_layers, sizes.kv_heads, sizes.head_dim, num_slots + self._pass_tiles * TILE)
        self._threads = threads
        self._logits = torch.empty(0, weights.lm_head.n)
        self._model = self._describe()
        try:
            self._engine = library.create(self._model, threads)
        except MemoryError as error:
            raise ModelLoadError("there are no memory and threads for the compiled step") from error
        weakref.finalize(self, library.destroy, self._engine)

    def _describe(self) -> Model:
        weights, sizes, kv = self._weights, self._weights.dimensions, self._kv
        layers = (Layer * sizes.num_layers)()
        for index, layer in enumerate(weights.layers):
            layers[index] = layer
            layers[index].keys = kv.keys[index].ctypes.data
            layers[index].values = kv.values[index].ctypes.data
        return Model(
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            num_layers=sizes.num_layers,
            num_tiles=kv.num_tiles,
            eps=sizes.eps,
            attention_scale=sizes.attention_scale,
            layers=layers,
            final_norm=weights.final_norm,
            cosine=weights.cosine,
            sine=weights.sine,
            lm_head=weights.lm_head,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Raises MemoryError if there is none for the batch; nothing was computed then."""
        rows, kept = batch.num_rows, len(batch.logits_rows)
        if (furthest := max(batch.positions)) >= self._weights.positions:
            raise ValueError(f"position {furthest} is behind the {self._weights.positions} of the RoPE table")
        states = self._embedded(batch)
        final = torch.empty_like(states)
        captured = [torch.empty_like(states) for _ in self._hidden_layers]
        if kept > len(self._logits):
            self._logits = torch.empty(kept, self._weights.lm_head.n)
        segments, layout = (Segment * len(batch.spans))(), _Layout(self._block_size)
        for segment, span in zip(segments, batch.spans, strict=True):
            tiles = layout.add(span)
            segment.first_row, segment.num_rows = span.first_row, span.num_rows
            segment.tiles, segment.num_entries = tiles.ctypes.data, span.kv_length
        path = layout.arrays()
        positions = np.array(batch.positions, dtype=np.int32)
        kept_rows = np.array(batch.logits_rows, dtype=np.int32)
        captures = (ctypes.c_void_p * max(1, len(captured)))(*[tensor.data_ptr() for tensor in captured])
        self._library.step(
            self._engine,
            Step(
                rows=rows,
                segments=len(segments),
                kept=kept,
                num_captures=len(captured),
                states=states.data_ptr(),
                positions=positions.ctypes.data,
                slots=path.slots.ctypes.data,
                requests=segments,
                prefix=path.prefix.ctypes.data,
                path_start=path.start.ctypes.data,
                path=path.entries.ctypes.data,
                kept_rows=kept_rows.ctypes.data,
                capture_layers=self._capture_layers.ctypes.data,
                final=final.data_ptr(),
                logits=self._logits.data_ptr(),
                captures=ctypes.addressof(captures),
            ),
        )
        hidden = HiddenStates(final, dict(zip(self._hidden_layers, captured, strict=True)))
        return ForwardResult(self._logits[:kept], hidden if self._needs_hidden else None)

    def _embedded(self, batch: Batch) -> torch.Tensor:
        states = self._weights.embedding[torch.tensor(batch.token_ids)]
        for span in batch.spans:
            if span.extra is not None and span.extra.embeddings is not None:
                states[span.extra_row : span.extra_row + span.num_extra] = span.extra.embeddings
        return states

    def move_kv(self, source: Sequence[int], target: Sequence[int]) -> None:
        sources, targets = np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        self._library.move(self._engine, sources.ctypes.data, targets.ctypes.data, len(sources))

    def read_kv(self, layer: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv.read(layer, np.array(slots))

    def make_block(self, module: MtpModule, lm_head: DraftLmHead) -> CompiledDraftBlock:
        """A draft block over the last layer's cache. Raises ModelLoadError."""
        return CompiledDraftBlock(
            self._library, self._layers(self._kv), module, lm_head, is_int8=self._is_int8, threads=self._threads
        )

    def make_own_block(self, module: OwnKvModule, lm_head: DraftLmHead, compute: HeadCompute) -> OwnKvBlock:
        """A draft block with a KV layer of its own: compiled for an MTP module. Raises ModelLoadError."""
        num_slots = self._pool_tiles * TILE
        if not isinstance(module, MtpModule):
            pool = PoolShape(num_slots, self._block_size, torch.float32, torch.device("cpu"))
            return TorchOwnKvBlock(module, lm_head, pool, compute)
        layers = self._layers(
            CompiledKV(1, module.kv_heads, module.key_dim, num_slots + self._pass_tiles * TILE), first=1
        )
        return CompiledOwnKvBlock(self._library, layers, module, lm_head, is_int8=self._is_int8, threads=self._threads)

    def make_streams(self, heads: StreamingHeads, lm_head: DraftLmHead) -> CompiledStreamPass:
        """Streams over the uppermost layers' caches. Raises ModelLoadError."""
        return CompiledStreamPass(
            self._library, self._layers(self._kv), heads, lm_head, is_int8=self._is_int8, threads=self._threads
        )

    @property
    def _is_int8(self) -> bool:
        return bool(self._weights.lm_head.is_int8)

    def _layers(self, cache: CompiledKV, first: int = 0) -> BaseLayers:
        return BaseLayers(
            weights=self._weights,
            keys=[layer.ctypes.data for layer in cache.keys],
            values=[layer.ctypes.data for layer in cache.values],
            num_tiles=cache.num_tiles,
            first_tile=self._pool_tiles,
            block_size=self._block_size,
            owner=cache,
            first=first,
        )


class _Paths:
    """What each row sees: entries [0, prefix), then its path (see ``View`` in kernels.h); and where its KV goes."""

    __slots__ = ("entries", "prefix", "slots", "start")

    def __init__(self, slots: list[Ints], prefix: list[int], start: list[int], entries: list[int]) -> None:
        self.slots = np.concatenate(slots)
        self.prefix = np.array(prefix, dtype=np.int32)
        self.start = np.array(start, dtype=np.int32)
        self.entries = np.array(entries or [0], dtype=np.int32)


class _Layout:
    """Collects, request by request, where the rows of a batch lie in the KV cache and what they see of it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._within = np.arange(block_size // TILE, dtype=np.int32)
        self._tiles: list[Ints] = []
        self._slots: list[Ints] = []
        self._prefix: list[int] = []
        self._start: list[int] = [0]
        self._entries: list[int] = []

    def add(self, span: RowSpan) -> Ints:
        """Returns the tiles of the request's KV entries, in order; they live as long as this layout."""
        blocks = np.array(span.item.request.block_ids, dtype=np.int32)
        tiles = (blocks[:, None] * len(self._within) + self._within).ravel()
        self._tiles.append(tiles)
        start, end = span.item.start, span.item.start + span.item.count
        entries = np.arange(start, span.kv_length, dtype=np.int32)
        self._slots.append(tiles[entries // TILE] * TILE + entries % TILE)
        self._prefix += range(start + 1, end + 1)
        self._start += [len(self._entries)] * span.item.count
        paths: list[list[int]] = []
        for node, parent in enumerate(span.parents):
            path = [*(paths[parent] if parent != ROOT else ()), end + node]
            paths.append(path)
            self._entries += path
            self._prefix.append(end)
            self._start.append(len(self._entries))
        return tiles

    def arrays(self) -> _Paths:
        return _Paths(self._slots, self._prefix, self._start, self._entries)
