"""What streams are trained on, on disk: each answer gets its own part back, and files that do not fit are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads.data import Answer, AnswerStore, Ask, TopLayers
from heads.errors import HeadsError
from heads.top_layers import TopLayersStore

LAYERS, KV_HEADS, HEAD_DIM, HIDDEN = 3, 2, 4, 6
SHAPES = [(4, 5), (1, 2), (3, 1)]  # tokens of prompt and answer


def top_layers(prompt: int, length: int) -> TopLayers:
    keys, values = torch.randn(2, prompt + length - 1, LAYERS, KV_HEADS, HEAD_DIM)
    return TopLayers(keys, values, torch.randn(length, HIDDEN))


@pytest.fixture
def written(tmp_path: Path) -> tuple[AnswerStore, list[TopLayers]]:
    torch.manual_seed(1)
    store = AnswerStore(tmp_path, {})
    store.write(0, [Answer(Ask((1,) * p, 0.0, p), (2,) * n, torch.randn(n, HIDDEN)) for p, n in SHAPES])
    contexts = [top_layers(*shape) for shape in SHAPES]
    tops = TopLayersStore(store, LAYERS)
    assert not tops.has_contexts(0)
    tops.write_contexts(0, contexts)
    assert tops.has_contexts(0)
    return store, contexts


def test_each_answer_reads_its_own_part(written: tuple[AnswerStore, list[TopLayers]]) -> None:
    store, contexts = written
    answers = TopLayersStore(store, LAYERS).read_with_contexts(0)
    for one, plain, expected in zip(answers, store.read(0), contexts, strict=True):
        assert (one.ask, one.tokens) == (plain.ask, plain.tokens)
        assert one.read_top is not None
        found = one.read_top()
        for name in TopLayers.__slots__:
            assert torch.equal(getattr(found, name), getattr(expected, name).half()), name


def test_what_a_token_costs(written: tuple[AnswerStore, list[TopLayers]]) -> None:
    stored = load_file(written[0].folder / f"top{LAYERS}-00000.safetensors")
    entries, tokens = sum(p + n - 1 for p, n in SHAPES), sum(n for _, n in SHAPES)
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    assert size == 2 * (tokens * HIDDEN + entries * 2 * LAYERS * KV_HEADS * HEAD_DIM)


def test_other_layers_are_another_file(written: tuple[AnswerStore, list[TopLayers]]) -> None:
    assert not TopLayersStore(written[0], LAYERS - 1).has_contexts(0)
    assert not written[0].has_contexts(0), "what MTP modules are trained on is not this"


def test_files_that_do_not_fit_are_named(written: tuple[AnswerStore, list[TopLayers]]) -> None:
    store, contexts = written
    tops = TopLayersStore(store, LAYERS)
    tops.write_contexts(0, contexts[:2])
    with pytest.raises(HeadsError, match=r"top3-00000.safetensors does not belong to its answers"):
        tops.read_with_contexts(0)
    (store.folder / "top3-00000.safetensors").write_bytes(b"cut off")
    with pytest.raises(HeadsError, match=r"top3-00000.safetensors is damaged"):
        tops.read_with_contexts(0)
