"""The id that names one HTTP exchange in logs and in the ``x-request-id`` header."""

from __future__ import annotations

import re
import secrets

from starlette.requests import HTTPConnection

_SANE = re.compile(r"[A-Za-z0-9._:@=+/-]{1,128}")


def request_id_of(connection: HTTPConnection) -> str:
    """The exchange's id: a sane inbound ``x-request-id`` is kept, else one is drawn; the same on every call."""
    known = getattr(connection.state, "request_id", None)
    if isinstance(known, str):
        return known
    inbound = connection.headers.get("x-request-id", "")
    chosen = inbound if _SANE.fullmatch(inbound) else f"req_{secrets.token_hex(16)}"
    connection.state.request_id = chosen
    return chosen
