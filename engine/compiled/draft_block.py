"""The block of an MTP module on the compiled step: a model of one layer whose cache is the base model's last layer, or
one of its own in the same blocks.

What it stores of drafted tokens goes to tiles behind those of the pool, some for each request of a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.compiled.library import TILE, Layer, Library, Model, Segment, Step
from engine.compiled.weights import PackedWeights, Packer
from engine.errors import ModelLoadError
from engine.spec_decode.draft_block import MAX_PASS_ROWS, Committed, DepthRows
from engine.spec_decode.drafter import CommittedRows, HiddenStates
from engine.spec_decode.own_kv import BlockStates, verified_states
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule

PASS_TILES = MAX_PASS_ROWS // TILE

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BaseLayers:
    """What is read of the base model: its weights (embedding, rotation and sizes are shared) and the KV of each layer,
    by address. first_tile: of those behind the pool. owner: keeps the memory alive. first: entries before it do not
    exist."""

    weights: PackedWeights
    keys: Sequence[int]
    values: Sequence[int]
    num_tiles: int
    first_tile: int
    block_size: int
    owner: Any = field(repr=False)
    first: int = 0

    def tiles_of(self, index: int, request: Committed) -> Ints:
        """Of a request's text, then those of what the pass stores for it. index: of the request in the pass."""
        within = np.arange(self.block_size // TILE, dtype=np.int32)
        blocks = np.array(request.block_ids, dtype=np.int32)
        text = (blocks[:, None] * len(within) + within).ravel()[: -(-request.length // TILE)]
        first = self.first_tile + index * PASS_TILES
        return np.concatenate([text, np.arange(first, first + PASS_TILES, dtype=np.int32)])


class CompiledDraftBlock:
    """``DraftBlock``; the module's linear layers are left without their weights."""

    def __init__(
        self,
        library: Library,
        base: BaseLayers,
        module: MtpModule,
        lm_head: DraftLmHead,
        *,
        is_int8: bool,
        threads: int,
    ) -> None:
        """Raises ModelLoadError if memory runs out, and for a width that the kernels cannot take."""
        if module.shape.intermediate % TILE:
            raise ModelLoadError(
                f"the MTP module is {module.shape.intermediate} wide inside, which is not a multiple of {TILE}; "
                "it can be served with engine.runner transformers"
            )
        packer = Packer(library, is_int8)
        sizes = base.weights.dimensions
        layer = Layer(
            qkv=packer.pack(module.q_proj, module.k_proj, module.v_proj),
            output=packer.pack(module.o_proj),
            gate_up=packer.pack(module.gate_proj, module.up_proj),
            down=packer.pack(module.down_proj),
            input_norm=packer.keep(module.input_norm.weight),
            post_norm=packer.keep(module.post_norm.weight),
            keys=base.keys[-1],
            values=base.values[-1],  # whole, whatever window the model itself keeps to: training read them so
            first=base.first,
        )
        self.vocab = len(lm_head.token_ids)
        self.base = base
        self.library = library
        self._layers = (Layer * 1)(layer)
        self._owned = [packer.owned, base.owner]
        self._model = Model(
            hidden=sizes.hidden,
            intermediate=module.shape.intermediate,
            heads=module.shape.heads,
            kv_heads=module.shape.kv_heads,
            head_dim=module.shape.head_dim,
            num_layers=1,
            num_tiles=base.num_tiles,
            eps=module.shape.eps,
            attention_scale=module.scale,
            layers=self._layers,
            final_norm=packer.keep(module.norm.weight),
            cosine=base.weights.cosine,
            sine=base.weights.sine,
            lm_head=packer.pack(lm_head.linear),
            join=packer.pack(module.projection),
            embedding_norm=packer.keep(module.embedding_norm.weight),
            hidden_norm=packer.keep(module.hidden_norm.weight),
        )
        self.lm_head = lm_head
        try:
            self.engine = library.create(self._model, threads)
        except MemoryError as error:
            raise ModelLoadError("there are no memory and threads for the draft module") from error
        weakref.finalize(self, library.destroy, self.engine)

    def begin(self, requests: Sequence[Committed]) -> _Pass:
        return _Pass(self, requests)


class CompiledOwnKvBlock(CompiledDraftBlock):
    """``OwnKvBlock`` of an MTP module over a layer that begins at position 1."""

    def __init__(
        self,
        library: Library,
        layer: BaseLayers,
        module: MtpModule,
        lm_head: DraftLmHead,
        *,
        is_int8: bool,
        threads: int,
    ) -> None:
        """Raises ModelLoadError if memory runs out."""
        super().__init__(library, layer, module, lm_head, is_int8=is_int8, threads=threads)
        self._module = module
        blocks = layer.first_tile * TILE // layer.block_size
        self._states = BlockStates(blocks, layer.block_size, module.hidden_size, torch.device("cpu"))

    @torch.inference_mode()
    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        """Raises MemoryError."""
        if not committed:
            return
        new = self._states.join(verified_states(self._module, hidden, committed), committed)
        if not new.slots:
            return
        states = self.base.weights.embedding[torch.tensor(new.tokens)]
        positions, slots = np.array(new.positions, dtype=np.int32), np.array(new.slots, dtype=np.int32)
        self.library.step(
            self.engine,
            Step(
                rows=len(states),
                states=states.data_ptr(),
                positions=positions.ctypes.data,
                slots=slots.ctypes.data,
                previous=new.previous.data_ptr(),
                stores_only=1,
            ),
        )

    def last_state(self, request: Committed) -> torch.Tensor:
        return self._states.of(request)


class _Pass:
    def __init__(self, block: CompiledDraftBlock, requests: Sequence[Committed]) -> None:
        self._block = block
        self._lengths = [request.length for request in requests]
        self._counts = [0] * len(requests)
        self._tiles = [block.base.tiles_of(index, request) for index, request in enumerate(requests)]
        # Number of a request's first entry behind its text, a tile of its own.
        self._behind = [(len(tiles) - PASS_TILES) * TILE for tiles in self._tiles]

    @torch.inference_mode()
    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises MemoryError."""
        count, block = len(rows.tokens), self._block
        states = block.base.weights.embedding[torch.tensor(rows.tokens)]
        previous = rows.states.contiguous()
        final, logits = torch.empty_like(states), torch.empty(count, block.vocab)
        slots, path = [], []
        for owner, its in zip(rows.owners, rows.paths, strict=True):
            row = self._counts[owner]
            self._counts[owner] += 1
            slots.append(int(self._tiles[owner][row // TILE - PASS_TILES]) * TILE + row % TILE)
            path += [self._behind[owner] + entry for entry in its]
        positions = np.array([self._lengths[owner] + rows.depth - 1 for owner in rows.owners], dtype=np.int32)
        prefix = np.array([self._lengths[owner] for owner in rows.owners], dtype=np.int32)
        starts = np.array([0, *accumulate(len(its) for its in rows.paths)], dtype=np.int32)
        arrays = [np.array(values, dtype=np.int32) for values in (slots, path, range(count))]
        segments, used = self._segments(rows.owners)
        block.library.step(
            block.engine,
            Step(
                rows=count,
                segments=used,
                kept=count,
                states=states.data_ptr(),
                positions=positions.ctypes.data,
                slots=arrays[0].ctypes.data,
                requests=segments,
                prefix=prefix.ctypes.data,
                path_start=starts.ctypes.data,
                path=arrays[1].ctypes.data,
                kept_rows=arrays[2].ctypes.data,
                final=final.data_ptr(),
                logits=logits.data_ptr(),
                previous=previous.data_ptr(),
            ),
        )
        return final, block.lm_head.finish(logits)

    def _segments(self, owners: Sequence[int]) -> tuple[Any, int]:
        """One a request that has rows."""
        present = list(dict.fromkeys(owners))
        segments, first = (Segment * len(present))(), 0
        for segment, owner in zip(segments, present, strict=True):
            segment.first_row, segment.num_rows = first, owners.count(owner)
            segment.tiles = self._tiles[owner].ctypes.data
            segment.num_entries = self._behind[owner] + self._counts[owner]
            first += segment.num_rows
        return segments, len(present)
