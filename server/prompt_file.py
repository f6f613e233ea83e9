"""A user's file of prompts: JSON lines, or text with one prompt a line.

For ``headlong train --prompts FILE`` and for ``--dataset FILE`` of the commands that measure.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class PromptFileError(Exception):
    """The file cannot be read as prompts; one line that names the line of the file."""


def read_prompt_file(path: Path) -> list[str]:
    """JSON lines with ``prompt`` or ``messages``, when the name ends in .jsonl; else one prompt a line.

    Of ``messages`` only the last user message is used: single turns. Raises PromptFileError.
    """
    try:
        # Split at line feeds alone: JSON may hold the other characters that Python takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path} cannot be read as a file of prompts: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            texts.append(_from_json(line) if path.suffix == ".jsonl" else line.strip())
        except ValueError as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from error
    if not texts:
        raise PromptFileError(f"{path} holds no prompt")
    return texts


def _from_json(line: str) -> str:
    """Raises ValueError."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise ValueError("not JSON (nested too deep)") from None
    if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
        raise ValueError('expected a JSON object with "prompt" or "messages"')
    text = record["prompt"] if "prompt" in record else _last_user_message(record["messages"])
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt must be text that is not empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the prompt holds half of a surrogate pair, which is no text")
    return text


def _last_user_message(messages: object) -> object:
    """Raises ValueError."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    for message in reversed(messages):
        if message.get("role") == "user":
            return message.get("content")
    raise ValueError('"messages" holds no user message')
