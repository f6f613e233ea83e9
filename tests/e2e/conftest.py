"""One real server for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """SmolLM2-135M-Instruct with the default settings."""
    with running_server() as found:
        yield found
