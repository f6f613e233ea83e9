"""Streams on the compiled step: a model of the base model's uppermost layers, over their KV.

Its weights are packed from the layers' own and what the streams change them by, merged: every row of such a pass is a
stream's, so nothing of it is computed twice. It has 3.5 MB a layer of its own for SmolLM2-135M in int8, 14 in float32.
What streams store of themselves goes to tiles behind those of the pool, some for each request of a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from engine.compiled.draft_block import PASS_TILES, BaseLayers
from engine.compiled.library import TILE, Layer, Library, Model, Segment, Step
from engine.compiled.weights import Packer
from engine.errors import ModelLoadError
from engine.spec_decode.draft_block import Committed
from heads.lm_head import DraftLmHead
from heads.streaming import StreamingHeads, StreamLayer


class CompiledStreamPass:
    """``StreamPass``; the heads' linear layers are left without their weights."""

    def __init__(
        self,
        library: Library,
        base: BaseLayers,
        heads: StreamingHeads,
        lm_head: DraftLmHead,
        *,
        is_int8: bool,
        threads: int,
    ) -> None:
        """Raises ModelLoadError if memory runs out."""
        packer = Packer(library, is_int8)
        heads.merge()
        self._base = base
        self._heads = heads
        self._lm_head = lm_head
        self._library = library
        self._layers = (Layer * heads.sizes.layers)()
        kv = list(zip(base.keys, base.values, strict=True))[-heads.sizes.layers :]
        for index, (layer, (keys, values)) in enumerate(zip(heads.stream_layers, kv, strict=True)):
            self._layers[index] = _packed_layer(packer, layer)
            self._layers[index].keys, self._layers[index].values = keys, values
        sizes = base.weights.dimensions
        self._model = Model(
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            num_layers=heads.sizes.layers,
            num_tiles=base.num_tiles,
            eps=sizes.eps,
            attention_scale=sizes.attention_scale,
            layers=self._layers,
            final_norm=packer.keep(heads.final_norm),
            cosine=base.weights.cosine,
            sine=base.weights.sine,
            lm_head=packer.pack(lm_head.linear),
        )
        self._owned = [packer.owned, base.owner]
        try:
            self._engine = library.create(self._model, threads)
        except MemoryError as error:
            raise ModelLoadError("there are no memory and threads for the streams") from error
        weakref.finalize(self, library.destroy, self._engine)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Committed], states: torch.Tensor) -> torch.Tensor:
        """Raises MemoryError."""
        x = self._heads.inputs(states.float()).flatten(0, 1).contiguous()  # overwritten by the step
        streams, rows = self._heads.num_heads, len(x)
        final, logits = torch.empty_like(x), torch.empty(rows, len(self._lm_head.token_ids))
        segments = (Segment * len(requests))()
        tiles = [self._base.tiles_of(index, request) for index, request in enumerate(requests)]
        slots, path = [], []
        for index, (segment, its) in enumerate(zip(segments, tiles, strict=True)):
            behind = (len(its) - PASS_TILES) * TILE  # number of the first entry of a stream, in a tile of its own
            segment.first_row, segment.num_rows = index * streams, streams
            segment.tiles, segment.num_entries = its.ctypes.data, behind + streams
            slots.append(int(its[-PASS_TILES]) * TILE + np.arange(streams))
            path += [behind + np.arange(stream + 1) for stream in range(streams)]
        lengths = np.repeat(np.array([request.length for request in requests], dtype=np.int32), streams)
        starts = np.cumsum([0, *(len(its) for its in path)], dtype=np.int32)
        arrays = [np.concatenate(parts).astype(np.int32) for parts in (slots, path, [np.arange(rows)])]
        positions = lengths - 1
        self._library.step(
            self._engine,
            Step(
                rows=rows,
                segments=len(segments),
                kept=rows,
                states=x.data_ptr(),
                positions=positions.ctypes.data,
                slots=arrays[0].ctypes.data,
                requests=segments,
                prefix=lengths.ctypes.data,
                path_start=starts.ctypes.data,
                path=arrays[1].ctypes.data,
                kept_rows=arrays[2].ctypes.data,
                final=final.data_ptr(),
                logits=logits.data_ptr(),
            ),
        )
        return self._lm_head.finish(logits).view(len(requests), streams, -1).transpose(0, 1)


def _packed_layer(packer: Packer, layer: StreamLayer) -> Layer:
    """Without its KV cache."""
    q_norm, k_norm = (None if norm is None else packer.keep(norm) for norm in (layer.q_norm, layer.k_norm))
    linears = layer.linears
    return Layer(
        qkv=packer.pack(*(linears[name] for name in ("q_proj", "k_proj", "v_proj"))),
        output=packer.pack(linears["o_proj"]),
        gate_up=packer.pack(linears["gate_proj"], linears["up_proj"]),
        down=packer.pack(linears["down_proj"]),
        input_norm=packer.keep(layer.input_norm),
        post_norm=packer.keep(layer.post_norm),
        q_norm=q_norm,
        k_norm=k_norm,
        window=layer.window,
    )
