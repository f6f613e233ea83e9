"""API keys: a router dependency on every route but the probes, never a check of paths."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Self

from fastapi import Request
from starlette.datastructures import Headers

from server.config_errors import ConfigError
from server.context import ServerContext
from server.errors import ApiError

_HASH_PREFIX = "sha256:"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """The keys a server admits, held as sha256 digests."""

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests

    @classmethod
    def load(cls, path: str) -> Self:
        """Reads a keys file: one key a line, plain or ``sha256:HEX``; blank lines and ``#`` comments are skipped.

        Raises ConfigError when the file cannot be read, holds no key, or a line is neither form.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"server.api_keys_file: cannot read {path}: {reason}") from None
        digests = [
            _digest(line.strip(), f"{path} line {number}")
            for number, line in enumerate(lines, start=1)
            if line.strip() and not line.strip().startswith("#")
        ]
        if not digests:
            raise ConfigError(f"server.api_keys_file: {path} holds no key; add one, or leave the setting out (null)")
        return cls(digests)

    def tenant(self, headers: Headers) -> str | None:
        """The digest of the known key among ``Authorization: Bearer``, ``api-key`` and ``x-api-key``, or None."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = [token.strip()] if scheme.lower() == "bearer" else []
        presented += [headers[name].strip() for name in ("api-key", "x-api-key") if name in headers]
        return next((key for key in map(self._known, presented) if key is not None), None)

    def _known(self, key: str) -> str | None:
        digest = hashlib.sha256(key.encode()).digest()
        # Every digest is compared, so that the time taken does not tell which one matched.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex() if any(matches) else None


async def require_api_key(request: Request) -> None:
    """The dependency. ``app.state.api_keys`` is None for an open server. Raises ApiError 401.

    ``request.state.tenant`` becomes the key's digest, "" on an open server.
    """
    keys: ApiKeys | None = request.app.state.api_keys
    tenant = "" if keys is None else keys.tenant(request.headers)
    if tenant is not None:
        request.state.tenant = tenant
        return
    context: ServerContext = request.app.state.context
    context.metrics.rejected("auth")
    raise ApiError(
        401,
        "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(line: str, where: str) -> bytes:
    if line.startswith(_HASH_PREFIX):
        hexadecimal = line.removeprefix(_HASH_PREFIX).strip().lower()
        if not _SHA256.fullmatch(hexadecimal):
            raise ConfigError(f"server.api_keys_file: {where}: sha256: must be followed by 64 hexadecimal digits")
        return bytes.fromhex(hexadecimal)
    if not line.isascii() or not line.isprintable() or " " in line:
        raise ConfigError(f"server.api_keys_file: {where}: a key is printable ASCII without spaces")
    return hashlib.sha256(line.encode()).digest()
