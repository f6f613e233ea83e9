"""Streams that run beside the model's own row (Speculative Streaming, arXiv 2402.11131), in the paper's exact mode.

Each position's row gains ``gamma`` streams at one of the upper decoder layers: stream j begins as the row's own state
there plus an embedding of its own, runs through the remaining layers with a low-rank change of their weights (LoRA,
arXiv 2106.09685), and sees, in each of them, the keys and values of the main rows up to its position and those of the
streams 1 to j beside it. After the model's last norm and lm_head it predicts the token j after the one that the main
row predicts, as head j of other methods does. Streams stand at their row's own position; what tells them apart are
their embeddings and whom they see. New ones have neither embeddings nor a change of weights, so that they begin by
doing again what the main row did.

The main rows never see a stream and keep their weights, so that they are the plain model's. Unlike the paper, streams
do not share the verifying forward: they are spawned after it, on the accepted node alone, as a pass of the upper layers
over the keys and values it left in the cache. Spawned inside it, they would multiply the upper layers' rows by every
node that may be rejected, while those of the accepted one alone are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from heads.config import StreamSizes
from heads.lm_head import DraftLmHead
from heads.mtp import Rotation

if TYPE_CHECKING:
    from heads.batch import Batch

_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")


class AdaptedLinear(nn.Module):
    """``W x + c + B A x``. W and c are a copy of the base model's, frozen and not saved; B is zero when new."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def attach(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copied in float32, so that the model may let go of its own."""
        self.register_buffer("weight", _frozen(weight), persistent=False)
        self.register_buffer("bias", None if bias is None else _frozen(bias), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.linear(x, self.weight, self.bias) + self.b(self.a(x))
        return y

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The same map as one matrix."""
        outputs, inputs = self.weight.shape
        linear = nn.Linear(inputs, outputs, bias=self.bias is not None, device="meta").requires_grad_(False)
        linear.weight = nn.Parameter(self.weight + self.b.weight @ self.a.weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """What streams take from one decoder layer. projections: weight and bias by name. norms: scales by name, those of
    queries and keys only where the layer has them. window: positions a row sees at most, 0 for all."""

    projections: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]
    norms: Mapping[str, torch.Tensor]
    window: int


@dataclass(frozen=True, slots=True)
class Base:
    """What streams take from their base model: its uppermost layers, the lowest first. entry: the layer whose output
    they begin with. eps: of all norms."""

    layers: Sequence[BaseLayer]
    final_norm: torch.Tensor
    rotation: Rotation
    eps: float
    entry: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Main rows whose streams are computed. positions: [rows] of each in its text. texts: of each text keys and values,
    [entries, layers, kv_heads, head_dim], of which a row sees those up to its position. spans: the rows of each."""

    positions: torch.Tensor
    texts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    spans: Sequence[slice]

    def seen(self, text: int, window: int) -> torch.Tensor:
        """[rows of the text, its entries]: what each row sees of it."""
        positions = self.positions[self.spans[text]][:, None]
        entries = torch.arange(len(self.texts[text][0]), device=positions.device)
        seen = entries <= positions
        return seen & (entries > positions - window) if window else seen


class StreamLayer(nn.Module):
    """A decoder layer of Llama's kind for the rows of the streams."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    def __init__(self, hidden: int, sizes: StreamSizes, rank: int) -> None:
        super().__init__()
        self.sizes = sizes
        width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj: nn.Module = AdaptedLinear(hidden, width, rank)
        self.k_proj: nn.Module = AdaptedLinear(hidden, kv_width, rank)
        self.v_proj: nn.Module = AdaptedLinear(hidden, kv_width, rank)
        self.o_proj: nn.Module = AdaptedLinear(width, hidden, rank)
        self.gate_proj: nn.Module = AdaptedLinear(hidden, sizes.intermediate, rank)
        self.up_proj: nn.Module = AdaptedLinear(hidden, sizes.intermediate, rank)
        self.down_proj: nn.Module = AdaptedLinear(sizes.intermediate, hidden, rank)

    @property
    def adapted(self) -> dict[str, AdaptedLinear]:
        """None once they are merged."""
        return {name: child for name, child in self.named_children() if isinstance(child, AdaptedLinear)}

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """All, once they are merged."""
        return {name: child for name, child in self.named_children() if isinstance(child, nn.Linear)}

    def attach(self, base: BaseLayer) -> None:
        for name, linear in self.adapted.items():
            linear.attach(*base.projections[name])
        for name in _NORMS:
            scale = base.norms.get(name)
            self.register_buffer(name, None if scale is None else _frozen(scale), persistent=False)
        self.window = base.window

    def forward(self, x: torch.Tensor, rows: Rows, base: StreamingHeads, index: int) -> torch.Tensor:
        """x: [rows, streams, hidden]. index: of this layer among those of ``rows.texts``."""
        y = base.norm(x, self.input_norm)
        queries = self._heads(self.q_proj(y), self.q_norm, rows.positions, base)
        keys = self._heads(self.k_proj(y), self.k_norm, rows.positions, base)
        values = self._split(self.v_proj(y))
        mixed = [
            attend(queries[span], (text_keys[:, index], text_values[:, index]), (keys[span], values[span]), seen)
            for span, (text_keys, text_values), seen in zip(
                rows.spans, rows.texts, [rows.seen(text, self.window) for text in range(len(rows.texts))], strict=True
            )
        ]
        x = x + self.o_proj(torch.cat(mixed).flatten(2))
        y = base.norm(x, self.post_norm)
        down: torch.Tensor = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + down

    def _heads(
        self, x: torch.Tensor, scale: torch.Tensor | None, positions: torch.Tensor, base: StreamingHeads
    ) -> torch.Tensor:
        """[rows, streams, heads * head_dim] -> [rows, streams, heads, head_dim], normed if the layer does, rotated."""
        x = self._split(x)
        if scale is not None:
            x = base.norm(x, scale)
        turned = base.rotation(x.flatten(0, 1), positions.repeat_interleave(x.shape[1]))
        return turned.view(x.shape)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """Into heads."""
        return x.view(*x.shape[:-1], -1, self.sizes.head_dim)


class StreamingHeads(nn.Module):
    """``embeddings``: [streams, hidden]; ``layers``: what each of the upper layers is changed by. Beside them it holds
    a float32 copy of those layers' own weights, which is not saved (SmolLM2-135M: 14 MB a layer)."""

    method = "streaming"
    is_recursive = False

    final_norm: torch.Tensor

    def __init__(self, hidden_size: int, num_heads: int, sizes: StreamSizes, rank: int) -> None:
        """num_heads: streams."""
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.sizes = sizes
        self.rank = rank
        self.embeddings = nn.Parameter(torch.zeros(num_heads, hidden_size))
        self.layers = nn.ModuleList(StreamLayer(hidden_size, sizes, rank) for _ in range(sizes.layers))

    @property
    def stream_layers(self) -> list[StreamLayer]:
        return [layer for layer in self.layers if isinstance(layer, StreamLayer)]

    def attach(self, base: Base) -> None:
        """Gives what belongs to the base model and is not saved."""
        for layer, its in zip(self.stream_layers, base.layers, strict=True):
            layer.attach(its)
        self.register_buffer("final_norm", _frozen(base.final_norm), persistent=False)
        self.rotation = base.rotation
        self.eps = base.eps
        self.entry = base.entry

    def merge(self) -> None:
        """Makes one matrix of each weight and its change: afterwards they cannot be trained or saved."""
        for layer in self.stream_layers:
            for name, linear in layer.adapted.items():
                setattr(layer, name, linear.merged())

    def norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, scale.shape, scale, self.eps)

    def inputs(self, states: torch.Tensor) -> torch.Tensor:
        """What streams begin as: [rows, hidden], outputs of layer ``entry``, -> [rows, streams, hidden]."""
        return states[:, None] + self.embeddings

    def forward(self, states: torch.Tensor, rows: Rows) -> torch.Tensor:
        """What lm_head reads, [rows, streams, hidden]. states: [rows, hidden], outputs of layer ``entry``."""
        x = self.inputs(states)
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, self, index)
        return self.norm(x, self.final_norm)

    def outputs(self, batch: Batch) -> Iterator[torch.Tensor]:
        """What lm_head reads, stream by stream: [len(batch.rows(depth)), hidden]."""
        texts = [(top.keys.float(), top.values.float()) for top in batch.tops]
        states = torch.cat([top.states.float() for top in batch.tops])
        found = self(states, Rows(batch.positions, texts, batch.spans))
        for depth in range(1, self.num_heads + 1):
            yield found[batch.rows(depth), depth - 1]

    def logits(self, lm_head: DraftLmHead, outputs: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = lm_head(outputs)
        return logits


@torch.no_grad()
def start(heads: StreamingHeads, seed: int) -> None:
    """Fills new streams: without effect, but A is random, so that B has a gradient to leave zero by."""
    generator = torch.Generator().manual_seed(seed)
    nn.init.zeros_(heads.embeddings)
    for layer in heads.stream_layers:
        for linear in layer.adapted.values():
            nn.init.normal_(linear.a.weight, std=linear.a.in_features**-0.5, generator=generator)
            nn.init.zeros_(linear.b.weight)


def attend(
    queries: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
) -> torch.Tensor:
    """Attention of streams over one text and, each, over the streams of the same row up to itself; grouped queries.

    queries: [rows, streams, heads, dim]. text: keys and values, [entries, kv_heads, dim]; own: those of the streams,
    [rows, streams, kv_heads, dim]. seen: [rows, entries]. Returns [rows, streams, heads, dim].
    """
    rows, streams, heads, dim = queries.shape
    entries, kv_heads, _ = text[0].shape
    grouped = queries.view(rows, streams, kv_heads, -1, dim) * dim**-0.5  # [rows, streams, kv_heads, group, dim]
    flat = grouped.permute(2, 0, 1, 3, 4).reshape(kv_heads, -1, dim)
    far = (flat @ text[0].permute(1, 2, 0)).view(kv_heads, rows, -1, entries)
    far = far.masked_fill(~seen[:, None], -torch.inf).view(kv_heads, rows, streams, -1, entries)
    near = torch.einsum("rskgd,rtkd->krsgt", grouped, own[0])
    later = torch.ones(streams, streams, dtype=torch.bool, device=queries.device).triu(1)
    near = near.masked_fill(later[:, None], -torch.inf)
    shares = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
    mixed = (shares[..., :entries].reshape(kv_heads, -1, entries) @ text[1].transpose(0, 1)).view(
        kv_heads, rows, streams, -1, dim
    )
    mixed = mixed + torch.einsum("krsgt,rtkd->krsgd", shares[..., entries:], own[1])
    return mixed.permute(1, 2, 0, 3, 4).reshape(rows, streams, heads, dim)


def _frozen(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy that no gradient goes to."""
    return tensor.detach().to(torch.float32, copy=True)
