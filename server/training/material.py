"""From prompts as text to what the engine trains on: token ids in the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.train_job import Material
from server.errors import ApiError
from server.tokenizer import Tokenizer, TokenizerLoadError
from server.training.prompts import Prompt, PromptError


def make_material(prompts: Sequence[Prompt], folder: Path) -> Material:
    """Token ids of the prompts, each as one user message; of a model without a chat template, the plain text.

    Raises PromptError when the folder has no usable tokenizer.
    """
    try:
        tokenizer = Tokenizer.load(folder)
        ids = [tuple(_encode(tokenizer, prompt.text)) for prompt in prompts]
    except (TokenizerLoadError, ApiError) as error:
        raise PromptError(str(error)) from error
    return Material(ids, tokenizer.ids_always_drafted())


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.render_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, add_special_tokens=True)
