"""Heads on disk: what is saved is loaded, and what cannot be run is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.checkpoint import PRETRAINED, RUN_FILE, WEIGHTS_FILE, load_heads, save_heads
from heads.config import BaseModel, Calibration, HeadsConfig, StreamSizes
from heads.errors import HeadsError
from heads.markov import MarkovHeads, MarkovSizes
from heads.medusa import MedusaHeads
from heads.streaming import StreamingHeads

CONFIG = HeadsConfig(
    method="medusa",
    num_heads=2,
    num_layers=2,
    hidden_size=8,
    vocab_size=20,
    base_model=BaseModel("tiny", "d" * 64),
    draft_vocab="draft_vocab.json",
    trained={"tokens": 5},
    baseline={"held-out": 1.5},
    calibration=Calibration((0.5, 1.0), ((0.1, 0.9), (0.1, 0.8))),
    self_test=((1, 2), (3,)),
)
STREAMS = StreamSizes(layers=2, intermediate=12, heads=4, kv_heads=2, head_dim=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    heads = MedusaHeads(8, 2, 2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, CONFIG, torch.tensor([1, 4, 19]), "seed: 0\n")
    return tmp_path


def test_heads_are_loaded_as_they_were_saved(folder: Path) -> None:
    loaded = load_heads(folder)
    assert loaded.config == CONFIG
    assert loaded.token_ids is not None
    assert loaded.token_ids.tolist() == [1, 4, 19]
    stored = load_file(folder / WEIGHTS_FILE)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    for name, parameter in loaded.heads.state_dict().items():
        assert torch.equal(parameter, stored[name].float())
        assert not parameter.requires_grad
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "draft_vocab.json",
        "heads.safetensors",
        "run.yaml",
    ]


@pytest.mark.parametrize("is_reduced", [True, False])
def test_markov_heads_are_loaded_as_they_were_saved(tmp_path: Path, is_reduced: bool) -> None:
    config = dataclasses.replace(
        CONFIG, method="markov", rank=4, draft_vocab=CONFIG.draft_vocab if is_reduced else None
    )
    heads = MarkovHeads(MedusaHeads(8, 2, 2), MarkovSizes(4, 20, 3 if is_reduced else 20))
    save_heads(tmp_path, heads, config, torch.tensor([1, 4, 19]) if is_reduced else None, "")
    loaded = load_heads(tmp_path)
    assert loaded.config == config
    assert isinstance(loaded.heads, MarkovHeads)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items() if "heads" not in name} == {
        "embedding.weight": (20, 4),
        "biases.0.weight": (3 if is_reduced else 20, 4),
        "biases.1.weight": (3 if is_reduced else 20, 4),
    }
    for name, parameter in loaded.heads.state_dict().items():
        assert torch.equal(parameter, stored[name].float())
    edit(rank=5)(tmp_path)
    with pytest.raises(HeadsError, match=r"biases\.0\.weight is \d+x4, should be \d+x5"):
        load_heads(tmp_path)


def test_streams_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    """Without the weights of the base model, which they are given again."""
    config = dataclasses.replace(CONFIG, method="streaming", rank=4, streaming=STREAMS)
    heads = StreamingHeads(8, 2, STREAMS, 4)
    for layer in heads.stream_layers:
        for linear in layer.adapted.values():
            linear.attach(torch.randn(linear.b.out_features, linear.a.in_features), None)
    save_heads(tmp_path, heads, config, torch.tensor([1, 4, 19]), "")
    loaded = load_heads(tmp_path)
    assert loaded.config == config
    assert isinstance(loaded.heads, StreamingHeads)
    assert (loaded.heads.num_heads, loaded.heads.sizes, loaded.heads.rank) == (2, STREAMS, 4)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert sum(name.startswith("layers.1.") for name in stored) == 14
    assert stored["layers.0.down_proj.a.weight"].shape == (4, 12)
    assert len(stored) == 29
    for name, parameter in loaded.heads.state_dict().items():
        assert torch.equal(parameter, stored[name].float())


@pytest.mark.parametrize("shipped", sorted(PRETRAINED.glob("*/")), ids=lambda path: path.name)
def test_the_heads_that_come_along_are_whole(shipped: Path) -> None:
    loaded = load_heads(shipped)
    assert loaded.config.self_test
    assert loaded.config.calibration is not None
    assert loaded.config.baseline["held-out"] > 1.0
    assert (shipped / RUN_FILE).exists()


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def without(*names: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return apply


NAME = "heads.0.0.linear.weight"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("config.json"), "is not a folder of heads"),
        (write("config.json", "{"), "is not JSON"),
        (write("config.json", "[]"), "does not describe headlong's heads"),
        (edit(format="other"), "format: 'headlong' was expected"),
        (edit(method="eagle"), "'eagle'; known are medusa, markov, mtp and streaming"),
        (edit(method="markov"), "of markov heads needs the rank"),
        (edit(method="markov", rank=0), "rank: 0 is less than"),
        (edit(method="streaming", rank=4), "of streams needs their sizes under streaming, and rank"),
        (edit(method="streaming", rank=4, streaming={"layers": 0}), "streaming: 'intermediate' is a required"),
        (edit(method="streaming", streaming=dataclasses.asdict(STREAMS)), "of streams needs their sizes"),
        (
            edit(method="streaming", rank=4, streaming=dataclasses.asdict(STREAMS)),
            "embeddings is absent, should be 2x8",
        ),
        (edit(streaming=dataclasses.asdict(STREAMS) | {"head_dim": 5}), "streaming/head_dim: 5 is not a multiple of 2"),
        (edit(num_heads="two"), "num_heads: 'two' is not of type"),
        (edit(num_heads=0), "num_heads: 0 is less than"),
        (edit(draft_vocab="../other.json"), "draft_vocab"),
        (edit(base_model={"name": "x", "digest": "y", "hidden": "layer_3"}), "base_model/hidden"),
        (
            edit(num_heads=3, calibration={"edges": [1.0], "rates": [[0.5]] * 3}),
            r"heads\.2\.0\.linear\.bias is absent, should be 8",
        ),
        (edit(num_layers=1), r"heads\.0\.1\.linear\.bias is 8, should be absent"),
        (edit(hidden_size=16), "is 8, should be 16"),
        (edit(vocab_size=19), "token ids below 19"),
        (edit(calibration={"edges": [0.5], "rates": [[1.5]]}), "calibration"),
        (edit(calibration={"edges": [0.5, 1.0], "rates": [[0.5, 0.6]]}), "calibration"),
        (without("heads.safetensors"), "cannot be read"),
        (write("heads.safetensors", "junk"), "cannot be read"),
        (weights(lambda tensors: tensors[NAME].fill_(float("nan"))), f"{NAME} holds values that are not finite"),
        (weights(lambda tensors: tensors.update({NAME: torch.zeros(8, 8, dtype=torch.int64)})), "not finite numbers"),
        (without("draft_vocab.json"), "is not a draft vocabulary"),
        (write("draft_vocab.json", "[3, 1]"), "ascending and distinct"),
        (write("draft_vocab.json", "[1, 1]"), "ascending and distinct"),
        (write("draft_vocab.json", "[1, true]"), "list of token ids"),
        (write("draft_vocab.json", "[]"), "list of token ids"),
        (write("draft_vocab.json", "{}"), "list of token ids"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(folder)
    with pytest.raises(HeadsError, match=reason) as refused:
        load_heads(folder)
    assert "\n" not in str(refused.value)
