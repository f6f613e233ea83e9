"""Public Medusa checkpoints: every layout gives the logits that the format means, and what is wrong is one sentence."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heads.checkpoint import load_heads, save_heads
from heads.config import BaseModel, HeadsConfig
from heads.errors import HeadsError
from heads.lm_head import DraftLmHead, OutputHead
from heads.medusa import MedusaHeads

HIDDEN, VOCAB, HEADS = 8, 20, 3
Tensors = dict[str, torch.Tensor]


def tensors(*, num_layers: int = 1, has_lm_heads: bool = True, prefix: str = "", seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for head in range(HEADS):
        for layer in range(num_layers):
            made[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw)
            made[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=draw)
        if has_lm_heads:
            made[f"{prefix}{head}.{num_layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=draw)
    return made


def write(folder: Path, weights: Tensors, file: str = "medusa_lm_head.pt", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    if file.endswith(".pt"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)
    said = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "org/tiny-1.0", **config}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def shared_lm_head(token_ids: list[int] | None = None) -> DraftLmHead:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
    return DraftLmHead(OutputHead(weight, scale=0.5), None if token_ids is None else torch.tensor(token_ids))


def meant(
    weights: Tensors, states: torch.Tensor, *, num_layers: int, prefix: str, shared: torch.Tensor
) -> torch.Tensor:
    """What the format means, written out. shared: the model's output matrix, for heads without one."""
    rows = []
    for head in range(HEADS):
        x = states
        for layer in range(num_layers):
            y = x @ weights[f"{prefix}{head}.{layer}.linear.weight"].T + weights[f"{prefix}{head}.{layer}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        rows.append(x @ weights.get(f"{prefix}{head}.{num_layers}.weight", shared).T)
    return torch.stack(rows)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("has_lm_heads", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_every_layout_gives_the_logits_it_means(
    tmp_path: Path, num_layers: int, has_lm_heads: bool, prefix: str, file: str
) -> None:
    weights = tensors(num_layers=num_layers, has_lm_heads=has_lm_heads, prefix=prefix)
    loaded = load_heads(write(tmp_path, weights, file, medusa_num_layers=num_layers))
    sizes = (loaded.config.method, loaded.config.num_heads, loaded.config.num_layers, loaded.config.hidden_size)
    assert sizes == ("medusa", HEADS, num_layers, HIDDEN)
    assert loaded.config.vocab_size == (VOCAB if has_lm_heads else 0)
    assert loaded.config.base_model == BaseModel("tiny-1.0", "")
    assert loaded.token_ids is None
    heads = loaded.heads
    assert isinstance(heads, MedusaHeads)
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    shared = shared_lm_head()
    expected = meant(weights, states, num_layers=num_layers, prefix=prefix, shared=0.5 * shared.linear.weight)
    torch.testing.assert_close(heads.all_logits(shared, states), expected)
    for depth, output in enumerate(heads(states), start=1):
        torch.testing.assert_close(heads.logits(shared, output, depth), expected[depth - 1])


def test_half_precision_and_weights_shared_between_blocks_are_read(tmp_path: Path) -> None:
    """The reference repeats one block object, so that its blocks are the same storage."""
    weights = {name: tensor.half() for name, tensor in tensors(num_layers=2).items()}
    for head in range(HEADS):
        for part in ("weight", "bias"):
            weights[f"{head}.1.linear.{part}"] = weights[f"{head}.0.linear.{part}"]
    heads = load_heads(write(tmp_path, weights, medusa_num_layers=2)).heads
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    assert torch.equal(heads.state_dict()["heads.1.1.linear.bias"], weights["1.0.linear.bias"].float())


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_draft_vocabulary_cuts_own_lm_heads(tmp_path: Path, is_cut: bool) -> None:
    heads = load_heads(write(tmp_path, tensors())).heads
    assert isinstance(heads, MedusaHeads)
    ids = [1, 4, 19]
    states = torch.randn(4, HIDDEN)
    expected = heads.all_logits(shared_lm_head(), states)[..., ids]
    if is_cut:
        heads.cut(torch.tensor(ids))
        heads.cut(torch.tensor(ids))
        assert heads.lm_heads is not None
        assert {tuple(own.weight.shape) for own in heads.lm_heads} == {(3, HIDDEN)}
    torch.testing.assert_close(heads.all_logits(shared_lm_head(ids), states), expected)


def test_they_are_saved_in_our_own_format(tmp_path: Path) -> None:
    """As training them further does."""
    public = load_heads(write(tmp_path / "public", tensors()))
    config = HeadsConfig(
        "medusa", HEADS, HIDDEN, VOCAB, BaseModel("tiny", "d" * 64), draft_vocab="draft_vocab.json"
    )  # fmt: skip
    save_heads(tmp_path / "own", public.heads, config, torch.tensor([1, 4, 19]), "")
    own = load_heads(tmp_path / "own")
    assert own.config == config
    before = public.heads.state_dict()
    assert {name: tensor.half() for name, tensor in before.items()}.keys() == own.heads.state_dict().keys()
    assert all(torch.equal(tensor, before[name].half().float()) for name, tensor in own.heads.state_dict().items())


@pytest.mark.parametrize(("said", "warns"), [(2, True), (5, True), (HEADS, False)])
def test_the_file_decides_how_many_heads_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: int, warns: bool
) -> None:
    folder = write(tmp_path, tensors(), medusa_num_heads=said)
    assert HeadsConfig.read(folder).num_heads == said
    with caplog.at_level(logging.WARNING, "headlong"):
        loaded = load_heads(folder)
    assert loaded.config.num_heads == loaded.heads.num_heads == HEADS
    assert (f"holds {HEADS} heads, its config.json names {said}" in caplog.text) == warns


@pytest.mark.parametrize(
    ("said", "name"),
    [("lmsys/vicuna-7b", "vicuna-7b"), ("/data/models/tiny/", "tiny"), ("C:\\models\\tiny", "tiny"), ("tiny", "tiny")]
    + [(nothing, "an unnamed model") for nothing in ("", "/", None)],
)
def test_the_base_models_name_is_the_last_part(tmp_path: Path, said: str | None, name: str) -> None:
    assert load_heads(write(tmp_path, tensors(), base_model_name_or_path=said)).config.base_model.name == name


class Code:
    """Whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    folder, trace = write(tmp_path / "heads", tensors()), tmp_path / "trace"
    torch.save({**tensors(), "3.0.linear.bias": Code(trace)}, folder / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="code in it is not run"):
        load_heads(folder)
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(Code(trace)))
    with pytest.raises(HeadsError, match="code in it is not run"):
        load_heads(folder)
    assert not trace.exists()


def saved(found: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(found, folder / "medusa_lm_head.pt")


def changed(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """``_0_linear_bias`` stands for ``1.0.linear.bias``; None takes it out."""
    renamed = {
        name.replace("_", "1.", 1).replace("_", ".") if name[0] == "_" else name: t for name, t in changes.items()
    }
    return saved({name: tensor for name, tensor in {**tensors(), **renamed}.items() if tensor is not None})


def cut_off(file: str, keep: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "medusa_lm_head.pt").unlink()
        save_file(tensors(), folder / file) if file.endswith("tensors") else torch.save(tensors(), folder / file)
        (folder / file).write_bytes((folder / file).read_bytes()[:keep])

    return apply


def said(**config: object) -> Callable[[Path], None]:
    return lambda folder: write(folder, tensors(), **config) and None  # type: ignore[arg-type]


NOT_A_NUMBER = torch.full((HIDDEN,), float("nan"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (changed(_0_linear_bias=None), r"1\.0\.linear\.bias is absent, should be 8"),
        (changed(_1_weight=None), r"1\.1\.weight is absent, should be 20x8"),
        (saved({"1.0.linear.bias": torch.zeros(HIDDEN)}), r"0\.0\.linear\.weight is absent"),
        (changed(_0_linear_bias=torch.zeros(9)), r"1\.0\.linear\.bias is 9, should be 8"),
        (changed(_0_linear_weight=torch.zeros(8, 9)), r"1\.0\.linear\.weight is 8x9, should be 8x8"),
        (changed(_1_weight=torch.zeros(21, 8)), r"1\.1\.weight is 21x8, should be 20x8"),
        (changed(_0_linear_bias=NOT_A_NUMBER), r"1\.0\.linear\.bias holds values that are not finite"),
        (changed(_0_linear_bias=torch.zeros(8, dtype=torch.int64)), "not finite numbers"),
        (changed(_0_linear_bias=torch.zeros(1).expand(8)), "not finite numbers"),
        (changed(_0_linear_bias=torch.zeros(8).to_sparse()), "not finite numbers"),
        (changed(_2_weight=torch.zeros(20, 8)), r"1\.2\.weight is 20x8, should be absent"),
        (saved({**tensors(), "lm_head.weight": torch.zeros(20, 8)}), "it holds 'lm_head.weight'"),
        (saved({**tensors(), "medusa_head.0.1.weight": torch.zeros(20, 8)}), r"holds 0\.1\.weight twice"),
        (saved({**tensors(), "64.0.linear.bias": torch.zeros(8)}), "holds 65 heads; 64 is the most"),
        (saved({**tensors(), "0.0.linear.weight": torch.zeros(8)}), r"0\.0\.linear\.weight is not a matrix"),
        (saved({}), "holds no heads"),
        (saved([torch.zeros(8)]), "does not hold tensors by name"),
        (saved({"0.0.linear.bias": 1.0}), "does not hold tensors by name"),
        (cut_off("medusa_lm_head.pt", 500), "it is damaged, or holds more than tensors"),
        (cut_off("medusa_lm_head.pt", 0), "it is damaged, or holds more than tensors"),
        (cut_off("medusa_lm_head.safetensors", 500), "cannot be read"),
        (cut_off("model.safetensors", 3000), "cannot be read"),
        (lambda folder: (folder / "medusa_lm_head.pt").unlink(), "holds no weights of Medusa heads"),
        (said(medusa_num_layers=2), r"0\.1\.linear\.bias is absent, should be 8"),
        (said(medusa_num_layers=0), "does not describe Medusa heads: medusa_num_layers: 0 is less than"),
        (said(medusa_num_heads="two"), "does not describe Medusa heads: medusa_num_heads: 'two' is not of type"),
        (said(base_model_name_or_path=3), "does not describe Medusa heads: base_model_name_or_path"),
        (said(hidden_size=16), "is 8 wide, but its config.json names a hidden_size of 16"),
        (said(vocab_size=21), "has 20 tokens, but its config.json names a vocab_size of 21"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(write(tmp_path, tensors()))
    with pytest.raises(HeadsError, match=reason) as refused:
        load_heads(tmp_path)
    assert "\n" not in str(refused.value)
