"""A request's body: bounded bytes, then strict JSON, whatever the content-type says."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, invalid


class _RefusedJsonError(ValueError):
    """JSON that Python reads and that is refused here."""


def _refuse_constant(name: str) -> float:
    raise _RefusedJsonError(f"{name} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _RefusedJsonError("an object has the same key twice")
    return result


def too_large(limit: int) -> ApiError:
    """The 413 of a body over ``limit`` bytes."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises ApiError 413 above ``limit`` bytes, by header or while it streams in."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise invalid("The client closed the connection before its request was complete.", None) from error
    return b"".join(chunks)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises ApiError 400 for anything else: NaN, Infinity, a repeated key, bad UTF-8."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        if "\\u" in text:
            # An escaped lone surrogate is a str in Python and no text anywhere else.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise invalid("The request body is not valid UTF-8 text.", None, "invalid_json") from error
    except RecursionError as error:
        raise invalid("The request body is nested too deeply.", None, "invalid_json") from error
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}.", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", None, "invalid_type")
    return value


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """``parse_json`` of ``read_body``."""
    return parse_json(await read_body(request, limit))
