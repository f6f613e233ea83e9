"""A user's file of prompts: JSON lines, or text with one prompt a line.

For ``headlong train --prompts FILE`` and for ``--dataset FILE`` of the commands that measure.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.errors import ApiError
from server.protocol.messages import TemplateMessage, template_messages

Turn = tuple[str, tuple[TemplateMessage, ...]]
"""A user message, and the conversation before it."""


class PromptFileError(Exception):
    """The file cannot be read as prompts; one line that names the line of the file."""


def read_prompt_file(path: Path) -> list[Turn]:
    """JSON lines with ``prompt`` or ``messages``, when the name ends in .jsonl; else one prompt a line.

    A conversation is used up to its last user message, which the model is to answer. Raises PromptFileError.
    """
    try:
        # Split at line feeds alone: JSON may hold the other characters that Python takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path} cannot be read as a file of prompts: {error}") from error
    turns: list[Turn] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns.append(_from_json(line) if path.suffix == ".jsonl" else (line.strip(), ()))
        except ValueError as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from error
    if not turns:
        raise PromptFileError(f"{path} holds no prompt")
    return turns


def _from_json(line: str) -> Turn:
    """Raises ValueError."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError:
        raise ValueError("not JSON (nested too deep)") from None
    if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
        raise ValueError('expected a JSON object with "prompt" or "messages"')
    text, before = (record["prompt"], ()) if "prompt" in record else _last_turn(record["messages"])
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt must be text that is not empty")
    for said in (text, *(message["content"] for message in before)):
        if any("\ud800" <= character <= "\udfff" for character in said):
            raise ValueError("the prompt holds half of a surrogate pair, which is no text")
    return text, before


def _last_turn(given: object) -> Turn:
    """The last user message and those before it. Raises ValueError."""
    if not isinstance(given, list):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    try:
        messages = template_messages(given)
    except ApiError as error:
        raise ValueError(str(error)) from error
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return messages[index]["content"], tuple(messages[:index])
    raise ValueError('"messages" holds no user message')
