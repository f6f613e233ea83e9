"""The loaded library: which kernels there are, that they agree, and what happens when memory or threads run out."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled_models import BLOCK, FAMILIES, KERNELS, Bench, Part, assert_close, eager, library, packed, random_model

from compiled_models import random_tree, text, tree_logits  # isort: skip
from torch import nn

from engine.compiled.build import CompiledStepError, build_library
from engine.compiled.heads import CompiledLinear
from engine.compiled.library import Library, Team
from engine.compiled.runner import CompiledRunner
from engine.errors import ModelLoadError


def test_without_a_name_the_best_kernels_are_taken() -> None:
    path = build_library(lambda _: None)
    found = []
    for name in reversed(KERNELS):
        with contextlib.suppress(CompiledStepError):
            found.append(Library(path, name).kernels)
    assert Library(path).kernels == found[0]
    assert found[-1] == "baseline"


def test_kernels_that_this_cpu_lacks_are_said() -> None:
    with pytest.raises(CompiledStepError, match="this CPU has no sse9 kernels"):
        Library(build_library(lambda _: None), "sse9")


def test_a_file_that_is_no_library_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "libheadlong.so"
    with pytest.raises(CompiledStepError, match="cannot be loaded"):
        Library(broken)
    broken.write_text("not a library")
    with pytest.raises(CompiledStepError, match=f"{broken} cannot be loaded"):
        Library(broken)


def test_a_library_that_is_not_ours_is_said() -> None:
    other = importlib.util.find_spec("_ctypes")
    assert other is not None
    assert other.origin is not None
    with pytest.raises(CompiledStepError, match=r"has no headlong_\w+: it is damaged"):
        Library(Path(other.origin))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_instruction_set_computes_the_same(kernels: str, family: str, is_int8: bool) -> None:
    """As eager attention does where the weights are float, else as the plainest kernels do."""
    heads = {"head_dim": 64, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = random_model(family, **(heads if family == "llama" else {}))
    tokens, tree = text(75), random_tree(11, seed=4)

    def rows(name: str) -> torch.Tensor:
        bench = Bench(packed(model, is_int8=is_int8, kernels=name), kernels=name)
        request = bench.request(tokens)
        start = bench.logits(Part(request, 0, 37))[0]
        return torch.cat([start, bench.logits(Part(request, 37, 75, tree))[0]])

    if is_int8:
        # A last bit of difference can move an input to the next whole number.
        assert_close(rows(kernels), rows("baseline"), 2e-3)
    else:
        assert_close(rows(kernels), torch.cat([eager(model, tokens), tree_logits(model, tokens, tree)]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_int8_products_are_the_same_bits_on_every_instruction_set(kernels: str) -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(576, 77), torch.randn(11, 576)
    found, plain = (
        CompiledLinear(copy.deepcopy(linear), Team(library(name), 1), True)(x) for name in (kernels, "baseline")
    )
    assert torch.equal(found, plain)


@contextlib.contextmanager
def spare_memory(size: int) -> Iterator[None]:
    """Within, the process may grow by ``size`` bytes of addresses and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_step_without_memory_raises_and_the_next_one_is_right() -> None:
    """The inner width is large, so that what fails is the step's own scratch."""
    model = random_model("llama", intermediate_size=1 << 15, num_hidden_layers=1)
    tokens = text(600)
    bench = Bench(packed(model, positions=1024))
    large, small = bench.request(tokens, room=0), bench.request(tokens[:40])
    expected = bench.logits(Part(small, 0, 40))[0]
    with spare_memory(32 << 20), pytest.raises(MemoryError, match="no memory for a step"):
        bench.forward(Part(large, 0, 600))
    assert torch.equal(bench.logits(Part(small, 0, 40))[0], expected)
    assert_close(bench.logits(Part(large, 0, 600))[0][:40], expected)


def test_threads_that_cannot_be_had_are_one_sentence() -> None:
    """Those that started before are gone again, and the process lives."""
    weights = packed(random_model("llama"))
    with spare_memory(64 << 20), pytest.raises(ModelLoadError, match="no memory and threads for the compiled step"):
        CompiledRunner(library(), weights, num_slots=2 * BLOCK, block_size=BLOCK, threads=512)
    with spare_memory(64 << 20), pytest.raises(MemoryError):
        Team(library(), 512)


def test_threads_end_with_their_runner() -> None:
    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    weights = packed(random_model("llama"))
    before = threads()  # of which some may be ending
    bench = Bench(weights, threads=4)
    assert len(threads() - before) == 3
    request = bench.request(text(20))
    bench.prefill(request)
    del bench
    for _ in range(100):  # a thread that was joined is listed for a moment more
        if threads() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(f"threads are left: {threads() - before}")
