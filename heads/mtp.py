"""A multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2), used recursively.

At depth k it joins the state of depth k - 1 (at depth 1 the base model's own) with the embedding of the token that
followed, runs one decoder block, and its normed output goes through the model's own lm_head, shared and frozen, and on
to depth k + 1. Unlike independent heads, what it drafts depends on the tokens drafted before.

Its attention reads, of the committed text, either keys and values of its own (``kv`` "own", as DeepSeek does), or those
of the base model's last layer (``kv`` "base"), which are in the cache anyway: then it has no state, and prefix hits,
rejected drafts and preemption cost it nothing. Of the tokens being drafted it always reads its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from heads.config import MtpSizes
from heads.lm_head import DraftLmHead
from heads.recursive import Attend

if TYPE_CHECKING:
    from heads.batch import Batch

_LEAST_NORM = 0.05  # of its size: smaller scales of a norm are not undone, for their inverse would drown the rest


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding of the base model's last layer. cosine, sine: [positions, head_dim / 2]."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [rows, heads, head_dim], rotated in halves (Llama's layout). positions: [rows]."""
        cosine, sine = self.cosine[positions][:, None], self.sine[positions][:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class MtpModule(nn.Module):
    """One block for all depths. ``depths`` is how far it is trained, evaluated and served. With ``kv`` "own" it is a
    ``heads.recursive.OwnKvModule``."""

    method = "mtp"
    is_recursive = True
    hidden_layers: tuple[int, ...] = ()

    embedding: torch.Tensor

    def __init__(self, hidden_size: int, shape: MtpSizes, depths: int) -> None:
        super().__init__()
        self.hidden_size = hidden = hidden_size
        self.shape = shape
        self.num_heads = depths
        self.kv_heads = shape.kv_heads
        self.key_dim = self.value_dim = shape.head_dim
        self.scale = shape.head_dim**-0.5
        width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        self.embedding_norm = nn.RMSNorm(hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(hidden, shape.eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)  # of [embedding, state], DeepSeek's order
        self.input_norm = nn.RMSNorm(hidden, shape.eps)
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.post_norm = nn.RMSNorm(hidden, shape.eps)
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, shape.eps)

    def attach(self, embedding: torch.Tensor, rotation: Rotation) -> None:
        """Gives what belongs to the base model and is not saved. embedding: [vocab, hidden], of input tokens."""
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self._rotation = rotation

    def join(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The block's input: [rows, hidden] from the states of the depth before and the tokens that followed them."""
        embedded = self.embedding[tokens].float()
        joined: torch.Tensor = self.projection(
            torch.cat([self.embedding_norm(embedded), self.hidden_norm(states)], dim=-1)
        )
        return joined

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [rows, kv_heads, head_dim]; keys are rotated. x: ``input_norm`` of the block's input."""
        shape = (len(x), self.shape.kv_heads, self.shape.head_dim)
        return self._rotation(self.k_proj(x).view(shape), positions), self.v_proj(x).view(shape)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, heads, head_dim], rotated."""
        return self._rotation(self.q_proj(x).view(len(x), self.shape.heads, self.shape.head_dim), positions)

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The block's normed output, [rows, hidden]. mixed: [rows, heads, head_dim], what attention read."""
        x = x + self.o_proj(mixed.flatten(1))
        y = self.post_norm(x)
        states: torch.Tensor = self.norm(x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)))
        return states

    def outputs(self, batch: Batch) -> Iterator[torch.Tensor]:
        """What lm_head reads at each depth, where the tokens before are those of the answer; row by row of
        ``batch.rows(depth)``."""
        contexts = self._contexts(batch)
        states, rows = batch.states, torch.arange(len(batch.states), device=batch.states.device)
        drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for depth in range(1, self.num_heads + 1):
            # Rows at an answer's end read a token of the next one; nobody asks for what follows from them.
            at = (rows + depth - 1).clamp_max(len(rows) - 1)
            positions = batch.positions + depth
            x = self.join(states, batch.tokens[at])
            normed = self.input_norm(x)
            drafted.append(self.keys_values(normed, positions))
            mixed = self._attend(self.queries(normed, positions), contexts, drafted, batch)
            states = self.finish(x, mixed)
            yield states[batch.rows(depth)]

    def condition(self, final: torch.Tensor, layers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the first depth joins: the state after the model's last norm."""
        return final

    def entries(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows, each [rows, kv_heads, head_dim]."""
        return self.keys_values(self.input_norm(self.join(states, tokens)), positions)

    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth: what goes on to the next is also what lm_head reads."""
        x = self.join(states, tokens)
        normed = self.input_norm(x)
        keys, values = self.keys_values(normed, positions)
        states = self.finish(x, attend(self.queries(normed, positions), keys, values))
        return states, states

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = lm_head(outputs)
        return logits

    def _contexts(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each answer, keys and values of the positions before its rows: [entries, kv_heads, head_dim]."""
        if self.shape.kv == "base":
            return [(context.keys.float(), context.values.float()) for context in batch.contexts]
        found = []
        for context, span in zip(batch.contexts, batch.spans, strict=True):
            states = torch.cat([context.prompt_states.float(), batch.states[span]])
            tokens = torch.cat([context.prompt_tokens[1:], batch.tokens[span]])
            positions = torch.arange(1, len(states) + 1, device=states.device)
            # A row's own entry is among the drafted ones, so the last is never read here.
            found.append(self.entries(states, tokens, positions))
        return found

    def _attend(
        self,
        queries: torch.Tensor,
        contexts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        drafted: Sequence[tuple[torch.Tensor, torch.Tensor]],
        batch: Batch,
    ) -> torch.Tensor:
        """Row by row over the committed text before it and the drafted tokens of its own path."""
        parts = []
        for (keys, values), span in zip(contexts, batch.spans, strict=True):
            visible = batch.positions[span] + (1 if self.shape.kv == "base" else 0)
            path = [(k[span], v[span]) for k, v in drafted]
            parts.append(attend(queries[span], keys, values, visible, path))
        return torch.cat(parts)


@torch.no_grad()
def start(module: MtpModule, seed: int, norm: torch.Tensor | None) -> None:
    """Fills a new module: it passes the state on, so that it begins by repeating the model's next token, as Medusa
    heads do. norm: [hidden], scale of the model's last norm, which is undone before the block and done again after."""
    generator = torch.Generator().manual_seed(seed)
    hidden = module.hidden_size
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        nn.init.normal_(getattr(module, name).weight, std=hidden**-0.5, generator=generator)
    nn.init.zeros_(module.o_proj.weight)
    nn.init.zeros_(module.down_proj.weight)
    nn.init.normal_(module.projection.weight[:, :hidden], std=0.5 * hidden**-0.5, generator=generator)
    nn.init.eye_(module.projection.weight[:, hidden:])
    if norm is not None:
        module.norm.weight.copy_(norm)
        # Of unit size again: a norm that multiplies by fifty (Gemma 3) leaves a state that the embedding would drown.
        size = norm.square().mean().sqrt()
        module.hidden_norm.weight.copy_(size / norm.clamp_min(_LEAST_NORM * size))


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    path: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention of rows that share a context and have a path of entries each; grouped queries.

    queries: [rows, heads, dim]. keys, values: [entries, kv_heads, dim], of which row r sees the first visible[r].
    path: pairs of keys and values [rows, kv_heads, dim], one entry a row each. Returns [rows, heads, dim].
    """
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, dim) * dim**-0.5
    near = grouped.transpose(0, 1).reshape(kv_heads, -1, dim) @ keys.permute(1, 2, 0)
    scores = near.view(kv_heads, rows, heads // kv_heads, len(keys))
    hidden = torch.arange(len(keys), device=keys.device) >= visible[:, None]
    scores = scores.masked_fill(hidden[None, :, None], -torch.inf)
    own = [(grouped * k[:, :, None]).sum(-1).transpose(0, 1)[..., None] for k, _ in path]
    shares = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1)
    mixed = shares[..., : len(keys)].reshape(kv_heads, -1, len(keys)) @ values.transpose(0, 1)
    mixed = mixed.view(kv_heads, rows, heads // kv_heads, dim).transpose(0, 1)
    for index, (_, v) in enumerate(path):
        mixed = mixed + shares[..., len(keys) + index].transpose(0, 1)[..., None] * v[:, :, None]
    return mixed.reshape(rows, heads, dim)
