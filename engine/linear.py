"""Linear layers over weights packed once for the CPU's matrix kernels (oneDNN).

``F.linear`` repacks the weight inside every call, which for the few rows of a decode step costs about as much as the
product itself. oneDNN can take a weight that was laid out for its kernels beforehand, so a step over 8 to 16 rows
(a verified draft) costs little more than a step over one. Packed products also have a property that exactness is glad
of: a row's result does not depend, bit for bit, on how many other rows are in the call. Figures: ``engine/LOG.md``.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)

# The layout oneDNN picks depends on the number of rows it is told to expect: 4 to 32 are alike and serve 1 to 512 rows
# well; told 1, its kernels are slow for more and their rounding depends on the row count (engine/LOG.md).
EXPECTED_ROWS = 8


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W in oneDNN's own layout; float32 on the CPU, forward only.

    It looks like the ``nn.Linear`` it replaces: in_features, out_features, bias. ``weight`` keeps shape and dtype but
    holds no data (it is on the meta device), so code that reads its dtype works and code that computes with it fails.

    pairs_single_row: a single row is computed as two equal ones. oneDNN splits the sum of a wide single row (more than
        1024 inputs) in another order than that of several rows; paired, a row's result is the same in every batch.
    """

    def __init__(self, linear: nn.Linear, pairs_single_row: bool = False) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        self.pairs_single_row = pairs_single_row
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), EXPECTED_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features], float32; returns [..., out_features]."""
        if self.pairs_single_row and x.numel() == self.in_features:
            pair = self._product(x.reshape(1, self.in_features).expand(2, -1).contiguous())
            return pair[0].reshape(*x.shape[:-1], self.out_features)
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module) -> int:
    """Replaces every float32 ``nn.Linear`` of a CPU model, lm_head included, by a ``PackedLinear``; returns how many.

    The plain weights are dropped one by one, so the peak is one layer above the model's size. An embedding tied to
    lm_head keeps its own weight. What is left is copied out of the checkpoint's file mapping, which then goes away:
    a file replaced on disk cannot change or crash a running model.

    0 with a logged reason where packing is not available; the layers then stay as they are. Call it once the weights
    are final: a PackedLinear can be neither loaded into nor moved.
    """
    sites = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if _is_packable(child)
    ]
    if not sites:
        return 0
    reason = _unavailable()
    if reason is not None:
        logger.warning("Linear layers stay unpacked and decoding is slower: %s", reason)
        return 0
    pairs: dict[tuple[int, int], bool] = {}
    count = 0
    with torch.inference_mode():
        for parent, name in sites:
            linear = getattr(parent, name)
            shape = (linear.in_features, linear.out_features)
            replacement = PackedLinear(linear)
            if shape not in pairs:
                pairs[shape] = _single_row_differs(replacement)
            replacement.pairs_single_row = pairs[shape]
            setattr(parent, name, replacement)
            count += 1
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return count


def _is_packable(module: nn.Module) -> bool:
    """Exactly nn.Linear: a subclass may compute something else."""
    return type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


def _single_row_differs(linear: PackedLinear) -> bool:
    """Whether this shape's single row is rounded differently from the same row among others."""
    row = torch.linspace(-1.0, 1.0, linear.in_features).sin()[None]
    return not torch.equal(linear(row), linear(row.repeat(2, 1))[:1])


def _unavailable() -> str | None:
    """Why packing does not work here, or None. Packs and multiplies a small matrix to be sure."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    x = torch.linspace(-1.0, 1.0, 3 * 32).reshape(3, 32)
    probe = nn.Linear(32, 48)
    try:
        with torch.inference_mode():
            difference = (PackedLinear(probe)(x) - probe(x)).abs().max().item()
    except (AttributeError, RuntimeError) as error:
        return f"oneDNN refused a packed product ({str(error).splitlines()[0]})"
    return None if difference < 1e-5 else f"oneDNN's packed product is off by {difference:.1e}"
