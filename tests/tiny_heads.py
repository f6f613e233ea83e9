"""Heads for the tiny models: random ones for the laws, where any heads must do."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from tiny_engine import EOS, VOCAB, tiny_model
from torch import nn
from transformers import PreTrainedModel

from engine.loading.heads import output_head
from engine.loading.mtp import attach_base, new_mtp
from engine.loading.streaming import new_streams
from engine.spec_decode.markov import MarkovDrafter
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.spec_decode.path_drafter import MtpDrafter
from engine.spec_decode.streaming import StreamingDrafter
from heads.lm_head import DraftLmHead
from heads.markov import MarkovHeads, MarkovSizes
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.recursive import Attend
from heads.settings import KvSource, TrainSettings
from heads.streaming import StreamingHeads


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


def random_mtp(model: PreTrainedModel, depths: int = 3, seed: int = 3, kv: KvSource = "base") -> MtpModule:
    """Whose every weight matters."""
    module = new_mtp(model, TrainSettings(num_heads=depths, seed=seed, kv=kv)).float()
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.6, 1.4)
    attach_base(module, model)
    return module.eval().requires_grad_(False)


def mtp_drafter(model: PreTrainedModel, *, coupling: bool = True, draft_vocab: int | None = None) -> MtpDrafter:
    """draft_vocab: as ``medusa_drafter`` takes it."""
    token_ids = None if draft_vocab is None else torch.arange(1, draft_vocab, 2)
    lm_head = DraftLmHead(output_head(model), token_ids)
    return MtpDrafter(random_mtp(model), lm_head, coupling=coupling, eos_token_ids=(EOS,))


def own_kv_drafter(model: PreTrainedModel, *, coupling: bool = True, draft_vocab: int | None = None) -> OwnKvDrafter:
    """An MTP module with a KV layer of its own. draft_vocab: as ``medusa_drafter`` takes it."""
    token_ids = None if draft_vocab is None else torch.arange(1, draft_vocab, 2)
    lm_head = DraftLmHead(output_head(model), token_ids)
    module = random_mtp(model, kv="own")
    return OwnKvDrafter(module, lm_head, method="mtp", coupling=coupling, eos_token_ids=(EOS,))


def random_markov(lm_head: DraftLmHead, depths: int = 3, seed: int = 3) -> MarkovHeads:
    """Whose every weight matters: the bias is about as large as the logits."""
    torch.manual_seed(seed)
    medusa = MedusaHeads(lm_head.linear.in_features, depths)
    heads = MarkovHeads(medusa, MarkovSizes(16, lm_head.vocab_size, len(lm_head.token_ids)))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for part in (heads.embedding, *heads.biases):
        torch.nn.init.normal_(part.weight, std=0.8)
    return heads.eval().requires_grad_(False)


def markov_drafter(model: PreTrainedModel, *, coupling: bool = True, draft_vocab: int | None = None) -> MarkovDrafter:
    """draft_vocab: as ``medusa_drafter`` takes it."""
    token_ids = None if draft_vocab is None else torch.arange(1, draft_vocab, 2)
    lm_head = DraftLmHead(output_head(model), token_ids)
    return MarkovDrafter(random_markov(lm_head), lm_head, coupling=coupling, eos_token_ids=(EOS,))


class FusedModule(nn.Module):
    """An ``OwnKvModule`` unlike an MTP module in all that may differ: its first state is made of two layers, keys and
    values differ in size, the scale is its own, and what goes on to the next depth is not what lm_head reads."""

    hidden_layers = (0, 1)
    kv_heads, key_dim, value_dim, scale = 2, 6, 10, 0.7

    def __init__(self, model: PreTrainedModel, depths: int = 3) -> None:
        super().__init__()
        self.num_heads = depths
        self.hidden_size = hidden = int(model.config.hidden_size)
        torch.manual_seed(11)
        self.embedding = torch.randn(VOCAB, hidden)
        self.fuse = nn.Linear(2 * hidden, hidden)
        self.join = nn.Linear(2 * hidden, hidden)
        self.q, self.k, self.v = nn.Linear(hidden, 24), nn.Linear(hidden, 12), nn.Linear(hidden, 20)
        self.o = nn.Linear(40, hidden)
        self.eval().requires_grad_(False)

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        fused: torch.Tensor = self.fuse(torch.cat([layers[0], layers[1]], dim=-1))
        return fused

    def _keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.k(x).view(len(x), 2, 6) + positions[:, None, None] * 0.01
        return keys, self.v(x).view(len(x), 2, 10)

    def _joined(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.join(torch.cat([states, self.embedding[tokens]], dim=-1)))

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys_values(self._joined(states, tokens), positions)

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._joined(states, tokens)
        mixed = attend(self.q(x).view(len(x), 4, 6), *self._keys_values(x, positions))
        states = x + self.o(mixed.flatten(1))
        return states, torch.tanh(states)

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = lm_head(outputs) / depth
        return logits


def random_streams(model: PreTrainedModel, streams: int = 3, layers: int = 1, seed: int = 3) -> StreamingHeads:
    """Whose every weight matters: what changes the layers' weights is about as large as they are."""
    heads = new_streams(model, TrainSettings(num_heads=streams, stream_layers=layers, rank=4, seed=seed))
    torch.manual_seed(seed)
    torch.nn.init.normal_(heads.embeddings, std=0.5)
    for layer in heads.stream_layers:
        for linear in layer.adapted.values():
            torch.nn.init.normal_(linear.b.weight, std=0.5 * linear.weight.std().item())
    return heads.eval().requires_grad_(False)


def streaming_drafter(
    model: PreTrainedModel, *, coupling: bool = True, draft_vocab: int | None = None
) -> StreamingDrafter:
    """draft_vocab: as ``medusa_drafter`` takes it."""
    token_ids = None if draft_vocab is None else torch.arange(1, draft_vocab, 2)
    lm_head = DraftLmHead(output_head(model), token_ids)
    return StreamingDrafter(random_streams(model), lm_head, coupling=coupling, eos_token_ids=(EOS,))
