"""``headlong train --train-base lora``: heads and a LoRA of the base model trained together, the result a new model.

The original's files are only read. The heads belong to the new model alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.backend import Backend, choose_backend
from engine.changed_model import Change, save_changed
from engine.config import ModelConfig
from engine.device import resolve_device, resolve_dtype
from engine.errors import HeadTrainingError
from engine.loading import load_model
from engine.loading.model import quiet_transformers
from engine.loading.mtp import attach_base
from engine.lora_base import LoraBase
from engine.train_job import MODEL, TrainJob, Watch
from heads.checkpoint import Heads
from heads.data import Answer
from heads.joint import Joint
from heads.lm_head import DraftLmHead, OutputHead
from heads.mtp import MtpModule
from heads.settings import LoraSettings


class BaseTraining:
    """The base model's part in a run: a copy of it in float32, with adapters, then the model they make."""

    def __init__(self, job: TrainJob, lora: LoraSettings, head: OutputHead, watch: Watch) -> None:
        """head: the model's own. Raises ModelLoadError, HeadTrainingError."""
        self._job = job
        self._watch = watch
        self._plain = load_model(job.model, resolve_device(job.engine.device), torch.float32, watch.line)
        self._base = LoraBase(self._plain.model, lora, job.settings.training.seed)
        self.joint = Joint(self._base, DraftLmHead(head, None), lora)

    def finish(self, kept: Sequence[Answer], backend: Backend) -> Change:
        """Measures the change on answers that were held out and writes the new model to ``job.folder / MODEL``.

        backend: of the original, which has its dtype. Raises HeadTrainingError for a model that was ruined, OSError.
        """
        self._watch.line("Measuring how far the model is from the original")
        found = self._base.closeness(self.joint.lm_head, kept)
        if not math.isfinite(found.kl):
            raise HeadTrainingError("the base model was ruined in training; lower lora.learning_rate and start again")
        change = Change(self._plain.name, self._plain.digest, self.joint.settings, found)
        self._watch.line(f"Writing {change.name}")
        merged = self._base.merge().to(backend.loaded.model.dtype)  # type: ignore[arg-type]
        with quiet_transformers():
            save_changed(merged, self._plain, change, self._job.folder / MODEL)
        return change

    def reload(self, heads: Heads, original: Backend) -> Backend:
        """The new model, computed as the original was; an MTP module reads it from then on. Raises ModelLoadError."""
        job = self._job
        model = ModelConfig(str(job.folder / MODEL), dtype=job.model.dtype, trust=job.model.trust)
        device = resolve_device(job.engine.device)
        loaded = load_model(model, device, resolve_dtype(model.dtype), self._watch.line)
        backend = choose_backend(loaded, original.quantization, job.engine, self._watch.line)
        if isinstance(heads, MtpModule):
            attach_base(heads, loaded.model)
        return backend
