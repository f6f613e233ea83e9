"""A refused configuration in one line: the key, the value, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line for the user."""


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The first fault of ``error`` in one line, and how many more there are."""
    first, *others = error.errors(include_url=False)
    more = f" (and {len(others)} more)" if others else ""
    return f"{_sentence(first, root)}{more}"


def suggestion(key: str, root: type[BaseModel]) -> str:
    """``"; did you mean X?"`` with the key of ``root`` nearest to the dotted ``key``, or nothing."""
    known = list(dotted_keys(root))
    name = key.rpartition(".")[2]
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    nearest = elsewhere or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration model, sections before their members."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted_keys(field.annotation, f"{prefix}{name}.")


def _sentence(details: ErrorDetails, root: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in details["loc"])
    kind, message, value = details["type"], details["msg"], details["input"]
    if kind == "extra_forbidden":
        siblings = _siblings(details["loc"], root)
        return f"{key}: unknown key{suggestion(key, root) or f'; allowed here: {siblings}'}"
    if kind == "value_error":
        return f"{key}: {message.removeprefix('Value error, ')}"
    if kind in ("model_type", "model_attributes_type"):
        message = "it must be a mapping of keys to values"
    allowed = message.replace("Input should be", "it must be").replace("a valid tuple", "a list")
    return f"{key}: {value!r} is not allowed: {allowed}"


def _siblings(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    model = root
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return ", ".join(model.model_fields)
