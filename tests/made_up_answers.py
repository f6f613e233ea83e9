"""Made-up answers for tests of training: states that say where they stand in a fixed cycle of tokens."""

from __future__ import annotations

import torch

from heads.data import Answer, Ask
from heads.lm_head import DraftLmHead, OutputHead

# Tiny matrices gain nothing from a team of threads, and lose whole time slices to it on a busy machine.
torch.set_num_threads(1)

VOCAB = 12
HIDDEN = 16


def lm_head(token_ids: list[int] | None = None) -> DraftLmHead:
    """Its row v reads the unit vector v, sharply."""
    weight = torch.zeros(VOCAB, HIDDEN)
    weight[torch.arange(VOCAB), torch.arange(VOCAB)] = 8.0
    return DraftLmHead(OutputHead(weight), None if token_ids is None else torch.tensor(token_ids))


def cyclic_answer(seed: int, length: int = 20, step: int = 5) -> Answer:
    """Token i is seed + step * i: the state that chose it is its unit vector, so any token ahead is foreseeable."""
    tokens = tuple((seed + step * i) % VOCAB for i in range(length))
    states = torch.nn.functional.one_hot(torch.tensor(tokens), HIDDEN).to(torch.float16)
    return Answer(Ask((seed, length, step), 0.0 if seed % 2 == 0 else 0.8, seed), tokens, states)


def cyclic_answers(count: int = 60) -> list[Answer]:
    return [cyclic_answer(seed, 10 + seed % 7) for seed in range(count)]
