"""What a folder of heads says of itself: ``config.json``, in our own format or in that of the Medusa project."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import jsonschema
from jsonschema.validators import extend

from heads.eagle import DEPTHS, METHOD, SCHEMA, EagleConfig, is_eagle, parse_eagle, verifier_name
from heads.errors import HeadsError
from heads.settings import KvSource

Format = Literal["headlong", "medusa", "eagle3", "checkpoint"]
FORMAT: Format = "headlong"
PUBLIC_MEDUSA: Format = "medusa"  # ``heads.formats`` reads its weights
PUBLIC_EAGLE: Format = "eagle3"  # ``heads.eagle`` reads the rest of its configuration
CHECKPOINT_MTP: Format = "checkpoint"  # a module that has no folder of its own: it lies in its model's
HIDDEN = "final_norm"  # the state after the last norm, what lm_head reads
CONFIG_FILE = "config.json"
HELD_OUT = "held-out"  # the baseline measured on prompts that training did not see

_COUNT = {"type": "integer", "minimum": 1, "maximum": 1 << 24}
MAX_HEADS = 64
MAX_RANK = 4096
_FEW = {"type": "integer", "minimum": 1, "maximum": MAX_HEADS}
_RATES = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["format", "method", "num_heads", "hidden_size", "vocab_size", "draft_vocab", "base_model"],
    "properties": {
        "format": {"const": FORMAT},
        "method": {"type": "string"},
        "num_heads": _FEW,
        "num_layers": _FEW,
        "hidden_size": _COUNT,
        "vocab_size": _COUNT,
        "rank": {**_COUNT, "maximum": MAX_RANK},
        "mtp": {
            "type": "object",
            "required": ["kv", "intermediate", "heads", "kv_heads", "head_dim", "eps"],
            "properties": {
                "kv": {"enum": ["base", "own"]},
                "intermediate": _COUNT,
                "heads": _COUNT,
                "kv_heads": _COUNT,
                "head_dim": {**_COUNT, "multipleOf": 2},
                "eps": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            },
        },
        "streaming": {
            "type": "object",
            "required": ["layers", "intermediate", "heads", "kv_heads", "head_dim"],
            "properties": {
                "layers": _FEW,
                "intermediate": _COUNT,
                "heads": _COUNT,
                "kv_heads": _COUNT,
                "head_dim": {**_COUNT, "multipleOf": 2},
            },
        },
        "draft_vocab": {"type": ["string", "null"], "pattern": "^[^/\\\\]+$"},
        "base_model": {
            "type": "object",
            "required": ["name", "digest", "hidden"],
            "properties": {"name": {"type": "string"}, "digest": {"type": "string"}, "hidden": {"const": HIDDEN}},
        },
        "trained": {"type": "object"},
        "baseline": {"type": "object", "additionalProperties": {"type": "number", "minimum": 1, "maximum": 1000}},
        "calibration": {
            "type": "object",
            "required": ["edges", "rates"],
            "properties": {"edges": _RATES, "rates": {"type": "array", "items": _RATES}},
        },
        "self_test": {
            "type": "array",
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    },
}
_MEDUSA_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "medusa_num_heads": _FEW,
        "medusa_num_layers": _FEW,
        "base_model_name_or_path": {"type": ["string", "null"]},
        "hidden_size": _COUNT,
        "vocab_size": _COUNT,
    },
}
_UNNAMED = "an unnamed model"
_DRAFT = jsonschema.Draft202012Validator
# JSON Schema takes 2.0 for an integer; a number of heads or a token id that is a float would fail later.
_INTEGERS = _DRAFT.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
_VALIDATOR = extend(_DRAFT, type_checker=_INTEGERS)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that heads belong to. digest: of its weights (``engine.loading.LoadedModel.digest``); empty in a format
    that does not hold it."""

    name: str
    digest: str


# Upper edges of the confidence buckets that new heads are calibrated in, and heads without a calibration start from.
CONFIDENCE_EDGES = (0.005, 0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How often a candidate of some confidence was right on held-out answers.

    edges: upper edges of the confidence buckets, the last one 1. rates[k]: of head k + 1, one a bucket, counted where
    the heads before it were right.
    """

    edges: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class MtpSizes:
    """Of an MTP module's block. kv: whose keys and values it reads of the committed text, "base" the last layer's of
    the base model, whose kv_heads and head_dim they then are. eps: of the norms."""

    kv: KvSource
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """Of streams. layers: how many of the base model's uppermost layers they run through; the rest are those layers'
    own sizes."""

    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """``config.json`` of a folder of heads. Head k (from 1) at position t predicts token t + 1 + k; an MTP module's
    depths and streams count as heads.

    mtp: of MTP modules alone. rank: of Markov heads' bias, or of what streams change weights by. streaming: of streams
    alone. num_layers: of Medusa and Markov heads; without meaning for
    an MTP module, which has one block.

    baseline: acceptance length by domain, as measured after training. self_test: prompts (token ids) on which a server
    tries the heads at load.

    format: "medusa" for a public checkpoint. Its config.json alone leaves hidden_size and vocab_size 0, unknown, and
    may be wrong about num_heads: ``load_heads`` knows. vocab_size stays 0 where the heads share the model's lm_head.
    "eagle3" for a public EAGLE-3 module, whose sizes ``engine.loading.eagle`` knows; eagle: of those alone.
    """

    method: str
    num_heads: int
    hidden_size: int
    vocab_size: int
    base_model: BaseModel
    num_layers: int = 1
    draft_vocab: str | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    self_test: tuple[tuple[int, ...], ...] = ()
    mtp: MtpSizes | None = None
    rank: int | None = None
    eagle: EagleConfig | None = None
    streaming: StreamSizes | None = None
    format: Format = FORMAT

    def to_json(self) -> str:
        fields = asdict(self)
        base = {**fields.pop("base_model"), "hidden": HIDDEN}
        for name in ("calibration", "mtp", "rank", "eagle", "streaming"):
            if fields[name] is None:
                del fields[name]
        return json.dumps({**fields, "base_model": base}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> HeadsConfig:
        """Raises HeadsError if there is no such file or it does not describe heads."""
        path = folder / CONFIG_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
            kind, schema = _kind(raw)
            _VALIDATOR(schema).validate(raw)
        except OSError as error:
            raise HeadsError(
                f"{folder} is not a folder of heads: {path.name} cannot be read ({error.strerror})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise HeadsError(f"{path} is not JSON: {error}") from error
        except jsonschema.ValidationError as error:
            where = "/".join(map(str, error.absolute_path)) or "the file"
            raise HeadsError(f"{path} does not describe {kind}: {where}: {error.message}") from error
        if schema is _MEDUSA_SCHEMA:
            return cls._of_public(raw)
        if schema is SCHEMA:
            return cls._of_eagle(raw)
        calibration = raw.get("calibration")
        if calibration is not None and not _is_whole(calibration, raw["num_heads"]):
            raise HeadsError(
                f"{path}: calibration must hold, for each head, one rate a bucket of ascending edges up to 1"
            )
        if "mtp" in raw and raw["mtp"]["heads"] % raw["mtp"]["kv_heads"]:
            raise HeadsError(f"{path}: mtp: heads must be a multiple of kv_heads, which they share")
        if any(token >= raw["vocab_size"] for prompt in raw.get("self_test", ()) for token in prompt):
            raise HeadsError(f"{path}: self_test must hold token ids below {raw['vocab_size']}")
        return cls._of_own(raw)

    @classmethod
    def _of_public(cls, raw: Mapping[str, Any]) -> HeadsConfig:
        # The name is a hub id or a path on the machine of whoever trained the heads.
        parts = [part for part in re.split(r"[/\\]", raw.get("base_model_name_or_path") or "") if part]
        return cls(
            method="medusa",
            num_heads=raw["medusa_num_heads"],
            num_layers=raw.get("medusa_num_layers", 1),
            hidden_size=raw.get("hidden_size", 0),
            vocab_size=raw.get("vocab_size", 0),
            base_model=BaseModel(parts[-1] if parts else _UNNAMED, ""),
            format=PUBLIC_MEDUSA,
        )

    @classmethod
    def _of_eagle(cls, raw: Mapping[str, Any]) -> HeadsConfig:
        return cls(
            method=METHOD,
            num_heads=DEPTHS,
            hidden_size=0,
            vocab_size=0,
            base_model=BaseModel(verifier_name(raw) or _UNNAMED, ""),
            eagle=parse_eagle(raw),
            format=PUBLIC_EAGLE,
        )

    @classmethod
    def _of_own(cls, raw: Mapping[str, Any]) -> HeadsConfig:
        calibration = raw.get("calibration")
        return cls(
            method=raw["method"],
            num_heads=raw["num_heads"],
            hidden_size=raw["hidden_size"],
            vocab_size=raw["vocab_size"],
            base_model=BaseModel(raw["base_model"]["name"], raw["base_model"]["digest"]),
            num_layers=raw.get("num_layers", 1),
            mtp=MtpSizes(**{name: raw["mtp"][name] for name in MtpSizes.__slots__}) if "mtp" in raw else None,
            rank=raw.get("rank"),
            streaming=_sizes(raw["streaming"]) if "streaming" in raw else None,
            draft_vocab=raw["draft_vocab"],
            trained=raw.get("trained", {}),
            baseline=raw.get("baseline", {}),
            calibration=None if calibration is None else _calibration(calibration),
            self_test=tuple(tuple(prompt) for prompt in raw.get("self_test", ())),
        )


def _kind(raw: Any) -> tuple[str, dict[str, Any]]:
    """What a configuration claims to describe, in words, and what it then has to be."""
    if isinstance(raw, dict) and "format" not in raw and "medusa_num_heads" in raw:
        return "Medusa heads", _MEDUSA_SCHEMA
    return ("an EAGLE-3 module", SCHEMA) if is_eagle(raw) else ("headlong's heads", _SCHEMA)


def _is_whole(raw: Mapping[str, Any], num_heads: int) -> bool:
    edges, rates = raw["edges"], raw["rates"]
    shaped = len(rates) == num_heads and all(len(row) == len(edges) for row in rates)
    return bool(shaped and edges and edges == sorted(set(edges)) and edges[-1] == 1)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _sizes(raw: Mapping[str, Any]) -> StreamSizes:
    return StreamSizes(**{name: raw[name] for name in StreamSizes.__slots__})


def _calibration(raw: Mapping[str, Any]) -> Calibration:
    return Calibration(tuple(raw["edges"]), tuple(tuple(rates) for rates in raw["rates"]))
