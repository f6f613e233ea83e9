"""``config.json`` of heads: what is left out has a default, and what is wrong is named with its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.config import BaseModel, Calibration, HeadsConfig, MtpSizes, StreamSizes
from heads.errors import HeadsError

MINIMAL: dict[str, Any] = {
    "format": "headlong",
    "method": "medusa",
    "num_heads": 2,
    "hidden_size": 8,
    "vocab_size": 20,
    "draft_vocab": None,
    "base_model": {"name": "tiny", "digest": "d", "hidden": "final_norm"},
}


def read(folder: Path, text: str) -> HeadsConfig:
    (folder / "config.json").write_text(text)
    return HeadsConfig.read(folder)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    calibration = Calibration((0.25, 1.0), ((0.1, 0.9), (0.0, 1.0)))
    config = HeadsConfig(
        "medusa", 2, 8, 20, BaseModel("tiny", "d"), 3, "v.json", {"tokens": 1}, {"held-out": 1.5}, calibration, ((1,),)
    )
    assert read(tmp_path, config.to_json()) == config
    plain = HeadsConfig("medusa", 2, 8, 20, BaseModel("tiny", "d"))
    assert read(tmp_path, plain.to_json()) == plain
    sizes = MtpSizes("base", 48, 4, 2, 8, 1e-6)
    mtp = HeadsConfig("mtp", 5, 8, 20, BaseModel("tiny", "d"), mtp=sizes)
    assert read(tmp_path, mtp.to_json()) == mtp
    markov = HeadsConfig("markov", 5, 8, 20, BaseModel("tiny", "d"), rank=64)
    assert read(tmp_path, markov.to_json()) == markov
    streams = StreamSizes(3, 48, 4, 2, 8)
    streaming = HeadsConfig("streaming", 5, 8, 20, BaseModel("tiny", "d"), rank=32, streaming=streams)
    assert read(tmp_path, streaming.to_json()) == streaming


def test_query_heads_that_cannot_share_kv_heads_are_refused(tmp_path: Path) -> None:
    for heads in (1, 5):
        sizes = {"kv": "base", "intermediate": 48, "heads": heads, "kv_heads": 3, "head_dim": 8, "eps": 1e-6}
        with pytest.raises(HeadsError, match="heads must be a multiple of kv_heads"):
            read(tmp_path, json.dumps(MINIMAL | {"method": "mtp", "mtp": sizes}))


def test_keys_that_may_be_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(MINIMAL)) == HeadsConfig("medusa", 2, 8, 20, BaseModel("tiny", "d"))


def test_keys_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(MINIMAL | {"added_later": [1]})).num_heads == 2


@pytest.mark.parametrize("key", sorted(MINIMAL))
def test_keys_that_may_not(tmp_path: Path, key: str) -> None:
    left = {name: value for name, value in MINIMAL.items() if name != key}
    with pytest.raises(HeadsError, match=f"'{key}' is a required property"):
        read(tmp_path, json.dumps(left))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 2.0}, "num_heads: 2.0 is not of type 'integer'"),
        ({"num_heads": True}, "num_heads: True is not of type 'integer'"),
        ({"num_heads": 10**9}, "num_heads: 1000000000 is greater"),
        ({"num_layers": None}, "num_layers: None is not of type"),
        ({"hidden_size": "8"}, "hidden_size: '8' is not of type"),
        ({"vocab_size": -1}, "vocab_size: -1 is less"),
        ({"method": 5}, "method: 5 is not of type"),
        ({"draft_vocab": [1, 2]}, "draft_vocab: .* is not of type"),
        ({"base_model": {"name": "tiny"}}, "base_model: 'digest' is a required property"),
        ({"base_model": "tiny"}, "base_model: 'tiny' is not of type 'object'"),
        ({"baseline": {"held-out": "high"}}, "baseline/held-out: 'high' is not of type 'number'"),
        ({"baseline": {"held-out": 0.5}}, "baseline/held-out: 0.5 is less"),
        ({"baseline": {"held-out": float("nan")}}, "is not JSON: NaN is no number"),
        ({"calibration": {"edges": [1.0], "rates": [[0.5], [float("inf")]]}}, "is not JSON: Infinity is no number"),
        ({"calibration": {"edges": [1.0], "rates": [[0.5]]}}, "calibration must hold, for each head"),
        ({"calibration": {"edges": [0.9], "rates": [[0.5], [0.5]]}}, "ascending edges up to 1"),
        ({"calibration": {"edges": [0.5, 0.5, 1], "rates": [[0.5] * 3] * 2}}, "ascending edges up to 1"),
        ({"calibration": {"edges": [], "rates": [[], []]}}, "ascending edges up to 1"),
        ({"self_test": [[]]}, "self_test/0"),
        ({"self_test": [[1], [2.0]]}, "self_test/1/0: 2.0 is not of type 'integer'"),
        ({"self_test": [[1], [20]]}, "self_test must hold token ids below 20"),
    ],
)
def test_wrong_values_are_named_in_one_line(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(HeadsError, match=reason) as refused:
        read(tmp_path, json.dumps(MINIMAL | changes))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadsError, match="is not JSON"):
        HeadsConfig.read(tmp_path)
