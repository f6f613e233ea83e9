"""Configuration: what is accepted, what is refused, and that a refusal says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from server.config import Config, load_config
from server.config_errors import ConfigError, dotted_keys

CONTRACT_KEYS = """
model.path model.revision model.dtype model.quantization model.trust engine.device engine.runner
engine.determinism engine.block_size engine.kv_cache_memory engine.max_model_len engine.max_num_seqs
engine.max_num_batched_tokens
engine.prefix_caching engine.num_threads engine.seed speculation.enabled speculation.drafters speculation.heads
speculation.max_draft_tokens speculation.coupling speculation.verifier server.host server.port server.admin_port
server.served_model_name server.api_keys_file server.max_waiting_tokens server.request_timeout server.drain_seconds
server.max_body_bytes server.cors_origins metrics.vllm_aliases
""".split()


def test_every_key_of_the_contract_exists() -> None:
    assert set(CONTRACT_KEYS) <= set(dotted_keys(Config))


def test_defaults_are_the_engines_own() -> None:
    assert load_config().to_engine_settings() == EngineSettings(ModelConfig(), EngineConfig(), SpeculationConfig())


def test_file_overrides_and_flags_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: {path: /models/a}\n"
        "engine: {kv_cache_memory: 2GiB, max_num_seqs: 4, seed: 7}\n"
        "server: {port: 1, max_waiting_tokens: 99, cors_origins: ['*']}\n"
        "metrics:\n  # vllm_aliases: true\n"
    )
    overrides = ["server.port=2", "engine.max_num_seqs=5", "engine.max_num_seqs=6"]
    config = load_config(file, overrides, {"server.port": 3, "server.host": None, "model.path": "/models/b"})
    assert config.server.port == 3
    assert config.server.host == "127.0.0.1"
    assert config.server.cors_origins == ("*",)
    settings = config.to_engine_settings()
    assert settings.model.path == "/models/b"
    assert settings.engine.kv_cache_memory == 2 * 2**30
    assert settings.engine.max_num_seqs == 6
    assert settings.engine.seed == 7
    assert settings.engine.max_waiting_tokens == 99
    assert config.metrics.vllm_aliases is False


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("512 MiB", 2**29), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert load_config(None, [f"engine.kv_cache_memory={text}"]).engine.kv_cache_memory == size


def test_a_flag_is_taken_as_it_is() -> None:
    assert load_config(None, (), {"model.path": "123"}).model.path == "123"


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        load_config().server.port = 1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("engine.block_siz=8", ["engine.block_siz", "unknown key", "engine.block_size"]),
        ("engine.max_waiting_tokens=8", ["unknown key", "did you mean server.max_waiting_tokens?"]),
        ("zebra=8", ["zebra: unknown key", "model, engine, speculation, server, metrics"]),
        ("engine.block_size=0", ["engine.block_size", "0", "greater than or equal to 1"]),
        ("engine.block_size=true", ["engine.block_size", "True", "valid integer"]),
        ("engine.device=gpu", ["engine.device", "'gpu'", "'auto', 'cpu' or 'cuda'"]),
        ("model.dtype=float64", ["model.dtype", "'float64'"]),
        ("engine.kv_cache_memory=2XB", ["engine.kv_cache_memory", "'2XB'", "GiB"]),
        ("engine=5", ["engine", "5", "mapping"]),
        ("engine.seed.x=5", ["engine.seed"]),
        ("server.port=70000", ["server.port", "70000", "65535"]),
        ("server.admin_port=8000", ["server", "8000", "another number"]),
        ("server.request_timeout=.nan", ["server.request_timeout", "finite"]),
        ("server.cors_origins=x", ["server.cors_origins", "'x'", "a list"]),
        ("model.quantization=int4", ["model.quantization", "'int4'", "'auto', 'none' or 'int8'"]),
        ("engine.determinism=always", ["engine.determinism", "'always'", "'default' or 'strict'"]),
        ("engine.runner=fast", ["engine.runner", "'fast'", "'auto', 'compiled' or 'transformers'"]),
        ("speculation.drafters=[suffix, poetry]", ["speculation.drafters", "unknown drafter", "poetry"]),
        ("speculation.drafters=[suffix, suffix]", ["speculation.drafters", "twice"]),
        ("speculation.drafters=[]", ["speculation", "empty"]),
        ("speculation.verifier=rejection", ["speculation", "cannot be coupled", "coupling: false"]),
        ("nonsense", ["--set", "KEY=VALUE"]),
        ("engine.seed=[", ["engine.seed", "not valid YAML", "line 1"]),
    ],
)
def test_a_refusal_is_one_line_with_key_and_remedy(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_rejection_without_coupling_is_accepted() -> None:
    config = load_config(None, ["speculation.verifier=rejection", "speculation.coupling=false"])
    assert config.to_engine_settings().speculation.verifier == "rejection"


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("model", "quantization", ("auto", "none", "int8")),
        ("engine", "determinism", ("default", "strict")),
        ("engine", "runner", ("auto", "compiled", "transformers")),
    ],
)
def test_how_steps_are_computed_reaches_the_engine(section: str, key: str, values: tuple[str, ...]) -> None:
    for value in values:
        settings = load_config(None, [f"{section}.{key}={value}"]).to_engine_settings()
        assert getattr(getattr(settings, section), key) == value


def test_no_drafter_is_accepted_when_speculation_is_off() -> None:
    assert load_config(None, ["speculation.drafters=[]", "speculation.enabled=false"]).speculation.drafters == ()


def test_several_faults_are_counted() -> None:
    with pytest.raises(ConfigError, match="and 1 more"):
        load_config(None, ["engine.block_size=0", "server.port=-1"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("engine: {", "not valid YAML at line"),
        ("- a\n- b\n", "a configuration is a mapping"),
        ("engine: {seed: 1}\nengine: {seed: 2}\n", "key 'engine' appears twice"),
        ("engine: {seed: 1, seed: 2}\n", "key 'seed' appears twice"),
        ("engine: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert "serve.yaml" in str(caught.value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(file)


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "configs" / "serve").glob("*.yaml")), ids=str)
def test_shipped_configurations_load(file: Path) -> None:
    load_config(file)


def test_the_default_file_says_every_default() -> None:
    file = Path(__file__).parents[2] / "configs" / "serve" / "default.yaml"
    assert load_config(file) == load_config()
    assert set(_dotted(yaml.safe_load(file.read_text()))) == set(dotted_keys(Config))


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
