"""How heads that know the drafted tokens are computed: the interface, and torch's way for the block of an MTP module.

A *pass* is one round of drafting for some requests: it begins with what they have committed and goes down depth by
depth. What a block stores of drafted tokens lives for the pass alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.cache import PagedKV
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule, attend

# Rows of one request in a pass; what is kept for them is allocated once.
MAX_PASS_ROWS = 64


@dataclass(frozen=True, slots=True)
class Committed:
    """A request's verified text in the cache: ``length`` entries in ``block_ids``; the newest token has none yet."""

    block_ids: Sequence[int]
    length: int


@dataclass(frozen=True, slots=True)
class DepthRows:
    """Rows of one depth, those of a request together and requests in order.

    states: [rows, hidden] of the depth before. tokens: those that followed. owners: index of each row's request.
    paths: per row the pass rows of its request on its path, from the first depth to the row itself, each numbered from
    0 in the order in which that request's rows were computed.
    """

    states: torch.Tensor
    tokens: Sequence[int]
    owners: Sequence[int]
    paths: Sequence[Sequence[int]]
    depth: int


class DraftPass(Protocol):
    """One round of drafting."""

    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(states [rows, hidden] for the next depth, logits [rows, draft vocabulary], float32 on the CPU)."""
        ...


class DraftBlock(Protocol):
    """Heads ready to draft: the block of an MTP module over the base model's KV cache, or others."""

    def begin(self, requests: Sequence[Committed]) -> DraftPass:
        """Starts a pass; the one before is over."""
        ...


def slots_of(request: Committed, block_size: int) -> torch.Tensor:
    """[length], on the CPU: where the entries of its text lie in the cache."""
    entries = torch.arange(request.length)
    return torch.tensor(request.block_ids)[entries // block_size] * block_size + entries % block_size


class TorchDraftBlock:
    """The module's own forward over torch's KV cache."""

    def __init__(self, module: MtpModule, lm_head: DraftLmHead, cache: PagedKV, block_size: int) -> None:
        self.module = module
        self.lm_head = lm_head
        self._cache = cache
        self._block_size = block_size

    def begin(self, requests: Sequence[Committed]) -> _TorchPass:
        return _TorchPass(self, [self._gathered(request) for request in requests])

    def _gathered(self, request: Committed) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache.keys[-1], self._cache.values[-1]
        slots = slots_of(request, self._block_size).to(keys.device)
        return keys[:, slots].transpose(0, 1).float(), values[:, slots].transpose(0, 1).float()


class _TorchPass:
    def __init__(self, block: TorchDraftBlock, contexts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._block = block
        self._contexts = contexts
        # Keys and values of each request's pass rows.
        self._own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in contexts]

    @torch.inference_mode()
    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._block.module
        device = module.embedding.device
        positions = torch.tensor([len(self._contexts[owner][0]) - 1 + rows.depth for owner in rows.owners])
        positions = positions.to(device)
        x = module.join(rows.states.to(device, torch.float32), torch.tensor(rows.tokens, device=device))
        normed = module.input_norm(x)
        keys, values = module.keys_values(normed, positions)
        for row, owner in enumerate(rows.owners):
            self._own[owner].append((keys[row], values[row]))
        queries = module.queries(normed, positions)
        mixed = [self._mixed(queries, rows, owner) for owner in dict.fromkeys(rows.owners)]
        states = module.finish(x, torch.cat(mixed))
        return states, self._block.lm_head(states).float().cpu()

    def _mixed(self, queries: torch.Tensor, rows: DepthRows, owner: int) -> torch.Tensor:
        at = [row for row, its in enumerate(rows.owners) if its == owner]
        keys, values = self._contexts[owner]
        visible = torch.full((len(at),), len(keys), device=keys.device)
        path = []
        for step in range(rows.depth):
            entries = [self._own[owner][rows.paths[row][step]] for row in at]
            path.append((torch.stack([k for k, _ in entries]), torch.stack([v for _, v in entries])))
        return attend(queries[at], keys, values, visible, path)
