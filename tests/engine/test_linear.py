import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from engine import linear
from engine.linear import PackedLinear, pack_linears


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=1200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def test_packed_model_equals_the_plain_one(tiny: LlamaForCausalLM) -> None:
    ids = torch.arange(24).reshape(1, 24)
    expected = tiny(ids, use_cache=False).logits
    linears = sum(type(module) is nn.Linear for module in tiny.modules())
    assert pack_linears(tiny) == linears == 15
    assert not any(type(module) is nn.Linear for module in tiny.modules())
    assert (tiny(ids, use_cache=False).logits - expected).abs().max() < 1e-5
    assert pack_linears(tiny) == 0


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_product_equals_linear(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(1100, 70, bias=bias)
    x = torch.randn(1, rows, 1100)
    for pairs in (False, True):
        y = PackedLinear(plain, pairs_single_row=pairs)(x)
        assert y.shape == (1, rows, 70)
        torch.testing.assert_close(y, plain(x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("width", [64, 576, 1024, 1536, 2048])
def test_a_row_has_the_same_bits_in_every_batch(width: int) -> None:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, 192, bias=False))
    pack_linears(model)
    row = torch.randn(1, width)
    alone = model(row)
    for rows in (2, 3, 4, 7, 8, 13, 16, 31, 64):
        batch = torch.randn(rows, width)
        batch[rows // 2] = row
        assert torch.equal(model(batch)[rows // 2], alone[0]), rows


def test_tied_embedding_keeps_its_weight_and_the_layer_looks_like_a_linear(tiny: LlamaForCausalLM) -> None:
    before = tiny.model.embed_tokens.weight.clone()
    pack_linears(tiny)
    assert torch.equal(tiny.model.embed_tokens.weight, before)
    head = tiny.lm_head
    assert (head.in_features, head.out_features, head.bias) == (32, 128, None)
    assert head.weight.shape == (128, 32)
    assert head.weight.dtype == torch.float32
    assert head.weight.is_meta


def test_checkpoint_file_is_unmapped(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    tiny.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert str(tmp_path) in maps.read_text()
    pack_linears(loaded)
    gc.collect()
    assert str(tmp_path) not in maps.read_text()


def test_other_dtypes_and_subclasses_are_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16(), Scaled(8, 8))
    assert pack_linears(model) == 0
    assert [type(module) for module in model] == [nn.Linear, nn.Linear, Scaled]


def test_without_onednn_the_layers_stay_and_the_reason_is_logged(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_linears(tiny) == 0
    assert type(tiny.lm_head) is nn.Linear
    assert "no oneDNN" in caplog.text


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch, tiny: LlamaForCausalLM) -> None:
    monkeypatch.setattr(linear.PackedLinear, "forward", lambda self, x: torch.zeros(*x.shape[:-1], self.out_features))
    assert pack_linears(tiny) == 0
