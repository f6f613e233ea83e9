"""How far a chosen token was from losing, so that an audit can tell a near-tie from a fault.

Every margin is in units of temperature-scaled processed logits (at temperature 0: of processed logits): the least d
for which moving every logit by at most d / 2 could have changed the choice. Boundaries are judged one at a time. The
margin of a token is the smallest of

- its perturbed score less the best rival's among the tokens that survived the filters;
- its own distance from being filtered out (top-k, top-p, min-p);
- over the tokens that were filtered out, the larger of the distance to being let in and the lead over its score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.sampler.filters import Filter, active_filters
from engine.sampler.noise import NoiseKey
from engine.sampler.processing import TargetRow, is_greedy
from engine.sampler.sample import perturbed
from engine.sampling_params import SamplingParams

NO_RIVAL_MARGIN = 1e9  # nothing could have won instead; finite, so that it survives JSON


def choice_margin(target: TargetRow, sampling: SamplingParams, key: NoiseKey, token: int) -> float:
    """The margin of ``token``, the sample of ``target`` under ``key``; 0 or more, at most NO_RIVAL_MARGIN."""
    scores = target.unfiltered.double()
    filters: list[Filter] = []
    if not is_greedy(sampling):
        scores = perturbed(target.unfiltered[None], [key])[0]
        filters = active_filters(sampling)
    survived = target.logits > -torch.inf
    lead = scores[token] - scores
    rivals = survived.clone()
    rivals[token] = False
    margin = _smallest(lead[rivals])
    if not filters:
        return margin
    margin = min(margin, boundary_distance(target, filters, token))
    outsiders = (~survived & (target.unfiltered > -torch.inf) & (lead < margin)).nonzero().squeeze(1)
    # The likeliest outsider is the nearest to being let in, so the search may stop at the first that is too far. One
    # whose lead is no smaller than the margin changes nothing: without skipping those a flat row takes minutes.
    outsiders = outsiders[target.unfiltered[outsiders].argsort(descending=True, stable=True)]
    for outsider, behind in zip(outsiders.tolist(), lead[outsiders].tolist(), strict=True):
        if behind >= margin:
            continue
        entrance = boundary_distance(target, filters, outsider)
        if entrance >= margin:
            break
        margin = min(margin, max(entrance, behind))
    return margin


def boundary_distance(target: TargetRow, filters: Sequence[Filter], token: int) -> float:
    """How far ``token`` is from changing sides: from being filtered out, or from being let in by every filter."""
    exits = [NO_RIVAL_MARGIN]
    entrances: list[float] = []
    row = target.unfiltered.clone()
    for cut in filters:
        before = row.clone()
        cut.apply(row)
        is_kept = bool(row[token] > -torch.inf)
        (exits if is_kept else entrances).append(cut.distance(before, token, is_kept=is_kept))
        row[token] = before[token]  # what the next filter would say of it
    return max(entrances) if entrances else min(exits)


def log_odds_distance(probability: float, limit: float) -> float:
    """How far a probability is from ``limit``: its log-odds move by at most d when logits move by d / 2."""
    if not 0.0 < probability < 1.0:
        return NO_RIVAL_MARGIN
    distance = math.log(probability / limit) - math.log1p(-probability) + math.log1p(-limit)
    return min(abs(distance), NO_RIVAL_MARGIN)


def _smallest(leads: torch.Tensor) -> float:
    return min(float(leads.min()), NO_RIVAL_MARGIN) if len(leads) else NO_RIVAL_MARGIN
