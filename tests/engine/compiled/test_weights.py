"""int8 against a reference of the same arithmetic in torch, and which models the compiled step cannot compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_models import FAMILIES, KERNELS, Bench, assert_close, eager, library, packed, random_model, text
from tiny_engine import tiny_model
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from engine.compiled.heads import CompiledLinear
from engine.compiled.library import Team
from engine.compiled.weights import pack_weights, why_unsupported


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [rows, k] times an unnormalised Hadamard matrix, block by block, in the order of the fast transform."""
    parts = x.reshape(len(x), -1, block)
    half = 1
    while half < block:
        pairs = parts.reshape(*parts.shape[:2], block // (2 * half), 2, half)
        parts = torch.stack([pairs[:, :, :, 0] + pairs[:, :, :, 1], pairs[:, :, :, 0] - pairs[:, :, :, 1]], 3)
        parts = parts.reshape(len(x), -1, block)
        half *= 2
    return parts.reshape(x.shape)


class Int8Reference(nn.Module):
    """What an int8 layer computes: whole-number sums of rotated inputs and weights, one scale a row and an output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.k = linear.in_features
        self.block = next(size for size in (64, 32, 16) if self.k % size == 0)
        weight = rotated(linear.weight, self.block)
        step = weight.abs().amax(1, keepdim=True) / 127
        self.whole = torch.round(weight / step).to(torch.int64)
        self.scale = step[:, 0] / self.block
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = rotated(x.reshape(-1, self.k), self.block)
        largest = torch.tensor(float(min(32767, 2147483647 // (127 * self.k))))
        most = rows.abs().amax(1, keepdim=True)
        # A tensor over a tensor: torch computes number / tensor as a product with 1 / tensor.
        inverse = torch.where(most > 0, largest / most, 0.0)
        whole = torch.round(rows * inverse).to(torch.int64)
        y = (whole @ self.whole.T).float() * (most / largest * self.scale)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


def with_reference_layers(model: PreTrainedModel) -> PreTrainedModel:
    quantised = copy.deepcopy(model)
    sites = [(name, module) for name, module in quantised.named_modules() if isinstance(module, nn.Linear)]
    for name, module in sites:
        quantised.set_submodule(name, Int8Reference(module))
    return quantised


def linear_of(n: int, k: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(n + k)
    linear = nn.Linear(k, n, bias=bias).requires_grad_(False)
    linear.weight[0, :3] = 3.0  # outliers, which the rotation spreads
    return linear


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("n", "k"), [(61, 64), (16, 576), (40, 96), (7, 48), (96, 16), (33, 1536)])
def test_int8_products_are_the_reference_s(kernels: str, n: int, k: int) -> None:
    """For each count of rows that a tile can have and one more; largest_input matters from k = 516 on."""
    linear = linear_of(n, k, bias=n % 2 == 0)
    reference = Int8Reference(linear)
    compiled = CompiledLinear(copy.deepcopy(linear), Team(library(kernels), 1), True)
    torch.manual_seed(k)
    x = torch.randn(17, k) * torch.logspace(-3, 3, 17)[:, None]
    x[4] = 0.0
    expected = reference(x)
    for count in range(1, 18):
        assert torch.equal(compiled(x[:count]), expected[:count])
    error = (expected - linear(x)).norm(dim=1) / (x.norm(dim=1) * linear.weight.norm()).clamp_min(1e-9)
    assert 1e-5 < float(error.max()) < 0.01


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("k", [16, 512, 528, 576, 1536, 8192])
def test_the_largest_sums_do_not_overflow(kernels: str, k: int) -> None:
    """A spike in each block becomes a constant: every input and every weight is the largest there is."""
    block = next(size for size in (64, 32, 16) if k % size == 0)
    linear = nn.Linear(k, 2, bias=False).requires_grad_(False)
    linear.weight.zero_()
    linear.weight[0, ::block], linear.weight[1, ::block] = 1.0, -1.0
    x = torch.zeros(3, k)
    x[0, ::block], x[1, ::block], x[2, ::block] = 0.7, -3.0, 1e-6
    y = CompiledLinear(linear, Team(library(kernels), 1), True)(x)
    sums = x[:, ::block].sum(1)
    torch.testing.assert_close(y, torch.stack([sums, -sums], 1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_float_products_are_torch_s(kernels: str) -> None:
    for n, k in ((61, 64), (16, 576), (7, 48)):
        linear = linear_of(n, k, bias=True)
        compiled = CompiledLinear(copy.deepcopy(linear), Team(library(kernels), 1), False)
        x = torch.randn(17, k)
        for count in (1, 4, 5, 6, 16, 17):
            assert_close(compiled(x[:count]), linear(x[:count]), 1e-5)


def test_large_products_are_shared_out_and_the_same() -> None:
    linear = linear_of(701, 576, bias=True)
    x = torch.randn(9, 576)
    for is_int8 in (False, True):
        one, two = (CompiledLinear(copy.deepcopy(linear), Team(library(), count), is_int8) for count in (1, 2))
        assert torch.equal(one(x), two(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_logits_of_one_layer_are_the_reference_s(family: str) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "llama":
        changes |= {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    model = random_model(family, **changes)
    tokens = text(45)
    expected = eager(with_reference_layers(model), tokens)
    bench = Bench(packed(model, is_int8=True))
    # Norms and attention are rounded differently; an input at the edge of two whole numbers may go either way.
    assert_close(bench.prefill(bench.request(tokens)), expected, 2e-4)
    exact = eager(model, tokens)
    assert 1e-3 < float((exact - expected).abs().max() / exact.abs().max()) < 0.3


def llama(**changes: Any) -> PreTrainedModel:
    return random_model("llama", **changes)


class Heir(LlamaForCausalLM):
    """Might compute anything."""


HALF = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
REFUSED = {
    "another architecture": (lambda: tiny_model("gemma3", torch.float32), "it is not made for Gemma3ForCausalLM"),
    "a subclass": (lambda: Heir(llama().config).float(), "it is not made for Heir"),
    "another dtype": (lambda: copy.deepcopy(llama()).bfloat16(), "it computes float32 models on the CPU, not bfloat16"),
    "another activation": (lambda: llama(hidden_act="gelu"), "the model's activation is gelu, not silu"),
    "an odd head": (lambda: llama(head_dim=8), "not a multiple of 16"),
    "an odd width": (lambda: llama(hidden_size=72), "not a multiple of 16"),
    "an odd inner width": (lambda: llama(intermediate_size=100), "not a multiple of 16"),
    "half a rotation": (lambda: random_model.__wrapped__("llama", rope_parameters=HALF), "only a part of each head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_said(case: str) -> None:
    make, sentence = REFUSED[case]
    reason = why_unsupported(make(), 16)
    assert reason is not None
    assert sentence in reason


def test_a_block_size_that_is_no_multiple_of_a_tile_is_said() -> None:
    assert "the block size is not a multiple of 16" in (why_unsupported(llama(), 24) or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_computed_is_not_refused(family: str) -> None:
    for block_size in (16, 32, 64):
        assert why_unsupported(random_model(family), block_size) is None


def test_packing_frees_the_model_s_own_weights_and_keeps_its_embedding() -> None:
    model = copy.deepcopy(llama(tie_word_embeddings=True))
    kept = model.get_input_embeddings().weight.clone()
    weights = pack_weights(model, library(), is_int8=True, positions=64)
    assert torch.equal(weights.embedding, kept)
    assert model.get_input_embeddings().weight.data_ptr() == weights.embedding.data_ptr()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 15
    assert all(linear.weight.device.type == "meta" for linear in linears)


def test_the_embedding_does_not_share_the_checkpoint_s_memory() -> None:
    """A file replaced on disk, or a model changed afterwards, changes nothing."""
    model = copy.deepcopy(llama())
    before = model.get_input_embeddings().weight.data_ptr()
    weights = pack_weights(model, library(), is_int8=False, positions=64)
    assert weights.embedding.data_ptr() != before
