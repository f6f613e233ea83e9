"""Draft heads on the compiled kernels: int8 or float32 products, and the choice of candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.compiled.library import TILE, Matrix, Team
from engine.compiled.weights import Packer
from engine.spec_decode.candidates import NOISED, Candidates, IntArray, PlainHeadCompute, Wish


class CompiledLinear(nn.Module):
    """``y = x W^T + b`` with W packed for the kernels; forward only. ``weight`` is left on the meta device."""

    def __init__(self, linear: nn.Linear, team: Team, is_int8: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._team = team
        packer = Packer(team.library, is_int8)
        self._matrix: Matrix = packer.pack(linear)
        self._owned = packer.owned
        self.weight = torch.empty(linear.weight.shape, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], float32; returns [..., out_features]."""
        y = self._team.linear(self._matrix, x.reshape(-1, self.in_features))
        return y.reshape(*x.shape[:-1], self.out_features)


class CompiledHeadCompute(PlainHeadCompute):
    """Layers whose width the kernels cannot take stay torch's."""

    def __init__(self, team: Team, is_int8: bool) -> None:
        self._team = team
        self._is_int8 = is_int8

    def pack(self, module: nn.Module) -> None:
        sites = [
            (parent, name, child)
            for parent in module.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear and child.in_features % TILE == 0 and child.weight.device.type == "cpu"
        ]
        for parent, name, child in sites:
            setattr(parent, name, CompiledLinear(child, self._team, self._is_int8))
        super().pack(module)

    def candidates(self, logits: torch.Tensor, ids: IntArray, wishes: Sequence[Wish]) -> list[Candidates]:
        found = self._team.candidates(logits, ids, [(wish.count, wish.key) for wish in wishes], NOISED)
        return [Candidates(ids[indices].tolist(), confidences) for indices, confidences in found]
