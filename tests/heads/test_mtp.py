"""The MTP module in training: what each row may see, and that it learns what only the token between can tell."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from made_up_answers import HIDDEN, VOCAB, lm_head

from heads.batch import make_batch
from heads.config import MtpSizes
from heads.data import Answer, Ask, Context
from heads.evaluate import evaluate
from heads.mtp import MtpModule, Rotation, attend, start
from heads.settings import KvSource, TrainSettings
from heads.train import train

KV_HEADS, HEAD_DIM = 2, 4
DEPTHS = 3


def module(kv: KvSource = "base", depths: int = DEPTHS, seed: int = 1) -> MtpModule:
    made = MtpModule(HIDDEN, MtpSizes(kv, 24, 4, KV_HEADS, HEAD_DIM, 1e-5), depths)
    torch.manual_seed(seed)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.1])
    made.attach(
        torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)), Rotation(angles.cos(), angles.sin())
    )
    return made


def answer(length: int, seed: int, prompt: int = 4) -> Answer:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(0, VOCAB, (prompt + length,), generator=generator).tolist()
    entries = prompt + length - 1
    context = Context(
        numbers(entries, KV_HEADS, HEAD_DIM), numbers(entries, KV_HEADS, HEAD_DIM), torch.tensor(ids[:prompt]),
        numbers(prompt - 1, HIDDEN),
    )  # fmt: skip
    return Answer(Ask(tuple(ids[:prompt]), 0.0, seed), tuple(ids[prompt:]), numbers(length, HIDDEN), context)


def row_by_row(made: MtpModule, one: Answer, row: int) -> list[torch.Tensor]:
    """What drafting along the answer from one row gives: each entry is computed alone, nothing later exists."""
    prompt, context = one.ask.prompt, one.context
    assert context is not None
    position = len(prompt) - 1 + row
    states, tokens = one.states[row], (*prompt, *one.tokens)
    if made.shape.kv == "base":
        entries = [(context.keys[at], context.values[at]) for at in range(position + 1)]
    else:
        all_states = torch.cat([context.prompt_states, one.states])
        entries = []
        for at in range(position):
            x = made.input_norm(made.join(all_states[at][None], torch.tensor([tokens[at + 1]])))
            key, value = made.keys_values(x, torch.tensor([at + 1]))
            entries.append((key[0], value[0]))
    found = []
    for depth in range(1, made.num_heads + 1):
        if row + depth >= len(one.tokens):
            break
        at = torch.tensor([position + depth])
        x = made.join(states[None], torch.tensor([tokens[position + depth]]))
        normed = made.input_norm(x)
        key, value = made.keys_values(normed, at)
        entries.append((key[0], value[0]))
        keys, values = (torch.stack(part).repeat_interleave(2, 1) for part in zip(*entries, strict=True))
        query = made.queries(normed, at)[0]
        shares = torch.softmax(torch.einsum("hd,ehd->he", query, keys) * HEAD_DIM**-0.5, dim=-1)
        states = made.finish(x, torch.einsum("he,ehd->hd", shares, values)[None])[0]
        found.append(states)
    return found


@pytest.mark.parametrize("kv", ["base", "own"])
@torch.no_grad()
def test_each_row_sees_what_it_would_when_drafting(kv: KvSource) -> None:
    answers, made = [answer(6, 1), answer(1, 2), answer(4, 3, prompt=1)], module(kv)
    batch = make_batch(answers, lm_head())
    outputs = list(made.outputs(batch))
    for depth, output in enumerate(outputs, start=1):
        places = [(one, row) for one in answers for row in range(len(one.tokens) - depth)]
        assert len(output) == len(places) == len(batch.rows(depth))
        for found, (one, row) in zip(output, places, strict=True):
            assert torch.allclose(found, row_by_row(made, one, row)[depth - 1], atol=1e-5), (depth, row)


def test_a_new_module_passes_the_state_on() -> None:
    made = module()
    norm = torch.rand(HIDDEN) + 0.5
    start(made, 0, norm)
    made.projection.weight.data[:, :HIDDEN] = 0.0
    normed = torch.nn.functional.rms_norm(torch.randn(5, HIDDEN), (HIDDEN,)) * norm
    one = answer(5, 1)
    batch = make_batch([dataclasses.replace(one, states=normed)], lm_head())
    (first, *_) = made.outputs(batch)
    assert torch.allclose(first, normed[:4], atol=1e-3)


def test_it_learns_what_the_state_cannot_tell(tmp_path: Path) -> None:
    """Tokens are drawn at random, and each next one follows from the last two alone, while states are noise: heads that
    see the state alone could learn nothing."""

    def text(seed: int) -> Answer:
        draw = random.Random(seed)
        tokens = [draw.randrange(VOCAB) for _ in range(2)]
        while len(tokens) < 18:
            tokens.append((tokens[-1] * 5 + 1) % VOCAB)
        return dataclasses.replace(answer(16, seed, prompt=2), tokens=tuple(tokens[2:]))

    def taught(one: Answer) -> Answer:
        """The state that chose a token says which, so the teacher's distribution is sharp; but it is of the token
        before the one that a head is asked for."""
        states = torch.nn.functional.one_hot(torch.tensor(one.tokens), HIDDEN).float()
        return dataclasses.replace(one, states=states)

    made = module()
    start(made, 0, None)
    settings = TrainSettings(num_heads=DEPTHS, unroll=DEPTHS, epochs=12, batch_tokens=64, learning_rate=1e-2)
    train(made, lm_head(), [taught(text(seed)) for seed in range(80)], settings, tmp_path, lambda _: None)
    found = evaluate(made, lm_head(), [taught(text(seed)) for seed in range(100, 130)])
    assert all(accuracy[1] > 0.95 for accuracy in found.accuracy)


def test_entries_behind_what_is_visible_do_not_matter() -> None:
    queries, keys = torch.randn(3, 4, HEAD_DIM), torch.randn(5, KV_HEADS, HEAD_DIM)
    values = torch.randn(5, KV_HEADS, HEAD_DIM)
    path = [(torch.randn(3, KV_HEADS, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM))]
    visible = torch.tensor([0, 2, 5])
    found = attend(queries, keys, values, visible, path)
    assert torch.allclose(found[0], path[0][1][0].repeat_interleave(2, 0), atol=1e-6), "nothing but its own"
    again = attend(queries[1:2], keys[:2], values[:2], torch.tensor([2]), [(k[1:2], v[1:2]) for k, v in path])
    assert torch.allclose(found[1:2], again, atol=1e-6)
