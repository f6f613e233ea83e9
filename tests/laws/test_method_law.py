"""Each method's whole path at temperature 1: the first tokens are distributed as the model's own, by chi-square.

``test_token_identity`` says more of each seed; this says that the seeds together are the model's distribution.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from reference_sampler import distribution
from scipy import stats
from tiny_engine import Sizes, request, run, tiny_core, tiny_model
from tiny_heads import markov_drafter, medusa_drafter, mtp_drafter, own_kv_drafter, streaming_drafter

from engine.sampling_params import SamplingParams
from engine.spec_decode.drafter import Drafter
from engine.spec_decode.suffix import SuffixDrafter

pytestmark = pytest.mark.usefixtures("no_drafter_fails")

PROMPT = (7, 3, 5, 3, 1, 5, 7, 3, 1, 7, 5, 3)
WANTED = (1, 3, 5, 7)  # the bias leaves nothing to others; the heads' draft vocabulary
LENGTH = 3
SEEDS = 1500
SIGNIFICANT = 1e-4
HEADS = ("medusa", "markov", "mtp", "streaming")


def sampling(seed: int, temperature: float = 1.0) -> SamplingParams:
    bias = tuple((token, 100.0) for token in WANTED)
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=LENGTH, logit_bias=bias)


def method_drafters(method: str, *, coupling: bool) -> list[Drafter]:
    if method == "suffix":
        return [SuffixDrafter()]
    if method == "medusa":
        return [medusa_drafter("llama", coupling=coupling, draft_vocab=8)]
    if method == "markov":
        return [markov_drafter(tiny_model("llama"), coupling=coupling, draft_vocab=8)]
    if method == "mtp_own":
        return [own_kv_drafter(tiny_model("llama"), coupling=coupling, draft_vocab=8)]
    if method == "streaming":
        return [streaming_drafter(tiny_model("llama"), coupling=coupling, draft_vocab=8)]
    return [mtp_drafter(tiny_model("llama"), coupling=coupling, draft_vocab=8)]


def expected_law() -> dict[tuple[int, ...], float]:
    """Probability of each beginning, from transformers' own forward pass and the definitions."""
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("eager")  # an engine may have made it read a paged cache
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, mass in law.items():
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            shares = distribution(logits.tolist(), sampling(0), PROMPT, tokens)
            for token in WANTED:
                longer[*tokens, token] = mass * shares[token]
        law = longer
    return law


def p_value(method: str, *, coupling: bool = True, temperature: float = 1.0) -> tuple[float, int]:
    """(of the first tokens of many seeds under the expected law, how many of them were drafted)"""
    core = tiny_core("llama", method_drafters(method, coupling=coupling), Sizes(num_blocks=400, max_num_seqs=32))
    requests = [request(f"r{seed}", PROMPT, sampling(seed, temperature)) for seed in range(SEEDS)]
    answers = run(core, requests).values()
    law = expected_law()
    found = Counter(tuple(answer.ids) for answer in answers)
    assert found.keys() <= law.keys()
    expected = [mass * SEEDS for mass in law.values()]
    test = stats.chisquare([found[tokens] for tokens in law], expected, sum_check=False)
    return float(test.pvalue), sum(answer.accepted for answer in answers)


@pytest.mark.parametrize(
    ("method", "coupling"),
    [("suffix", True), ("mtp_own", True), *((method, coupling) for method in HEADS for coupling in (True, False))],
)
def test_the_first_tokens_have_the_models_law(method: str, coupling: bool) -> None:
    p, accepted = p_value(method, coupling=coupling)
    assert p > SIGNIFICANT
    assert accepted > SEEDS // 3


def test_the_check_notices_another_temperature() -> None:
    assert p_value("mtp", temperature=1.3)[0] < SIGNIFICANT


def test_the_law_is_whole() -> None:
    law = expected_law()
    assert sum(law.values()) == pytest.approx(1.0)
