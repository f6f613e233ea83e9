"""Fields that ask for something this server does not do: refused by name, never ignored.

Values that mean "nothing" pass, because clients send them without meaning anything (``tools: []`` and the like).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.errors import invalid

Neutral = Callable[[Any], bool]


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _is(*values: Any) -> Neutral:
    return lambda value: any(type(value) is type(neutral) and value == neutral for neutral in values)


def _never(_: Any) -> bool:
    return False


def _only_text(value: Any) -> bool:
    return isinstance(value, list) and all(item == "text" for item in value)


# What shapes the answer in other servers' dialects and would otherwise be dropped as an unknown key.
_COMMON: dict[str, Neutral] = {
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "structured_outputs": _empty,
    "grammar": _empty,
    "prompt_logprobs": _never,
    "prompt_embeds": _empty,
    "logits_processors": _empty,
    "allowed_token_ids": _empty,
    "truncate_prompt_tokens": _never,
    "use_beam_search": _is(False),
    "length_penalty": _is(1, 1.0),
    "include_stop_str_in_output": _is(False),
    "skip_special_tokens": _is(True),
    "return_tokens_as_token_ids": _is(False),
    "typical_p": _is(1, 1.0),
    "priority": _is(0),
}
CHAT: dict[str, Neutral] = _COMMON | {
    "tools": _empty,
    "functions": _empty,
    "tool_choice": _is("none", "auto"),
    "function_call": _is("none", "auto"),
    "prediction": _never,
    "modalities": _only_text,
    "audio": _never,
    "web_search_options": _never,
    "chat_template": _never,
    "documents": _empty,
    "add_special_tokens": _is(False),
    "echo": _is(False),
    "best_of": _is(1),
}
COMPLETIONS: dict[str, Neutral] = _COMMON | {"suffix": _empty, "add_special_tokens": _is(True)}
_CHOICES = frozenset({"tool_choice", "function_call", "modalities"})  # the field is known, its value is not


def refuse_unsupported(body: Mapping[str, Any], fields: Mapping[str, Neutral]) -> None:
    """Raises ApiError 400 naming the first field of ``fields`` whose value asks for something."""
    for name, is_neutral in fields.items():
        value = body.get(name)
        if value is None or is_neutral(value):
            continue
        if name in _CHOICES:
            raise invalid(f"This value of '{name}' is not supported.", name, "unsupported_value")
        raise invalid(f"'{name}' is not supported.", name, "unsupported_parameter")
    _refuse_response_format(body.get("response_format"))


def _refuse_response_format(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid("'response_format' must be an object with a type.", "response_format", "invalid_type")
    if value["type"] in ("json_object", "json_schema"):
        message = f"The response format '{value['type']}' is not supported."
        raise invalid(message, "response_format", "unsupported_value")
    if value["type"] != "text":
        raise invalid(f"Unknown response format '{value['type']}'.", "response_format.type")
