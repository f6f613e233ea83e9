"""The configuration: one YAML file and ``--set`` overrides, checked whole, frozen after load.

Unknown keys are refused. The engine's own defaults come from ``engine.config``, which holds them once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from server.config_errors import ConfigError, explain, suggestion

_MODEL = ModelConfig()
_ENGINE = EngineConfig()
_SPECULATION = SpeculationConfig()
_AVAILABLE_DRAFTERS = ("suffix", "medusa", "markov", "mtp", "streaming", "eagle")
Settings = TypeVar("Settings", bound=BaseModel)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(unit for unit in _UNITS if unit)}|)")


def parse_size(value: object) -> object:
    """Bytes of a size such as ``"2GiB"``; anything but text passes through to be checked as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size: give bytes, or a number with one of {', '.join(list(_UNITS)[1:])}")
    return int(float(match[1]) * _UNITS[match[2]])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Strict types, unknown keys refused, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSection(Section):
    """``model``: which weights to serve (``engine.config.ModelConfig``)."""

    path: Name = _MODEL.path
    revision: str | None = _MODEL.revision
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8"] = _MODEL.quantization
    trust: bool = _MODEL.trust


class EngineSection(Section):
    """``engine``: sizes and limits (``engine.config.EngineConfig``); null means chosen at load."""

    device: Literal["auto", "cpu", "cuda"] = _ENGINE.device
    runner: Literal["auto", "compiled", "transformers"] = _ENGINE.runner
    determinism: Literal["default", "strict"] = _ENGINE.determinism
    block_size: Annotated[int, Field(ge=1, le=1024)] = _ENGINE.block_size
    kv_cache_memory: Size | None = _ENGINE.kv_cache_memory
    max_model_len: Count | None = _ENGINE.max_model_len
    max_num_seqs: Count = _ENGINE.max_num_seqs
    max_num_batched_tokens: Count | None = _ENGINE.max_num_batched_tokens
    prefix_caching: bool = _ENGINE.prefix_caching
    num_threads: Count | None = _ENGINE.num_threads
    seed: int | None = _ENGINE.seed


class SpeculationSection(Section):
    """``speculation``: which drafters run and how drafts are verified (``engine.config.SpeculationConfig``)."""

    enabled: bool = _SPECULATION.enabled
    drafters: Texts | None = _SPECULATION.drafters
    heads: str | None = _SPECULATION.heads
    max_draft_tokens: Annotated[int, Field(ge=1, le=256)] = _SPECULATION.max_draft_tokens
    coupling: bool = _SPECULATION.coupling
    verifier: Literal["match", "rejection"] = _SPECULATION.verifier

    @field_validator("drafters")
    @classmethod
    def _known_drafters(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if name not in _AVAILABLE_DRAFTERS:
                raise ValueError(f"unknown drafter {name!r}; allowed: {', '.join(_AVAILABLE_DRAFTERS)}")
        if value is not None and len(set(value)) != len(value):
            raise ValueError("a drafter is named twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.enabled and self.drafters == ():
            raise ValueError("drafters is empty: name one, leave it out (null), or set enabled: false")
        if self.verifier == "rejection" and self.coupling:
            raise ValueError("verifier: rejection draws its own noise and cannot be coupled; set coupling: false")
        return self


class LimitsSection(Section):
    """``server.limits``: the most of each that one request may carry."""

    max_n: Count = 16
    max_messages: Count = 2048
    max_stop: Count = 64
    max_logit_bias: Count = 1024
    max_bad_words: Count = 256
    max_prompts: Count = 64


class ServerSection(Section):
    """``server``: addresses, names, keys and deadlines. Times are in seconds.

    admin_port: /metrics, /health and /ready are there, without keys; /metrics then leaves the API port.
    max_waiting_tokens: prompt tokens queued and not yet computed before a request is answered 429.
    request_timeout: from arrival to the last token; null is no limit.
    header_seconds, body_seconds: from a request's first byte to the end of its headers; from there to the end of
        its body. ping_seconds: silence on a stream before a comment line.
    watchdog_seconds: an engine that gave no sign of life for so long is reported as hung.
    """

    host: Name = "127.0.0.1"
    port: Port = 8000
    admin_port: Port | None = None
    served_model_name: Name | None = None
    api_keys_file: str | None = None
    max_waiting_tokens: Count = _ENGINE.max_waiting_tokens
    request_timeout: Seconds | None = 1800.0
    drain_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    max_body_bytes: Size = 16 * 2**20
    cors_origins: Texts = ()
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 60.0
    ping_seconds: Seconds = 15.0
    watchdog_seconds: Seconds = 120.0
    limits: LimitsSection = LimitsSection()

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.admin_port is not None and self.admin_port == self.port != 0:
            raise ValueError(f"admin_port and port are both {self.port}; give the admin port another number")
        return self


class MetricsSection(Section):
    """``metrics``. vllm_aliases: the same series also under vLLM's names."""

    vllm_aliases: bool = False


class Config(Section):
    """Everything a server process is told."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    speculation: SpeculationSection = SpeculationSection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()

    def to_engine_settings(self) -> EngineSettings:
        """The engine's share, with sizes in bytes."""
        return EngineSettings(
            model=ModelConfig(**dict(self.model)),
            engine=EngineConfig(**dict(self.engine), max_waiting_tokens=self.server.max_waiting_tokens),
            speculation=SpeculationConfig(**dict(self.speculation)),
        )


def load_config(
    file: Path | None = None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> Config:
    """A server's configuration; ``load_settings`` tells how it is read."""
    return load_settings(Config, file, overrides, flags)


def load_settings(
    schema: type[Settings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of ``file``, over it the ``KEY=VALUE`` overrides, over these the command line's own flags.

    overrides: dotted keys, values in YAML. flags: dotted key to value as it is; None is "not given".
    Raises ConfigError: one line that names the key, the value and what is allowed.
    """
    tree = {} if file is None else _read(file, schema)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r} is not KEY=VALUE, e.g. --set engine.max_num_seqs=8")
        _place(tree, key.strip(), _parse(text, f"--set {key}"), schema)
    for key, value in (flags or {}).items():
        if value is not None:
            _place(tree, key, value, schema)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, schema)) from None


def _read(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read the configuration file {file}: {reason}") from None
    tree = _parse(text, str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a configuration is a mapping with the keys {', '.join(schema.model_fields)}")
    # A section whose every line is commented out reads as null: it is empty, not wrong.
    return {key: value for key, value in tree.items() if value is not None or key not in schema.model_fields}


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; a section written twice would lose half of itself in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}: not valid YAML{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _place(tree: dict[str, Any], dotted: str, value: object, schema: type[BaseModel]) -> None:
    *sections, name = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {section} is not a section{suggestion(dotted, schema)}")
    tree[name] = value
