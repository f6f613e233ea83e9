"""What training starts with: new heads, or those of a folder; and the draft vocabulary."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch

from engine.errors import HeadTrainingError
from engine.loading import LoadedModel
from engine.loading.heads import output_head, require_fitting
from engine.loading.mtp import new_mtp
from engine.loading.streaming import attach_layers, new_streams
from engine.train_job import Material, TrainJob
from heads.checkpoint import Heads, LoadedHeads
from heads.data import Answer
from heads.markov import MarkovHeads, MarkovSizes
from heads.markov import start as start_markov
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.streaming import StreamingHeads


def sized_as_start(job: TrainJob, start: LoadedHeads | None) -> TrainJob:
    """The job with the method and the sizes of the heads it starts from.

    Raises HeadTrainingError where the method cannot start from theirs.
    """
    if start is None:
        return dataclasses.replace(job, method=job.method or MedusaHeads.method)
    found = start.config
    method = job.method or found.method
    gains_bias = method == MarkovHeads.method and isinstance(start.heads, MedusaHeads) and not start.heads.lm_heads
    if method != found.method and not gains_bias:
        raise HeadTrainingError(f"{start.folder} holds heads of the method {found.method}, not {method}")
    sizes = dataclasses.replace(job.settings.training, num_heads=found.num_heads, num_layers=found.num_layers)
    if found.mtp is not None:
        sizes = dataclasses.replace(sizes, kv=found.mtp.kv)
    if found.streaming is not None:
        sizes = dataclasses.replace(sizes, rank=found.rank or sizes.rank, stream_layers=found.streaming.layers)
    if method == MarkovHeads.method:
        # Each token of the draft vocabulary has a row of the bias, so it stays.
        drafted = 0 if start.token_ids is None else len(start.token_ids)
        sizes = dataclasses.replace(sizes, rank=found.rank or sizes.rank, draft_vocab=drafted)
    settings = dataclasses.replace(job.settings, training=sizes)
    return dataclasses.replace(job, method=method, settings=settings)


def first_heads(job: TrainJob, start: LoadedHeads | None, loaded: LoadedModel) -> Heads:
    """The heads that the first step changes; call it before the model's linear layers are packed."""
    settings = job.settings.training
    if start is not None:
        require_fitting(start, loaded)
        assert isinstance(start.heads, Heads), "load_heads gives no others"
        heads = start.heads.train().requires_grad_(True)
        if isinstance(heads, StreamingHeads):
            attach_layers(heads, loaded.model)
        if not isinstance(heads, MedusaHeads) or job.method == MedusaHeads.method:
            return heads
        medusa = heads
    elif job.method == MtpModule.method:
        return new_mtp(loaded.model, settings)
    elif job.method == StreamingHeads.method:
        return new_streams(loaded.model, settings)
    else:
        medusa = MedusaHeads(output_head(loaded.model).weight.shape[1], settings.num_heads, settings.num_layers)
        if job.method == MedusaHeads.method:
            return medusa
    vocab = len(output_head(loaded.model).weight)
    markov = MarkovHeads(medusa, MarkovSizes(settings.rank, vocab, min(settings.draft_vocab or vocab, vocab)))
    start_markov(markov, settings.seed)
    return markov


def drafted_tokens(
    job: TrainJob, start: LoadedHeads | None, seen: Sequence[Answer], material: Material, vocab_size: int
) -> torch.Tensor | None:
    """The draft vocabulary of this run; None: the whole."""
    if start is not None and job.method == MarkovHeads.method:
        return start.token_ids
    return draft_vocab(seen, material.always_drafted, job.settings.training.draft_vocab, vocab_size)


def draft_vocab(answers: Sequence[Answer], always: Sequence[int], size: int, vocab_size: int) -> torch.Tensor | None:
    """The draft vocabulary, ascending: ``always``, then the tokens most frequent in the answers, then the lowest ids
    (the oldest merges of a BPE vocabulary). None for the whole vocabulary (size 0, or at least the model's own)."""
    if size == 0 or size >= vocab_size:
        return None
    counts = Counter(token for answer in answers for token in answer.tokens)
    frequent = (token for token, _ in counts.most_common())
    chosen = dict.fromkeys([*always][:size])
    for token in (*frequent, *range(vocab_size)):
        if len(chosen) >= size:
            break
        chosen[token] = None
    return torch.tensor(sorted(chosen))
