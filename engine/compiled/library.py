"""The C interface of the compiled step (``source/*.cpp``, ``kernels.h``), as ctypes sees it.

ctypes lets go of the interpreter lock during each call, so the event loop runs while a step does.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.compiled.build import CompiledStepError
from engine.sampler.noise import NoiseKey

Ints = npt.NDArray[np.int64]

TILE = 16  # tokens of one tile of the KV cache, and outputs of one panel of a packed weight


class Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("rotation", c_int32),
        ("is_int8", c_int32),
    ]


class Layer(Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int32),
        ("first", c_int32),
    ]


class Model(Structure):
    _fields_ = [
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("num_tiles", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("lm_head", Matrix),
        ("join", Matrix),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
    ]


class Segment(Structure):
    _fields_ = [("first_row", c_int32), ("num_rows", c_int32), ("tiles", c_void_p), ("num_entries", c_int32)]


class Step(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("segments", c_int32),
        ("kept", c_int32),
        ("num_captures", c_int32),
        ("states", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("requests", POINTER(Segment)),
        ("prefix", c_void_p),
        ("path_start", c_void_p),
        ("path", c_void_p),
        ("kept_rows", c_void_p),
        ("capture_layers", c_void_p),
        ("final", c_void_p),
        ("logits", c_void_p),
        ("captures", c_void_p),
        ("previous", c_void_p),
        ("stores_only", c_int32),
    ]


class Key(Structure):
    _fields_ = [("seed", c_uint64), ("position", c_uint32), ("stream", c_uint32)]


class Offer(Structure):
    _fields_ = [
        ("scores", c_void_p),
        ("key", c_void_p),
        ("count", c_int32),
        ("indices", c_void_p),
        ("confidences", c_void_p),
        ("found", c_int32),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "headlong_kernels": (c_char_p, (c_char_p,)),
    "headlong_packed_bytes": (c_size_t, (c_char_p, c_int32, c_int32, c_int32)),
    "headlong_pack": (
        c_int32,
        (c_char_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p),
    ),
    "headlong_create": (c_void_p, (POINTER(Model), c_char_p, c_int32)),
    "headlong_destroy": (None, (c_void_p,)),
    "headlong_step": (c_int32, (c_void_p, POINTER(Step))),
    "headlong_team": (c_void_p, (c_char_p, c_int32)),
    "headlong_disband": (None, (c_void_p,)),
    "headlong_linear": (c_int32, (c_void_p, POINTER(Matrix), c_void_p, c_int32, c_void_p)),
    "headlong_sample": (None, (c_void_p, c_void_p, c_int32, c_int32, POINTER(Key), c_void_p)),
    "headlong_candidates": (c_int32, (c_void_p, c_void_p, c_int32, c_int32, POINTER(Offer), c_int32)),
    "headlong_move": (c_int32, (c_void_p, c_void_p, c_void_p, c_int32)),
}


class Library:
    """The loaded library with one set of kernels. kernels: their name, such as ``avx2``. key: of its build."""

    def __init__(self, path: Path, kernels: str | None = None) -> None:
        """kernels None: the best that this CPU has. Raises CompiledStepError for a library that does not load and for
        kernels that this CPU cannot run."""
        try:
            self._c: Any = ctypes.CDLL(str(path))
        except OSError as error:
            raise CompiledStepError(f"{path} cannot be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._c, name, None)
            if function is None:
                raise CompiledStepError(f"{path} has no {name}: it is damaged; remove its folder, it is built again")
            function.restype, function.argtypes = result, arguments
        found: bytes | None = self._c.headlong_kernels(kernels.encode() if kernels else None)
        if found is None:
            raise CompiledStepError(f"this CPU has no {kernels} kernels")
        self._name = found
        self.key = path.parent.name
        self.kernels = found.decode()

    def packed_bytes(self, n: int, k: int, is_int8: bool) -> int:
        """Bytes of a packed weight [n, k]."""
        size: int = self._c.headlong_packed_bytes(self._name, n, k, is_int8)
        return size

    def pack(self, source: int, matrix: Matrix) -> None:
        """Packs floats [n, k] at address ``source`` into ``matrix.data`` and ``matrix.scale``. Raises MemoryError."""
        m = matrix
        if self._c.headlong_pack(self._name, source, m.n, m.k, m.is_int8, m.rotation, m.data, m.scale):
            raise MemoryError

    def create(self, model: Model, threads: int) -> int:
        """An engine over ``model``, whose arrays must outlive it. Raises MemoryError."""
        engine: int | None = self._c.headlong_create(ctypes.byref(model), self._name, threads)
        if engine is None:
            raise MemoryError
        return engine

    def destroy(self, engine: int) -> None:
        self._c.headlong_destroy(engine)

    def step(self, engine: int, step: Step) -> None:
        """Raises MemoryError."""
        if self._c.headlong_step(engine, ctypes.byref(step)):
            raise MemoryError("no memory for a step")

    def move(self, engine: int, source: int, target: int, count: int) -> None:
        """Copies ``count`` KV entries between slots (addresses of int32). Raises MemoryError."""
        if self._c.headlong_move(engine, source, target, count):
            raise MemoryError("no memory to move KV entries")

    def team(self, threads: int) -> int:
        """A team of threads for the work beside the step. Raises MemoryError."""
        team: int | None = self._c.headlong_team(self._name, threads)
        if team is None:
            raise MemoryError
        return team

    @property
    def functions(self) -> Any:
        """The C functions, typed."""
        return self._c


class Team:
    """Threads that compute products, samples and candidates together; for one caller at a time."""

    def __init__(self, library: Library, threads: int) -> None:
        """Raises MemoryError if there is none for the threads."""
        self.library = library
        self._c = library.functions
        self._team = library.team(threads)
        weakref.finalize(self, self._c.headlong_disband, self._team)

    def linear(self, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [rows, k]; returns [rows, n]. Raises MemoryError."""
        x = x.contiguous()
        y = torch.empty(len(x), matrix.n)
        if len(x) and self._c.headlong_linear(self._team, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr()):
            raise MemoryError("no memory for a product")
        return y

    def gumbel_argmax(self, logits: torch.Tensor, keys: Sequence[NoiseKey]) -> list[int]:
        """``engine.sampler.sample.gumbel_argmax`` for rows on the CPU. logits: float32 [len(keys), vocab]."""
        logits = logits.contiguous()
        words = (Key * len(keys))(*[_key(key) for key in keys])
        tokens = np.empty(len(keys), dtype=np.int32)
        self._c.headlong_sample(self._team, logits.data_ptr(), len(keys), logits.shape[1], words, tokens.ctypes.data)
        chosen: list[int] = tokens.tolist()
        return chosen

    def candidates(
        self, scores: torch.Tensor, ids: Ints, wishes: Sequence[tuple[int, NoiseKey | None]], noised: int
    ) -> list[tuple[Ints, list[float]]]:
        """For each row of ``scores`` [rows, n] the indices of its best ``count`` entries and their shares, best first.

        ids: the token of each entry, whose noise is added where a wish has a key: then among the ``noised`` largest.
        Raises MemoryError.
        """
        scores = scores.contiguous()
        rows, n = scores.shape
        room = max((count for count, _ in wishes), default=0)
        indices = np.empty((rows, room), dtype=np.int32)
        shares = np.empty((rows, room), dtype=np.float32)
        keys = [None if key is None else _key(key) for _, key in wishes]
        offers = (Offer * rows)()
        for row, (offer, (count, _), key) in enumerate(zip(offers, wishes, keys, strict=True)):
            offer.scores = scores.data_ptr() + row * n * scores.element_size()
            offer.key = None if key is None else ctypes.addressof(key)
            offer.count = count
            offer.indices = indices.ctypes.data + row * indices.strides[0]
            offer.confidences = shares.ctypes.data + row * shares.strides[0]
        if self._c.headlong_candidates(self._team, ids.ctypes.data, n, noised, offers, rows):
            raise MemoryError("no memory for candidates")
        return [
            (indices[row, : offer.found].astype(np.int64), shares[row, : offer.found].tolist())
            for row, offer in enumerate(offers)
        ]


def _key(key: NoiseKey) -> Key:
    return Key(key.seed, key.position, key.stream)
