"""The installed version of headlong."""

from importlib.metadata import version

VERSION = version("headlong")
