"""Streams in training: whom each sees, what they are before training, and that they learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, cyclic_answers, lm_head

from heads.batch import make_batch
from heads.config import StreamSizes
from heads.data import Answer, Ask, TopLayers
from heads.evaluate import evaluate
from heads.loss import learn
from heads.mtp import Rotation
from heads.settings import TrainSettings
from heads.streaming import Base, BaseLayer, StreamingHeads, start
from heads.train import train

SIZES = StreamSizes(layers=2, intermediate=24, heads=4, kv_heads=2, head_dim=4)
STREAMS, RANK, EPS = 3, 4, 1e-5


def base(window: int = 0, *, has_bias: bool = True, has_norms: bool = True) -> Base:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    width, kv_width = SIZES.heads * SIZES.head_dim, SIZES.kv_heads * SIZES.head_dim
    shapes = {
        "q_proj": (width, HIDDEN), "k_proj": (kv_width, HIDDEN), "v_proj": (kv_width, HIDDEN),
        "o_proj": (HIDDEN, width), "gate_proj": (SIZES.intermediate, HIDDEN),
        "up_proj": (SIZES.intermediate, HIDDEN), "down_proj": (HIDDEN, SIZES.intermediate),
    }  # fmt: skip
    layers = []
    for _ in range(SIZES.layers):
        projections = {
            name: (numbers(*shape), numbers(shape[0]) if has_bias else None) for name, shape in shapes.items()
        }
        norms = {name: 1 + numbers(HIDDEN) for name in ("input_norm", "post_norm")}
        if has_norms:
            norms |= {name: 1 + numbers(SIZES.head_dim) for name in ("q_norm", "k_norm")}
        layers.append(BaseLayer(projections, norms, window))
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.1])
    return Base(layers, 1 + numbers(HIDDEN), Rotation(angles.cos(), angles.sin()), EPS, 5)


def new_streams(given: Base, rank: int = RANK) -> StreamingHeads:
    made = StreamingHeads(HIDDEN, STREAMS, SIZES, rank)
    start(made, 0)
    made.attach(given)
    return made


def random_streams(given: Base) -> StreamingHeads:
    made = new_streams(given)
    torch.manual_seed(2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def top_layers(length: int, seed: int, prompt: int) -> TopLayers:
    generator = torch.Generator().manual_seed(seed)
    shape = (prompt + length - 1, SIZES.layers, SIZES.kv_heads, SIZES.head_dim)
    return TopLayers(
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
        torch.randn(length, HIDDEN, generator=generator),
    )


def answer(length: int, seed: int, prompt: int = 4, top: TopLayers | None = None) -> Answer:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (prompt + length,), generator=generator).tolist()
    states = torch.randn(length, HIDDEN, generator=generator)
    found = top_layers(length, seed, prompt) if top is None else top
    return Answer(Ask(tuple(ids[:prompt]), 0.0, seed), tuple(ids[prompt:]), states, read_top=lambda: found)


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * scale


def row_by_row(made: StreamingHeads, given: Base, one: Answer, row: int) -> list[torch.Tensor]:
    """What the streams of one row put out, by the definition and with plain matrices, stream after stream."""
    assert one.read_top is not None
    top, at = one.read_top(), len(one.ask.prompt) - 1 + row
    weights: dict[str, Any] = made.state_dict()
    own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in given.layers]
    cosine, sine = given.rotation.cosine[at], given.rotation.sine[at]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads[:, :2], heads[:, 2:]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)

    found = []
    for stream in range(STREAMS):
        x = top.states[row] + weights["embeddings"][stream]
        for index, layer in enumerate(given.layers):

            def project(name: str, y: torch.Tensor, layer: BaseLayer = layer, index: int = index) -> torch.Tensor:
                weight, bias = layer.projections[name]
                change = weights[f"layers.{index}.{name}.b.weight"] @ weights[f"layers.{index}.{name}.a.weight"]
                return (weight + change) @ y + (0 if bias is None else bias)

            y = norm(x, layer.norms["input_norm"])
            query, key = project("q_proj", y).view(-1, SIZES.head_dim), project("k_proj", y).view(-1, SIZES.head_dim)
            if "q_norm" in layer.norms:
                query, key = norm(query, layer.norms["q_norm"]), norm(key, layer.norms["k_norm"])
            own[index].append((turned(key), project("v_proj", y).view(-1, SIZES.head_dim)))
            first = max(0, at - layer.window + 1) if layer.window else 0
            pairs = [(top.keys[e, index], top.values[e, index]) for e in range(first, at + 1)] + own[index]
            keys, values = (torch.stack(part).repeat_interleave(2, 1) for part in zip(*pairs, strict=True))
            scores = torch.einsum("hd,ehd->he", turned(query), keys) * SIZES.head_dim**-0.5
            x = x + project("o_proj", torch.einsum("he,ehd->hd", torch.softmax(scores, -1), values).flatten())
            y = norm(x, layer.norms["post_norm"])
            gate = project("gate_proj", y)
            x = x + project("down_proj", gate * torch.sigmoid(gate) * project("up_proj", y))
        found.append(norm(x, given.final_norm))
    return found


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize(("window", "options"), [(0, {}), (3, {}), (0, {"has_bias": False}), (2, {"has_norms": False})])
@torch.no_grad()
def test_outputs_are_those_of_the_definition(window: int, options: dict[str, bool], is_merged: bool) -> None:
    answers, given = [answer(6, 1), answer(1, 2), answer(4, 3, prompt=1)], base(window, **options)
    made = random_streams(given)
    served = random_streams(given)
    if is_merged:
        served.merge()
        assert not any(layer.adapted for layer in served.stream_layers)
    for depth, output in enumerate(served.outputs(make_batch(answers, lm_head())), start=1):
        places = [(one, row) for one in answers for row in range(len(one.tokens) - depth)]
        assert len(output) == len(places)
        for found, (one, row) in zip(output, places, strict=True):
            expected = row_by_row(made, given, one, row)[depth - 1]
            assert torch.allclose(found, expected, atol=1e-4), (depth, row)


@torch.no_grad()
def test_a_stream_sees_no_later_stream_and_no_later_position() -> None:
    made, one = random_streams(base()), answer(6, 1)
    assert one.read_top is not None
    top = one.read_top()
    before = list(made.outputs(make_batch([one], lm_head())))
    late = top.keys.clone(), top.values.clone()
    for tensor in late:
        tensor[3 + 2 :] += 5.0  # positions from that of row 2 on
    after = list(made.outputs(make_batch([answer(6, 1, top=TopLayers(*late, top.states))], lm_head())))
    for depth in range(STREAMS):
        assert torch.equal(before[depth][:2], after[depth][:2])
        assert not torch.isclose(before[depth][2:], after[depth][2:]).all(dim=1).any()
    made.embeddings[1] += 1.0
    after = list(made.outputs(make_batch([one], lm_head())))
    assert torch.equal(before[0], after[0])
    assert not torch.isclose(before[1], after[1]).all(dim=1).any()
    assert not torch.isclose(before[2], after[2]).all(dim=1).any(), "the third sees the second"


@torch.no_grad()
def test_a_first_stream_that_is_new_repeats_the_main_row() -> None:
    """It sees the main row's entry and its own, which are the same, so that where the main row sees nothing but itself
    the outputs are equal."""
    made, given = new_streams(base()), base()
    hidden = top_layers(1, 3, 1).states
    # What the main row left in the cache: its keys and values, layer by layer.
    x, entries = hidden, []
    for layer in made.stream_layers:
        y = norm(x, layer.input_norm)
        key = layer._heads(layer.k_proj(y)[:, None], layer.k_norm, torch.zeros(1, dtype=torch.long), made)[0]
        value = layer.v_proj(y).view(1, SIZES.kv_heads, SIZES.head_dim)
        entries.append((key, value))
        x = x + layer.o_proj(value.repeat_interleave(2, 1).flatten(1))
        y = norm(x, layer.post_norm)
        x = x + layer.down_proj(torch.nn.functional.silu(layer.gate_proj(y)) * layer.up_proj(y))
    expected = norm(x, given.final_norm)
    keys, values = (torch.stack(part, dim=1) for part in zip(*entries, strict=True))
    one = answer(2, 3, prompt=1, top=TopLayers(keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1), hidden.repeat(2, 1)))
    found = next(made.outputs(make_batch([one], lm_head())))
    assert torch.allclose(found, expected, atol=1e-5)


def test_new_streams_leave_that_beginning_and_the_base_model_stays() -> None:
    made, shared = new_streams(base()), lm_head()
    learn(made, shared, make_batch([answer(6, 1)], shared), [1.0] * STREAMS)
    assert made.embeddings.grad is not None
    assert made.embeddings.grad.any(dim=1).all()
    for layer in made.stream_layers:
        for name, linear in layer.adapted.items():
            assert linear.b.weight.grad is not None, name
            assert linear.b.weight.grad.any(), name
    assert all("weight" not in name or ".a." in name or ".b." in name for name, _ in made.named_parameters())


def test_they_learn_what_comes_next(tmp_path: Path) -> None:
    """Each stream another permutation of what the state says, for which no small rank would do."""

    def taught(one: Answer) -> Answer:
        top = top_layers(len(one.tokens), one.ask.seed, len(one.ask.prompt))
        top = dataclasses.replace(top, values=0 * top.values, states=one.states.float())
        return dataclasses.replace(one, read_top=lambda: top)

    made, answers = new_streams(base(), rank=HIDDEN), [taught(one) for one in cyclic_answers()]
    settings = TrainSettings(num_heads=STREAMS, epochs=12, batch_tokens=64, learning_rate=2e-2)
    train(made, lm_head(), answers[:50], settings, tmp_path, lambda _: None)
    found = evaluate(made, lm_head(), answers[50:])
    assert min(accuracy[1] for accuracy in found.accuracy) > 0.9
