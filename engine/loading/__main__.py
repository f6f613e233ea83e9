"""``python -m engine.loading [MODEL]``: fetches and converts a model into the cache, for instance while an image is
built."""

from __future__ import annotations

import sys

import torch

from engine.config import DEFAULT_MODEL, ModelConfig
from engine.errors import ModelLoadError
from engine.loading.model import load_model


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    try:
        loaded = load_model(ModelConfig(path), torch.device("cpu"), None, print)
    except ModelLoadError as error:
        sys.exit(f"headlong: {error}")
    print(f"{loaded.name} is ready in {loaded.path}")


main()
