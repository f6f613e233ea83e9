"""The fields that chat and completions share, and how a broken one becomes an OpenAI error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from server.errors import ApiError, invalid

MAX_STOP_CHARACTERS = 1024
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1

ModelT = TypeVar("ModelT", bound="WireModel")


class WireModel(BaseModel):
    """Strict types, unknown keys ignored, null the same as absent, finite numbers only."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if value is not None}
        return data


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("invalid_type", "must be a string or an array of strings")
    if not all(stops):
        raise PydanticCustomError("invalid_value", "must not contain an empty string")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise PydanticCustomError(
            "string_above_max_length", "holds a string over {limit} characters", {"limit": MAX_STOP_CHARACTERS}
        )
    return tuple(dict.fromkeys(stops))


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise PydanticCustomError("invalid_type", "must be an object of token ids and biases")
    result: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key):
            raise PydanticCustomError("invalid_value", "has a key that is not a token id: {key}", {"key": repr(key)})
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("invalid_type", "must map token ids to numbers")
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "must map token ids to numbers from -100 to 100")
        result[int(key)] = float(bias)
    return result


class StreamOptions(WireModel):
    """``include_obfuscation``, padding against traffic analysis on the public internet, is accepted and unused."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(WireModel):
    """One request's wishes about drafting; ``max_draft_tokens`` counts tree nodes beside the root."""

    # An option of ours that is misspelt would otherwise do nothing in silence.
    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    method: str = "auto"
    max_draft_tokens: int | None = Field(default=None, ge=0)
    stats: bool = False
    detail: bool = False


class GenerationRequest(WireModel):
    """Sampling, stopping and reporting fields of both endpoints; None: the model's own default applies."""

    model: str | None = None
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, ge=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_parse_logit_bias)] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stop: Annotated[tuple[str, ...], BeforeValidator(_parse_stop)] = ()
    stop_token_ids: list[int] = Field(default_factory=list)
    bad_words: list[str] = Field(default_factory=list)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    speculation: SpeculationOptions = SpeculationOptions()
    return_token_ids: bool = False
    return_margins: bool = False
    cache_salt: str = Field("", max_length=256)
    service_tier: str | None = None

    @property
    def token_limit(self) -> int | None:
        """Output tokens asked for; None: the request does not say."""
        raise NotImplementedError

    @property
    def token_limit_field(self) -> str:
        """The field that said so."""
        return "max_tokens"


_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_long": "string_above_max_length",
    "string_above_max_length": "string_above_max_length",
    "empty_array": "empty_array",
    "invalid_type": "invalid_type",
}
_MIN_BOUNDS, _MAX_BOUNDS = ("greater_than", "greater_than_equal"), ("less_than", "less_than_equal")


def parse_wire(model: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """``body`` as ``model``. Raises ApiError 400 for the first field that does not fit."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0]) from error


def _as_api_error(detail: ErrorDetails) -> ApiError:
    param = param_path(detail["loc"]) or None
    if detail["type"] == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return invalid(f"Invalid '{param}': {detail['msg']}.", param, _code(detail))


def _code(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _MIN_BOUNDS or kind in _MAX_BOUNDS:
        bound = next(value for key, value in detail["ctx"].items() if key in ("ge", "gt", "le", "lt"))
        number = "decimal" if isinstance(bound, float) else "integer"
        return f"{number}_{'below_min' if kind in _MIN_BOUNDS else 'above_max'}_value"
    if kind.endswith(("_type", "_attributes_type")):
        return "invalid_type"
    return _CODES.get(kind, "invalid_value")


def param_path(parts: tuple[int | str, ...]) -> str:
    """A field's path as OpenAI writes it: ``messages.[2].role``."""
    return ".".join(f"[{part}]" if isinstance(part, int) else part for part in parts)
