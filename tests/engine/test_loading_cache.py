import errno
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelLoadError
from engine.loading import cache, digest
from engine.loading.cache import build_once, cache_root, is_complete, require_space
from engine.loading.digest import joined_digest, weights_digest

Progress = Callable[[str], None]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headlong"


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    with (folder.parent / "builds").open("a") as log:
        log.write("x")


def silent(line: str) -> None:
    pass


def test_root_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert cache_root() == Path.home() / ".cache" / "headlong"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "headlong"


def test_built_once(root: Path) -> None:
    for _ in range(2):
        folder = build_once("abc", write_model, silent)
        assert folder == root / "abc"
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (root / "builds").read_text() == "x"
    assert not (root / "abc.partial").exists()


def test_half_written_folders_are_replaced(root: Path) -> None:
    (root / "abc.partial").mkdir(parents=True)
    (root / "abc.partial" / "rubbish").write_text("")
    (root / "abc").mkdir()
    folder = build_once("abc", write_model, silent)
    assert not (folder / "rubbish").exists()
    (folder / "model.safetensors").write_bytes(b"cut")
    assert not is_complete(folder)
    assert (build_once("abc", write_model, silent) / "model.safetensors").read_bytes() == b"weights"


def test_a_failed_build_leaves_nothing(root: Path) -> None:
    def fail(folder: Path) -> None:
        write_model(folder)
        raise ModelLoadError("no")

    with pytest.raises(ModelLoadError, match="no"):
        build_once("abc", fail, silent)
    assert not (root / "abc").exists()
    assert not (root / "abc.partial").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk(error: Exception) -> None:
    def fill(folder: Path) -> None:
        raise error

    with pytest.raises(ModelLoadError, match="The disk is full"):
        build_once("abc", fill, silent)


def test_unwritable_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ModelLoadError, match=r"cannot be written \(Permission denied\); set XDG_CACHE_HOME"):
            build_once("abc", write_model, silent)
    build_once("abc", write_model, silent)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build_once("abc", write_model, silent) == root / "abc"  # a finished folder needs no writing


def test_cache_home_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="not a folder"):
        build_once("abc", write_model, silent)


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1 << 30))
    require_space(tmp_path, 1 << 30, "It")
    with pytest.raises(ModelLoadError, match=r"It needs 2\.00 GiB in .*, where 1\.00 GiB are free"):
        require_space(tmp_path, 2 << 30, "It")


def slow_write(folder: Path) -> None:
    time.sleep(0.5)
    write_model(folder)


def build_in_child(lines: "multiprocessing.Queue[str]") -> None:
    folder = build_once("abc", slow_write, lines.put)
    lines.put((folder / "model.safetensors").read_text())


def test_two_processes_build_once_between_them(root: Path) -> None:
    context = multiprocessing.get_context("spawn")
    lines: multiprocessing.Queue[str] = context.Queue()
    started = [context.Process(target=build_in_child, args=(lines,)) for _ in range(2)]
    for process in started:
        process.start()
    told = [lines.get(timeout=60), lines.get(timeout=60)]
    told += [lines.get(timeout=60)] if any("waiting" in line for line in told) else []
    for process in started:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert [line for line in told if "waiting" not in line] == ["weights", "weights"]
    assert (root / "builds").read_text() == "x"


def test_digest_is_that_of_the_joined_parts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab")
    (tmp_path / "b").write_bytes(b"c")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert joined_digest([tmp_path / "a", tmp_path / "b"], silent) == abc


def test_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = joined_digest([file], silent)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "_hash", lambda parts: "hashed again")
        assert joined_digest([file], silent) == first
        file.write_bytes(b"two")
        os.utime(file, ns=(1, 1))
        assert joined_digest([file], silent) == "hashed again"
    file.write_bytes(b"three")
    assert joined_digest([file], silent) not in (first, "hashed again")


def test_a_digest_that_cannot_be_remembered_is_logged(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.parent.mkdir()
    root.write_text("in the way")
    (tmp_path / "file").write_bytes(b"x")
    caplog.set_level(logging.INFO)
    assert len(joined_digest([tmp_path / "file"], silent)) == 64
    assert "hashed anew" in caplog.text


def test_weights_digest_depends_on_names_and_every_byte(tmp_path: Path) -> None:
    one, two = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    one.write_bytes(b"a" * 1000)
    two.write_bytes(b"b" * 1000)
    first = weights_digest([one, two], silent)
    assert weights_digest([two, one], silent) == first
    content = bytearray(b"b" * 1000)
    content[500] = 0
    two.write_bytes(content)
    assert weights_digest([one, two], silent) != first
    two.write_bytes(b"b" * 1000)
    assert weights_digest([one, two], silent) == first
    assert weights_digest([one, two.rename(tmp_path / "model-3.safetensors")], silent) != first


def test_hub_blobs_are_known_by_their_name(tmp_path: Path) -> None:
    content = b"weights"
    plain = tmp_path / "model.safetensors"
    plain.write_bytes(content)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / joined_digest([plain], silent)
    blob.write_bytes(content)
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to(blob)
    assert weights_digest([link], silent) == weights_digest([plain], silent)
