"""Which prompts are trained on: a user's or the built-in ones, never those that measure the heads."""

from __future__ import annotations

from pathlib import Path

from server.bench.datasets import DatasetError, load_dataset
from server.training.config import PromptSection
from server.training.prompts import Prompt, PromptError, built_in_prompts, excluding, read_prompts

# Their prompts measure the heads, so nothing trains on them.
BENCHMARKS = ("mt-bench", "humaneval", "edits")


def training_prompts(section: PromptSection) -> list[Prompt]:
    """The prompts of a file, a folder of code or the built-in recipe, without those of installed benchmarks.

    Raises PromptError.
    """
    prompts = _prompts(section)
    benchmarks: list[str] = []
    for name in BENCHMARKS:
        try:
            benchmarks += load_dataset(name).prompts
        except DatasetError:  # not installed, so it cannot have been used to measure either
            continue
    kept = excluding(prompts, benchmarks)
    if not kept:
        raise PromptError(f"every prompt of {section.file} is one of a benchmark, and those measure the heads")
    return kept


def _prompts(section: PromptSection) -> list[Prompt]:
    if section.file is None:
        return built_in_prompts(section.seed)
    return read_prompts(Path(section.file).expanduser(), section.seed)
