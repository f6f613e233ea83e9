"""Chat messages as clients send them -> the plain dicts that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.errors import invalid

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
TemplateMessage = dict[str, Any]
_TEXT_KEYS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")
_OTHER_MEDIA = ("image_url", "input_audio", "file", "video_url", "audio_url", "image", "input_image")


def template_messages(messages: Sequence[Any]) -> list[TemplateMessage]:
    """Checked messages, content joined to one string. Raises ApiError 400 with a path like ``messages.[2].role``."""
    return [_template_message(message, f"messages.[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Any, where: str) -> TemplateMessage:
    if not isinstance(message, dict):
        raise invalid(f"'{where}' must be an object.", where, "invalid_type")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role is None:
        raise invalid(f"Missing required parameter: '{where}.role'.", f"{where}.role", "missing_required_parameter")
    if role not in ROLES:
        raise invalid(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role")
    result: TemplateMessage = {"role": role, "content": _content(given, where)}
    for key in _PASSED_ON:
        if key in given:
            if not isinstance(given[key], str):
                raise invalid(f"'{where}.{key}' must be a string.", f"{where}.{key}", "invalid_type")
            result[key] = given[key]
    if role == "assistant":
        _add_tool_calls(result, given, where)
    return result


def _content(given: dict[str, Any], where: str) -> str:
    where = f"{where}.content"
    content = given.get("content")
    if content is None:
        if given["role"] in ("assistant", "function"):
            # Templates concatenate content, so an answer of tool calls alone has the empty text, not none.
            refusal = given.get("refusal", "")
            return refusal if isinstance(refusal, str) else ""
        raise invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"'{where}' must be a string or an array of content parts.", where, "invalid_type")
    return "".join(_part_text(part, f"{where}.[{j}]") for j, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"'{where}' must be an object.", where, "invalid_type")
    kind = part.get("type")
    if kind in _OTHER_MEDIA:
        raise invalid(f"This model reads text only, not '{kind}'.", f"{where}.type", "unsupported_value")
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise invalid(f"'{where}.type' must be 'text'.", f"{where}.type")
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{key}' must be a string.", f"{where}.{key}", "invalid_type")
    return text


def _add_tool_calls(result: TemplateMessage, given: dict[str, Any], where: str) -> None:
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list):
        raise invalid(f"'{where}.tool_calls' must be an array.", f"{where}.tool_calls", "invalid_type")
    if not calls and "function_call" in given:
        calls = [{"function": given["function_call"]}]
    if calls:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls.[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"'{where}.function' must be an object with a name.", f"{where}.function", "invalid_type")
    result = {"type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _arguments(value: Any) -> Any:
    """Templates want an object; a string that is not one is shown to the model as it came."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value
