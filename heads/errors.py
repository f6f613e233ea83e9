"""The one error that this room raises for what a user can mend."""

from __future__ import annotations


class HeadsError(Exception):
    """Heads, answers or settings that cannot be used; the message is one sentence a user can act on."""
