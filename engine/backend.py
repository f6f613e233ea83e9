"""How steps of a loaded model are computed: by the compiled step where it can be had, else by transformers' modules.

Chosen once, before anything is allocated for serving. Both know the model's own logits on a few tokens, computed by
transformers' eager attention while the plain weights are still there, so what is served is checked against them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.cache import LayerShape, PagedKV
from engine.attention.check import eager_logits, layer_shapes, require_equal
from engine.compiled.build import CompiledStepError, build_library
from engine.compiled.heads import CompiledHeadCompute
from engine.compiled.library import Library, Team
from engine.compiled.runner import CompiledRunner
from engine.compiled.weights import PackedWeights, pack_weights, why_unsupported
from engine.config import EngineConfig, Quantization
from engine.device import device_name
from engine.errors import ModelLoadError
from engine.linear import pack_linears
from engine.loading import LoadedModel
from engine.loading.checks import first_line
from engine.model_runner import ModelRunner, TransformersRunner
from engine.sampler.sample import Draw, gumbel_argmax
from engine.spec_decode.candidates import HeadCompute, PlainHeadCompute

log = logging.getLogger("headlong.engine")

# Near-ties below these margins (in temperature-scaled logits) may flip when a row is computed among more rows.
_MARGIN_BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
# Largest difference from eager attention allowed, as a share of the largest logit. Norms run in fp32 at best.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_INT8_TOLERANCE = 0.3  # rounding of weights and inputs; garbage differs by more than 1
_LONGEST_TABLE = 1 << 17
_BEHIND = 512  # positions no text reaches, but the bench's short contexts and a drafter's rows beside the tree do


@dataclass(frozen=True, slots=True)
class RunnerNeeds:
    """num_slots: KV entries. block_size: tokens a block. needs_hidden, hidden_layers: states that somebody reads.
    passes: requests that an MTP module may draft for at once."""

    num_slots: int
    block_size: int
    needs_hidden: bool = False
    hidden_layers: Sequence[int] = ()
    passes: int = 0


class Backend(Protocol):
    """A loaded model and the way its steps are computed.

    shapes: what each layer stores for a token. name: "compiled" or "transformers". quantization: of the weights that
    compute. deterministic: a row's logits are the same bits in every batch. margin_bound: tokens with a smaller margin
    may differ between batches; 0 where none may. draw: how sampled rows are drawn; the tokens do not depend on it.
    head_compute: what draft heads are computed with. fingerprint: all but the model that a step's time depends on.
    """

    loaded: LoadedModel
    shapes: list[LayerShape]
    name: str
    quantization: Quantization
    deterministic: bool
    margin_bound: float
    draw: Draw
    head_compute: HeadCompute
    fingerprint: str

    def make_runner(self, needs: RunnerNeeds) -> ModelRunner:
        """A runner with a KV cache of its own. Raises ModelLoadError if there is no memory for it."""
        ...

    def check(self, logits: torch.Tensor) -> None:
        """Raises ModelLoadError unless ``logits``, a runner's on the check's tokens, are the model's own."""
        ...


class TransformersBackend:
    """transformers' modules, with linear layers packed for the CPU's matrix kernels where that is possible."""

    name = "transformers"
    quantization: Quantization = "none"
    deterministic = False
    draw: Draw = staticmethod(gumbel_argmax)

    def __init__(self, loaded: LoadedModel, *, packs: bool = True) -> None:
        """Raises ModelLoadError for a model whose attention cannot be served."""
        self.loaded = loaded
        self.shapes = layer_shapes(loaded.model)
        self.head_compute: HeadCompute = PlainHeadCompute()
        device, threads = loaded.model.device, torch.get_num_threads()
        self.fingerprint = f"{self.name} {loaded.model.dtype} {torch.__version__} {device_name(device)} {threads}"
        self._expected = eager_logits(loaded.model)
        self.margin_bound = _MARGIN_BOUNDS[loaded.model.dtype]
        if packs and loaded.model.device.type == "cpu":
            pack_linears(loaded.model)

    def make_runner(self, needs: RunnerNeeds) -> ModelRunner:
        parameter = next(self.loaded.model.parameters())
        cache = PagedKV(self.shapes, needs.num_slots, dtype=parameter.dtype, device=parameter.device)
        return TransformersRunner(
            self.loaded.model,
            cache,
            needs.block_size,
            needs_hidden=needs.needs_hidden,
            hidden_layers=needs.hidden_layers,
        )

    def check(self, logits: torch.Tensor) -> None:
        require_equal(self.loaded.architecture, self._expected, logits, _TOLERANCE[self._expected.dtype])


class CompiledBackend:
    """The compiled step. ``loaded.model`` keeps its embedding and its configuration; it cannot run any more."""

    name = "compiled"
    deterministic = True
    margin_bound = 0.0

    def __init__(self, loaded: LoadedModel, library: Library, quantization: Quantization) -> None:
        """quantization: "int8" or "none". Raises ModelLoadError for a model whose attention cannot be served."""
        positions = min(loaded.max_position_embeddings or _LONGEST_TABLE, _LONGEST_TABLE)
        # No request may be longer than the table of rotations.
        self.loaded = dataclasses.replace(loaded, max_position_embeddings=positions)
        self.quantization: Quantization = quantization
        self._library = library
        self.fingerprint = (
            f"{self.name} {quantization} {library.key} {library.kernels} "
            f"{device_name(loaded.model.device)} {torch.get_num_threads()}"
        )
        self.shapes = layer_shapes(loaded.model)
        self._expected = eager_logits(loaded.model)
        try:
            team = Team(library, torch.get_num_threads())
            self._weights: PackedWeights = pack_weights(
                loaded.model,
                library,
                is_int8=quantization == "int8",
                positions=positions + _BEHIND,
            )
        except MemoryError as error:
            raise ModelLoadError(f"there is not enough memory to pack the weights of {loaded.name}") from error
        self.draw: Draw = team.gumbel_argmax
        self.head_compute: HeadCompute = CompiledHeadCompute(team, is_int8=quantization == "int8")

    def make_runner(self, needs: RunnerNeeds) -> ModelRunner:
        return CompiledRunner(
            self._library,
            self._weights,
            num_slots=needs.num_slots,
            block_size=needs.block_size,
            threads=torch.get_num_threads(),
            needs_hidden=needs.needs_hidden,
            hidden_layers=needs.hidden_layers,
            passes=needs.passes,
        )

    def check(self, logits: torch.Tensor) -> None:
        tolerance = _INT8_TOLERANCE if self.quantization == "int8" else _TOLERANCE[torch.float32]
        require_equal(self.loaded.architecture, self._expected, logits, tolerance)


@contextmanager
def refusing(loaded: LoadedModel) -> Iterator[None]:
    """An architecture that fails in a way of its own is refused in one sentence, like the ones we know."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelLoadError(f"{loaded.architecture} cannot be served: its forward pass failed ({reason})") from error


def choose_backend(
    loaded: LoadedModel, quantization: Quantization, config: EngineConfig, progress: Callable[[str], None]
) -> Backend:
    """The compiled step unless the configuration or the machine rules it out; the log says which and why.

    quantization "auto" is int8 for weights that come from a quantised file and "none" for others. The model's plain
    weights are gone afterwards. Raises ModelLoadError for a configuration that cannot be had here.
    """
    library = _library(loaded, config, progress)
    if isinstance(library, str):
        _require_no_compiled_step(quantization, config, library)
        log.info("steps are computed by transformers' modules: %s", library)
        with refusing(loaded):
            return TransformersBackend(loaded)
    if quantization == "auto":
        quantization = "int8" if loaded.is_quantized else "none"
    weights = "int8" if quantization == "int8" else "float32"
    progress(f"Packing the weights ({weights})")
    with refusing(loaded):
        backend = CompiledBackend(loaded, library, quantization)
    log.info("steps are computed by the compiled step: %s kernels, %s weights", library.kernels, weights)
    return backend


def _library(loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None]) -> Library | str:
    """The compiled step, or why it is not used."""
    if config.runner == "transformers":
        return "engine.runner says so"
    reason = why_unsupported(loaded.model, config.block_size)
    if reason is not None:
        return f"the compiled step cannot be used: {reason}"
    try:
        return Library(build_library(progress))
    except CompiledStepError as error:
        return str(error)


def _require_no_compiled_step(quantization: Quantization, config: EngineConfig, reason: str) -> None:
    for key, is_wanted in (
        ("engine.runner compiled", config.runner == "compiled"),
        ("model.quantization int8", quantization == "int8"),
        ("engine.determinism strict", config.determinism == "strict"),
    ):
        if is_wanted:
            raise ModelLoadError(f"{key} needs the compiled step, which cannot be had: {reason}")
