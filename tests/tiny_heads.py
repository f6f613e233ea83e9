"""Medusa heads for the tiny models: random ones for the laws, where any heads must do."""

from __future__ import annotations

import functools

import torch
from tiny_engine import EOS, tiny_model

from engine.loading.heads import output_head
from engine.spec_decode.medusa import MedusaDrafter
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads


@functools.cache
def random_heads(num_heads: int = 3, seed: int = 3) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads(32, num_heads)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval().requires_grad_(False)


def medusa_drafter(architecture: str, *, coupling: bool = True, draft_vocab: int | None = None) -> MedusaDrafter:
    """draft_vocab: every other token up to it, so that the reduced vocabulary has gaps."""
    token_ids = None if draft_vocab is None else torch.arange(1, draft_vocab, 2)
    lm_head = DraftLmHead(output_head(tiny_model(architecture)), token_ids)
    return MedusaDrafter(random_heads(), lm_head, coupling=coupling, eos_token_ids=(EOS,))
