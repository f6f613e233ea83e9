"""A model that training has changed, on disk: a folder to serve like any other, under a name of its own.

``origin.json`` names the model and the one it was made from; ``engine.loading.source`` reads the name there. It also
marks the folder as ours, which alone is ever replaced.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from engine.errors import HeadTrainingError
from engine.loading import LoadedModel
from engine.loading.cache import MANIFEST
from engine.loading.source import ORIGIN_FILE
from heads.joint import Closeness
from heads.settings import LoraSettings

_SUFFIX = "-headlong-lora"
_CARD = "README.md"
_GENERATION = "generation_config.json"
_COPIED = (".json", ".jinja", ".model", ".txt", ".py")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE")
_OWN = {"config.json", _GENERATION, ORIGIN_FILE, MANIFEST, _CARD}


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a base model. original, digest: name and digest of the one it was. held_out: how far it is from
    that on held-out answers."""

    original: str
    digest: str
    lora: LoraSettings
    held_out: Closeness

    @property
    def name(self) -> str:
        """The changed model's."""
        return self.original + _SUFFIX

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "changed_from": {"name": self.original, "digest": self.digest},
            "method": "lora",
            "lora": asdict(self.lora),
            "held_out": {key: round(value, 6) for key, value in asdict(self.held_out).items()},
        }


def require_writable(folder: Path, source: LoadedModel) -> None:
    """Raises HeadTrainingError if writing a changed model to ``folder`` would overwrite ``source`` or another model."""
    if folder.exists() and folder.resolve() == source.path.resolve():
        raise HeadTrainingError(f"{folder} is the model itself, which is not overwritten; give another folder")
    if folder.exists() and _digest_of_origin(folder) != source.digest:
        raise HeadTrainingError(
            f"{folder} holds something else than {source.name} as changed here; give another folder"
        )


def save_changed(model: PreTrainedModel, source: LoadedModel, change: Change, folder: Path) -> None:
    """Writes ``model``, in the dtype it has, beside ``folder`` and renames. source: whose tokenizer and generation
    settings stay; its files are only read. Raises OSError."""
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    model.config.name_or_path = change.name
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    model.save_pretrained(partial)
    for file in sorted(source.path.iterdir()):
        if file.is_file() and _is_kept(file):
            shutil.copyfile(file, partial / file.name)
    # As the checkpoint wrote it: a library's defaults must not become the model's wishes.
    (partial / _GENERATION).unlink(missing_ok=True)
    if (source.path / _GENERATION).is_file():
        shutil.copyfile(source.path / _GENERATION, partial / _GENERATION)
    (partial / _CARD).write_text(_card(change, str(model.dtype).removeprefix("torch.")), encoding="utf-8")
    (partial / ORIGIN_FILE).write_text(json.dumps(change.to_dict(), indent=1) + "\n", encoding="utf-8")
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner's eyes alone
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _is_kept(file: Path) -> bool:
    """Whether a file of the original's folder belongs to the changed model too: what makes up its tokenizer, chat
    template and own code, and what its licence asks to be passed on."""
    if file.name.upper().startswith(_LEGAL):
        return True
    return file.suffix in _COPIED and file.name not in _OWN and not file.name.endswith(".index.json")


def _digest_of_origin(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))["changed_from"]["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _card(change: Change, dtype: str) -> str:
    found, lora = change.held_out, change.lora
    return f"""---
base_model: {json.dumps(change.original)}
tags: [headlong, lora, merged]
---

# {change.name}

This is a changed version of {change.original}, not the original model. Its weights differ, and so do its answers.

- Made from: {change.original}, digest `{change.digest}`.
- Made by: `headlong train --train-base lora`. A LoRA of rank {lora.rank} (alpha {lora.alpha}) on every linear layer but
  lm_head was trained together with draft heads, on answers that the original wrote, and merged into the weights
  ({dtype}).
- Licence: headlong does not know that of the original. Whatever it asks of changed versions holds for this one.

How far it is from the original, on {found.tokens} tokens of answers that the original wrote and training did not see:

| | original | this model |
| --- | --- | --- |
| KL(original, this model), nats a token | 0 | {found.kl:.5f} |
| same likeliest token | 1 | {found.agreement:.4f} |
| perplexity of those answers | {found.perplexity_before:.4f} | {found.perplexity_after:.4f} |

The settings of the run and how well the heads draft: `run.yaml` and `config.json` in the folder of the heads.
"""
