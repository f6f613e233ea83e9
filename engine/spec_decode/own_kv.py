"""A draft module's own KV layer: one more layer in the blocks of the base model's KV cache.

The entry that joins the state of position q - 1 with the token at position q lies in the slot of position q. It
depends on tokens up to q alone, as the block's digest does, so whoever gets a block from the prefix cache gets the
right entries with it. What the first entry behind a shared block needs beside is the state of the block's last
position, so one state a block is kept. Entries are made of verified tokens and the base model's states alone, after
verification; those of drafted tokens live for a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.cache import LayerShape, PagedKV
from engine.errors import ModelLoadError
from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import MAX_PASS_ROWS, Committed, DepthRows, DraftBlock
from engine.spec_decode.drafter import CommittedRows, HiddenStates
from heads.lm_head import DraftLmHead
from heads.recursive import OwnKvModule


class OwnKvBlock(DraftBlock, Protocol):
    """A module ready to draft over a KV layer of its own."""

    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        """Makes the entries of what a step verified. hidden: of all its rows."""
        ...

    def last_state(self, request: Committed) -> torch.Tensor:
        """[hidden]: the state of depth 0, of the last token that has KV."""
        ...


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Entries to be made. previous: [entries, hidden], the state before each token. slots: where they go."""

    previous: torch.Tensor
    tokens: list[int]
    positions: list[int]
    slots: list[int]


class BlockStates:
    """Of each block the state of the last position that is verified in it: [hidden], float32.

    A request's next entry needs that of its own last block, or of the last one it shares, so this is all the memory
    that a request needs between its steps.
    """

    def __init__(self, num_blocks: int, block_size: int, hidden_size: int, device: torch.device) -> None:
        """Raises ModelLoadError if there is no memory for them."""
        self._block_size = block_size
        try:
            self._states = torch.empty(num_blocks, hidden_size, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ModelLoadError(
                "not enough memory for the draft module's states; set engine.kv_cache_memory lower"
            ) from error

    def of(self, request: Committed) -> torch.Tensor:
        return self._states[request.block_ids[(request.length - 1) // self._block_size]]

    def join(self, states: torch.Tensor, committed: Sequence[CommittedRows]) -> NewEntries:
        """Pairs each verified token with the state before it, and keeps the states that come next.

        states: [rows, hidden] of depth 0, those of ``committed`` one after another.
        """
        size = self._block_size
        previous = states.roll(1, 0)
        firsts, carried, kept, tokens, positions, slots = [], [], [], [], [], []
        last_rows: dict[int, int] = {}  # of each block
        row = 0
        for one in committed:
            if one.start > 0:
                firsts.append(row)
                carried.append(one.block_ids[(one.start - 1) // size])
            for position in range(one.start, one.start + len(one.rows)):
                block = one.block_ids[position // size]
                last_rows[block] = row
                if position > 0:
                    kept.append(row)
                    tokens.append(one.token_ids[position])
                    positions.append(position)
                    slots.append(block * size + position % size)
                row += 1
        device = self._states.device
        if firsts:
            previous[torch.tensor(firsts, device=device)] = self._states[torch.tensor(carried, device=device)]
        self._states[torch.tensor([*last_rows], device=device)] = states[
            torch.tensor([*last_rows.values()], device=device)
        ]
        return NewEntries(previous[torch.tensor(kept, dtype=torch.long, device=device)], tokens, positions, slots)


def verified_states(module: OwnKvModule, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> torch.Tensor:
    """[rows, hidden] of depth 0, float32, for ``BlockStates.join``."""
    rows = torch.tensor([row for one in committed for row in one.rows], device=hidden.final.device)
    layers = {layer: hidden.layers[layer][rows].float() for layer in module.hidden_layers}
    return module.condition(hidden.final[rows].float(), layers)


def own_layer(module: OwnKvModule) -> LayerShape:
    return LayerShape(module.kv_heads, module.key_dim, module.value_dim)


def _stored(dtype: torch.dtype) -> torch.dtype:
    """Modules compute in float32, so that more would be in vain."""
    return torch.float32 if dtype == torch.float64 else dtype


def block_bytes(module: OwnKvModule, block_size: int, dtype: torch.dtype) -> int:
    """Memory of a block's entries and its state. dtype: of the model."""
    return own_layer(module).bytes_per_token(_stored(dtype)) * block_size + module.hidden_size * torch.float32.itemsize


class TorchOwnKvBlock:
    """``OwnKvBlock`` of any module, by the module's own methods."""

    def __init__(self, module: OwnKvModule, lm_head: DraftLmHead, pool: PoolShape, compute: HeadCompute) -> None:
        """The linear layers of both are packed: they cannot be trained or saved any more.

        Raises ModelLoadError if there is no memory for the entries."""
        self.module = module
        self.lm_head = lm_head
        self.device, self._block_size = pool.device, pool.block_size
        self._cache = PagedKV([own_layer(module)], pool.num_slots, dtype=_stored(pool.dtype), device=pool.device)
        blocks = pool.num_slots // pool.block_size
        self._states = BlockStates(blocks, pool.block_size, module.hidden_size, pool.device)
        for part in (module, lm_head):
            if isinstance(part, nn.Module):
                compute.pack(part)

    @torch.inference_mode()
    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        if not committed:
            return
        new = self._states.join(verified_states(self.module, hidden, committed), committed)
        if not new.slots:
            return
        tokens, positions, slots = (
            torch.tensor(values, device=self.device) for values in (new.tokens, new.positions, new.slots)
        )
        keys, values = self.module.entries(new.previous, tokens, positions)
        dtype = self._cache.keys[0].dtype
        self._cache.write(0, slots, keys.transpose(0, 1).to(dtype), values.transpose(0, 1).to(dtype))

    def last_state(self, request: Committed) -> torch.Tensor:
        return self._states.of(request)

    def begin(self, requests: Sequence[Committed]) -> _Pass:
        return _Pass(self, requests)

    def entries_of(self, request: Committed) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 1 to ``length`` - 1, each [kv_heads, entries, dim], as they are stored."""
        at = torch.arange(1, request.length)
        blocks = torch.tensor(request.block_ids)
        slots = (blocks[at // self._block_size] * self._block_size + at % self._block_size).to(self.device)
        return self._cache.keys[0].index_select(1, slots), self._cache.values[0].index_select(1, slots)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Of the base model's KV cache. dtype: of the model."""

    num_slots: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


class _Entries:
    """What the rows of one request may see in a pass: its text, then the pass's own rows."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [kv_heads, entries, dim] of the text."""
        heads, self.text = keys.shape[:2]
        self.keys = keys.new_empty(heads, self.text + MAX_PASS_ROWS, keys.shape[2], dtype=torch.float32)
        self.values = values.new_empty(heads, self.text + MAX_PASS_ROWS, values.shape[2], dtype=torch.float32)
        self.keys[:, : self.text] = keys
        self.values[:, : self.text] = values
        self.end = self.text

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [rows, kv_heads, dim]."""
        start, self.end = self.end, self.end + len(keys)
        self.keys[:, start : self.end] = keys.transpose(0, 1)
        self.values[:, start : self.end] = values.transpose(0, 1)

    def mixed(self, queries: torch.Tensor, paths: Sequence[Sequence[int]], scale: float) -> torch.Tensor:
        """[rows, heads, value_dim] of queries [rows, heads, key_dim]."""
        rows, heads, _ = queries.shape
        kv_heads = len(self.keys)
        # Query heads that share a KV head become rows of one problem: nothing is repeated.
        grouped = (
            queries.view(rows, kv_heads, -1, queries.shape[2])
            .permute(1, 2, 0, 3)
            .reshape(kv_heads, -1, queries.shape[2])
        )
        keys, values = self.keys[:, : self.end], self.values[:, : self.end]
        mask = self._mask(paths, heads // kv_heads) if rows > 1 or self.end - self.text > len(paths[0]) else None
        found = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], mask, scale=scale)[0]
        return found.view(kv_heads, -1, rows, values.shape[2]).permute(2, 0, 1, 3).reshape(rows, heads, -1)

    def _mask(self, paths: Sequence[Sequence[int]], groups: int) -> torch.Tensor:
        visible = torch.ones(len(paths), self.end, dtype=torch.bool)
        visible[:, self.text :] = False
        for row, path in enumerate(paths):
            visible[row, [self.text + entry for entry in path]] = True
        return visible.repeat(groups, 1).to(self.keys.device)


class _Pass:
    def __init__(self, block: TorchOwnKvBlock, requests: Sequence[Committed]) -> None:
        self._block = block
        self._lengths = [request.length for request in requests]
        self._entries = [_Entries(*block.entries_of(request)) for request in requests]

    @torch.inference_mode()
    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        module, device = self._block.module, self._block.device

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            mixed, first = [], 0
            for owner in dict.fromkeys(rows.owners):
                last = first + rows.owners.count(owner)
                its = self._entries[owner]
                its.add(keys[first:last], values[first:last])
                mixed.append(its.mixed(queries[first:last], rows.paths[first:last], module.scale))
                first = last
            return torch.cat(mixed)

        # The newest token, at position ``length``, is joined at the first depth.
        positions = [self._lengths[owner] + rows.depth - 1 for owner in rows.owners]
        states, outputs = module.step(
            rows.states.to(device, torch.float32),
            torch.tensor(rows.tokens, device=device),
            torch.tensor(positions, device=device),
            attend,
        )
        return states, module.logits(self._block.lm_head, outputs, rows.depth).float().cpu()
