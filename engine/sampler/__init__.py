"""Sampling: what turns a row of logits into a token.

``processing`` makes the target row, ``filters`` are top-k, top-p and min-p, ``noise`` is the counter-based Gumbel
noise, ``sample`` picks the token, ``margins`` says how far that token was from losing, ``logprobs`` reports
log-probabilities. Nothing here knows trees, schedulers or models.
"""
