"""The listening socket: taken before the model is loaded, so that a port in use costs no minute of loading."""

from __future__ import annotations

import errno
import socket


class ListenError(Exception):
    """The address cannot be listened on; the message is one line for the user."""


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A bound, listening, non-blocking socket. Port 0 is any free one. Raises ListenError."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on host {host!r}: {error.strerror}") from None
    family, kind, protocol, _, address = resolved[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} on {host} is in use; stop what listens there or choose another") from None
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """``http://HOST:PORT`` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
