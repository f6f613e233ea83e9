"""Snapshots of hub repositories: safetensors and their small files, never pickled weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.config import ModelConfig
from engine.errors import ModelLoadError

_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_CODE = ("*.py",)
_LEFT_OUT = ("*/*", "consolidated*", "adapter_*")  # other formats of the same weights


def download(model: ModelConfig, progress: Callable[[str], None]) -> Path:
    """The local snapshot of ``model.path`` at ``model.revision``; what is already in the hub's cache is not fetched.

    Raises ModelLoadError when the hub cannot be reached and the cache lacks it, or it may not be read.
    """
    name = model.path if model.revision is None else f"{model.path} at revision {model.revision}"
    progress(f"Looking up {name} on the hub")
    try:
        folder = snapshot_download(
            model.path,
            revision=model.revision,
            allow_patterns=[*_FILES, *(_CODE if model.trust else ())],
            ignore_patterns=list(_LEFT_OUT),
        )
    except GatedRepoError as error:
        raise ModelLoadError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model.path} has no revision {model.revision} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"There is no folder {model.path} here and no such public repository on the hub."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelLoadError(
            f"There is no folder {model.path} here, and the hub cannot be reached to download it."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelLoadError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from error
    return Path(folder)
