"""What a route needs of the running server, found at ``request.app.state.context``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from server.config import Config
    from server.metrics import Metrics
    from server.tokenizer import Tokenizer


@dataclass(slots=True)
class ServerContext:
    """The parts of one server process. ``served_model_name`` is the one id that ``/v1/models`` lists.

    draining: set at SIGTERM; new requests are then refused and ``/ready`` answers 503.
    live_streams: answers being written, which the drain waits for.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    config: Config
    metrics: Metrics
    served_model_name: str
    fingerprint: str
    created: int
    draining: bool = False
    live_streams: set[str] = field(default_factory=set)
