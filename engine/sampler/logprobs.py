"""Log-probabilities of tokens: log-softmax of the raw model logits, before anything a request asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import RequestFailedError
from engine.outputs import SILENT_LOGPROB, TokenLogprob


def token_logprobs(rows: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """One entry a row. rows: raw logits [k, vocab]; fp64 is computed in fp64, everything else in fp32.

    token_ids[i]: the token whose log-probability row i gives. num_top: how many of the likeliest tokens go with it,
    lower ids first among equals. Minus infinity becomes SILENT_LOGPROB.

    Raises RequestFailedError if a row is not finite.
    """
    if not token_ids:
        return []
    logprobs = (rows if rows.dtype == torch.float64 else rows.float()).log_softmax(dim=-1)
    if bool(logprobs.isnan().any()):
        raise RequestFailedError("The model's logits are not finite, so there are no log-probabilities.")
    logprobs = logprobs.masked_fill(logprobs == -torch.inf, SILENT_LOGPROB)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=rows.device)[:, None]).squeeze(1).tolist()
    return [TokenLogprob(value, _top(row, num_top)) for value, row in zip(chosen, logprobs, strict=True)]


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    # topk leaves open which of several equals it returns and in what order.
    threshold = logprobs.topk(min(count, len(logprobs))).values[-1]
    ids = (logprobs >= threshold).nonzero().squeeze(1)
    ids = ids[logprobs[ids].argsort(descending=True, stable=True)][:count]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
