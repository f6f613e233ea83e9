"""Driving a draft module with keys and values of its own by hand, and what its layers mean, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from heads.recursive import OwnKvModule


class Entries:
    """The entries that a chain of drafts sees: those of the text, then each depth's own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One row."""
        self.keys.append(keys[0])
        self.values.append(values[0])
        groups = queries.shape[1] // keys.shape[1]
        all_keys = torch.stack(self.keys).repeat_interleave(groups, 1)
        all_values = torch.stack(self.values).repeat_interleave(groups, 1)
        shares = torch.einsum("hd,ehd->he", queries[0], all_keys).mul(self.scale).softmax(-1)
        return torch.einsum("he,ehd->hd", shares, all_values)[None]


@torch.inference_mode()
def drafted_outputs(
    module: OwnKvModule, states: torch.Tensor, tokens: torch.Tensor, length: int, depths: int
) -> tuple[torch.Tensor, Entries]:
    """What lm_head reads at each depth, [depths, hidden], with ``length`` tokens committed and the next ones drafted.

    states: [n, hidden] of depth 0, one a token. tokens: [n].
    """
    at = torch.arange(1, length - 1)
    entries = Entries(module.scale)
    if len(at):
        keys, values = module.entries(states[at - 1], tokens[at], at)
        entries.keys.extend(keys)
        entries.values.extend(values)
    state, outputs = states[length - 2][None], []
    for depth in range(depths):
        position = torch.tensor([length - 1 + depth])
        state, output = module.step(state, tokens[position], position, entries)
        outputs.append(output[0])
    return torch.stack(outputs), entries


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float, width: int | None = None) -> torch.Tensor:
    """x: [rows, heads, dim]; its first ``width`` numbers are rotated in halves."""
    width = x.shape[-1] if width is None else width
    angles = positions[:, None] / theta ** (torch.arange(0, width, 2).double() / width)
    cosine, sine = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat([*turned, x[..., width:]], dim=-1)


def causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """[rows, heads * value_dim]: every row sees those before it and itself."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    hidden = torch.ones(len(queries), len(queries)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).flatten(1)


def gated(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    inner = F.silu(x @ weights[f"{name}.gate_proj.weight"].T) * (x @ weights[f"{name}.up_proj.weight"].T)
    return inner @ weights[f"{name}.down_proj.weight"].T
