"""The attention function that transformers' models call: it writes the step's rows to the paged KV and reads it back.

Registered with ``AttentionInterface`` under the name ``headlong``; the step travels as the keyword argument
``headlong_step`` through the unmodified model's ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from engine.attention.segments import Segment, StepAttention

ATTENTION_NAME = "headlong"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    headlong_step: StepAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, key_dim], key and value [1, kv_heads, rows, dim] -> [1, rows, heads, value_dim].

    softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2). s_aux: a sink logit a head, which takes
    part in the softmax and gives nothing (gpt-oss). ``engine.attention.check`` refuses models that pass other things.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step = headlong_step
    step.cache.write(layer, step.slots, key[0], value[0])
    kv_heads, rows = key.shape[1], query.shape[2]
    groups = query.shape[1] // kv_heads
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = query.new_empty(rows, query.shape[1], value.shape[-1])
    for segment in step.segments:
        last = segment.first_row + segment.num_rows
        # Query heads that share a KV head become rows of one attention problem: nothing is repeated.
        part = query[0, :, segment.first_row : last].reshape(kv_heads, groups * segment.num_rows, -1)
        mixed = _attend(step, layer, segment, part, _Scores(scale, sliding_window, softcap, s_aux, groups))
        mixed = mixed.view(kv_heads * groups, segment.num_rows, -1)
        output[segment.first_row : last] = mixed.transpose(0, 1)
    return output[None], None


class _Scores:
    """How scores are made from queries and keys: what the architecture passed for this layer."""

    __slots__ = ("groups", "scale", "sinks", "softcap", "window")

    def __init__(
        self, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None, groups: int
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.sinks = sinks
        self.groups = groups


def _attend(step: StepAttention, layer: int, segment: Segment, query: torch.Tensor, how: _Scores) -> torch.Tensor:
    """query: [kv_heads, groups * rows, key_dim] -> [kv_heads, groups * rows, value_dim]."""
    kv, mask = segment.view(how.window, how.groups, query.dtype)
    keys, values = kv.take(step.cache.keys[layer]), kv.take(step.cache.values[layer])
    if how.softcap is None and how.sinks is None:
        return F.scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=how.scale)[0]
    scores = (query @ keys.transpose(-1, -2)) * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is not None:
        scores = scores + mask
    if how.sinks is None:
        return (
            torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
            @ values
        )
    sinks = how.sinks.view(query.shape[0], how.groups, 1).expand(-1, -1, segment.num_rows)
    sinks = sinks.reshape(query.shape[0], -1, 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return weights @ values


def register() -> None:
    """Makes the name known to transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
