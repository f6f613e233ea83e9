"""The joint distribution of the first tokens, by chi-square: at row level and through the verifier.

Seeds are 0, 1, 2, ... so a result is the same on every run. The expected probabilities come from a slow reference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from reference_sampler import distribution
from scipy import stats

from engine.config import VerifierName
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import RowContext, target_row
from engine.sampler.sample import sample
from engine.sampling_params import SamplingParams
from engine.spec_decode.tree import ROOT, DraftTree
from engine.spec_decode.verifier import VerifyItem, make_verifier

VOCAB = 5
PROMPT = (2, 4)
TABLE = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
SIGNIFICANT = 1e-4

SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.25),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.6),
    "bias": SamplingParams(logit_bias=((0, 1.0), (3, -1.0))),
}


def model(tokens: Sequence[int]) -> torch.Tensor:
    state = 0
    for token in tokens[-3:]:
        state = (state * 7 + token + 1) % len(TABLE)
    return TABLE[state]


def p_value(observed: Counter[tuple[int, ...]], sampling: SamplingParams, length: int) -> float:
    """Of the joint law of ``length`` tokens; a single impossible outcome gives 0."""
    counts, expected = [], []
    for tokens in itertools.product(range(VOCAB), repeat=length):
        mass = 1.0
        for index, token in enumerate(tokens):
            row = distribution(model([*PROMPT, *tokens[:index]]).tolist(), sampling, PROMPT, tokens[:index])
            mass *= row[token]
        if mass:
            counts.append(observed[tokens])
            expected.append(mass)
    total = sum(observed.values())
    if sum(counts) != total:
        return 0.0
    return float(stats.chisquare(counts, np.array(expected) / sum(expected) * total).pvalue)


def row_level(sampling: SamplingParams, length: int, count: int) -> list[tuple[int, ...]]:
    """The first tokens of ``count`` seeds at once, one row a distinct prefix."""
    outputs = np.zeros((count, 0), dtype=np.int64)
    for index in range(length):
        prefixes, which = np.unique(outputs, axis=0, return_inverse=True)
        rows = [
            target_row(model([*PROMPT, *prefix]).clone(), RowContext(sampling, [*PROMPT, *prefix], 2)).logits
            for prefix in prefixes.tolist()
        ]
        stacked = torch.stack(rows)[torch.from_numpy(which.reshape(-1))]
        keys = [NoiseKey(seed, len(PROMPT) + index) for seed in range(count)]
        tokens = sample(stacked, [sampling] * count, keys)
        outputs = np.concatenate([outputs, np.array(tokens)[:, None]], axis=1)
    return [tuple(row) for row in outputs.tolist()]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_three_tokens_at_row_level(name: str) -> None:
    tokens = row_level(SAMPLINGS[name], 3, 100_000)
    assert p_value(Counter(tokens), SAMPLINGS[name], 3) > SIGNIFICANT


def test_the_check_notices_a_small_change_of_any_parameter() -> None:
    changes = {
        "temperature": {"temperature": 0.9},
        "top_k": {"top_k": 4},
        "top_p": {"top_p": 0.95},
        "min_p": {"min_p": 0.0},
        "penalties": {"frequency_penalty": 0.3},
        "bias": {"logit_bias": ((0, 1.15), (3, -1.0))},
    }
    for name, change in changes.items():
        wrong = dataclasses.replace(SAMPLINGS[name], **change)  # type: ignore[arg-type]
        assert p_value(Counter(row_level(wrong, 2, 20_000)), SAMPLINGS[name], 2) < SIGNIFICANT, name


def chain(*tokens: int) -> DraftTree:
    tree, node = DraftTree(), ROOT
    for token in tokens:
        node = tree.add(token, node, 1.0, "test")
    return tree


def full_tree() -> DraftTree:
    """Three of five tokens under the root and under each of them."""
    tree = DraftTree()
    for token in (4, 0, 2):
        node = tree.add(token, ROOT, 0.5, "test")
        for below in (1, 3, 0):
            tree.add(below, node, 0.2, "test")
    return tree


def likeliest() -> DraftTree:
    first = int(model(PROMPT).argmax())
    return chain(first, int(model([*PROMPT, first]).argmax()))


DRAFTS: dict[str, Callable[[], DraftTree]] = {
    "none": DraftTree,
    "chain": likeliest,
    "tree": full_tree,
    "hostile": lambda: chain(int(model(PROMPT).argmin()), 10**9, -3),
}


def two_tokens(verifier: VerifierName, sampling: SamplingParams, tree: DraftTree, count: int) -> list[tuple[int, ...]]:
    """The first two tokens of ``count`` seeds: a drafted step, then plain ones for the requests that need more."""
    nodes = [tree.path_tokens(node) for node in range(len(tree))]
    rows = torch.stack([model([*PROMPT, *path]) for path in [[], *nodes]])
    seeded = [dataclasses.replace(sampling, seed=seed) for seed in range(count)]
    walker = make_verifier(verifier)
    results = walker.verify([VerifyItem(PROMPT, 2, params, (), tree, 0) for params in seeded], rows)
    short = [index for index, result in enumerate(results) if len(result.tokens) == 1]
    next_rows = torch.stack([model([*PROMPT, token]) for token in range(VOCAB)])
    items = []
    for index in short:
        token = results[index].tokens[0]
        items.append(VerifyItem([*PROMPT, token], 2, seeded[index], (), DraftTree(), token))
    seconds = dict(zip(short, walker.verify(items, next_rows), strict=True))
    return [
        (*result.tokens, *(seconds[index].tokens if index in seconds else ()))[:2]
        for index, result in enumerate(results)
    ]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_two_tokens_through_the_verifier(name: str, draft: str) -> None:
    """Equal to the row level seed by seed, so what 100,000 seeds show there holds here too."""
    sampling, count = SAMPLINGS[name], 3_000
    tokens = two_tokens("match", sampling, DRAFTS[draft](), count)
    assert tokens == row_level(sampling, 2, count)
    assert p_value(Counter(tokens), sampling, 2) > SIGNIFICANT


def test_a_hundred_thousand_seeds_through_the_verifier() -> None:
    sampling = SAMPLINGS["temperature"]
    tokens = two_tokens("match", sampling, full_tree(), 100_000)
    assert p_value(Counter(tokens), sampling, 2) > SIGNIFICANT


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_two_tokens_through_the_rejection_rule(name: str, draft: str) -> None:
    tokens = two_tokens("rejection", SAMPLINGS[name], DRAFTS[draft](), 2_000)
    assert p_value(Counter(tokens), SAMPLINGS[name], 2) > SIGNIFICANT
