"""From prompts as text to what the engine trains on: token ids in the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.train_job import Material
from server.errors import ApiError
from server.tokenizer import Tokenizer, TokenizerLoadError
from server.training.prompts import Prompt, PromptError


def make_material(prompts: Sequence[Prompt], folder: Path) -> Material:
    """Token ids of the prompts in the model's chat template; of a model without one, the plain text, which is all
    messages of a conversation one below the other.

    Raises PromptError when the folder has no usable tokenizer.
    """
    try:
        tokenizer = Tokenizer.load(folder)
        ids = [tuple(_encode(tokenizer, prompt)) for prompt in prompts]
    except (TokenizerLoadError, ApiError) as error:
        raise PromptError(str(error)) from error
    return Material(ids, tokenizer.ids_always_drafted(), [prompt.source for prompt in prompts])


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.render_chat(prompt.messages)
    return tokenizer.encode("\n".join(message["content"] for message in prompt.messages), add_special_tokens=True)
