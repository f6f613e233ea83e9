"""What a training run gave, and how it is recorded: the content of run.yaml."""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
import transformers

from engine.backend import Backend
from engine.changed_model import Change
from engine.train_job import TrainJob
from engine.training_data import TrainingData
from heads.checkpoint import Heads, LoadedHeads
from heads.config import HELD_OUT
from heads.evaluate import Evaluation
from heads.lm_head import DraftLmHead


@dataclass(frozen=True, slots=True)
class Result:
    """heads: trained. evaluation: on held-out answers. change: of the base model, whose new form ``backend`` has."""

    backend: Backend
    heads: Heads
    lm_head: DraftLmHead
    evaluation: Evaluation
    data: TrainingData
    change: Change | None = None


def run_facts(job: TrainJob, result: Result, tau: float, start: LoadedHeads | None) -> dict[str, Any]:
    """How these heads were made, for whoever wants to make them again. tau: on held-out prompts."""
    path = PurePath(job.model.path)
    loaded, change = result.backend.loaded, result.change
    name, digest = (loaded.name, loaded.digest) if change is None else (change.original, change.digest)
    facts = {
        **job.run,
        **({} if start is None else {"start_trained": dict(start.config.trained)}),
        "method": job.method,
        "model": {
            "path": path.name if path.is_absolute() else job.model.path,
            "name": name,
            "digest": digest,
        },
        **({} if change is None else {"changed_model": change.to_dict() | {"digest": loaded.digest}}),
        "computed": {"runner": result.backend.name, "quantization": result.backend.quantization},
        "answers": dataclasses.asdict(job.settings.answers),
        "training": dataclasses.asdict(job.settings.training),
        "data": dict(result.data.facts),
        "result": {
            "held_out_positions": result.evaluation.positions,
            "accuracy": [
                {f"top_{count}": round(share, 4) for count, share in depth.items()}
                for depth in result.evaluation.accuracy
            ],
            "acceptance_length": {HELD_OUT: round(tau, 3)},
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain
