"""Multi-token-prediction modules inside a model's own checkpoint: what their tensors are called.

Facts and where they are from:

- DeepSeek-V3 (arXiv 2412.19437, section 2.2, and the README_WEIGHTS of its repository) and GLM-4.5: layers N, N + 1 and
  so on, behind the model's N; the projection reads [embedding, state]. Copies of the embedding and of lm_head lie
  beside it.
- MiMo (vLLM's ``mimo_mtp``): ``model.mtp_layers``; the projection reads [state, embedding], the other way round.
- Qwen3-Next and Qwen3.5 (vLLM's ``qwen3_next_mtp``): ``mtp``; [embedding, state]; norms scale by one plus their weight,
  as the model's own do.

All of them read the state after the model's last norm, and hand on what comes out of their own last norm, which
lm_head reads too (transformers' ``MtpModel``; vLLM since its pull requests 45895 and 47448). Earlier servers handed on
the state before that norm, which cost DeepSeek-R1 three points of acceptance (ROCm/ATOM, pull request 1764).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names in a checkpoint. prefix: of all tensors of the first module; block: of its decoder layer's. The others are
    whole names; embedding, lm_head: copies of the model's own, where the layout has them. state_first: the order that
    the projection reads in. depths: how many modules there are. belongs: matches every tensor of any of them; later:
    those under ``prefix`` that are not the first module's."""

    prefix: str
    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    state_first: bool
    depths: int
    belongs: re.Pattern[str]
    later: re.Pattern[str] | None = None
    embedding: str | None = None
    lm_head: str | None = None

    def is_first(self, name: str) -> bool:
        """Whether a tensor is the first module's."""
        return name.startswith(self.prefix) and (self.later is None or self.later.match(name) is None)

    def name_of(self, parameter: str) -> str:
        """The tensor that a parameter of ``CheckpointMtp`` is."""
        parts = {
            "embedding_norm.weight": self.embedding_norm,
            "hidden_norm.weight": self.hidden_norm,
            "projection.weight": self.projection,
            "norm.weight": self.norm,
        }
        return parts.get(parameter) or self.block + parameter.removeprefix("layer.")


def find_layout(names: Iterable[str], num_layers: int) -> MtpLayout | None:
    """Which kind of module the tensors ``names`` hold, if any. num_layers: decoder layers of the model itself."""
    names = list(names)
    behind = sorted(index for index in _numbers(names, r"model\.layers\.(\d+)\.eh_proj\.weight") if index >= num_layers)
    if behind:
        return _deepseek(behind[0], len(behind))
    own = _numbers(names, r"model\.mtp_layers\.(\d+)\.input_proj\.weight")
    if own:
        return _mimo(len(own))
    if "mtp.fc.weight" in names:
        return _qwen(len(_numbers(names, r"mtp\.layers\.(\d+)\..*")))
    return None


def _numbers(names: Iterable[str], pattern: str) -> set[int]:
    compiled = re.compile(pattern)
    return {int(match[1]) for name in names if (match := compiled.fullmatch(name))}


def _deepseek(first: int, depths: int) -> MtpLayout:
    prefix = f"model.layers.{first}."
    numbers = "|".join(str(first + depth) for depth in range(depths))
    return MtpLayout(
        prefix=prefix,
        block=prefix,
        embedding_norm=f"{prefix}enorm.weight",
        hidden_norm=f"{prefix}hnorm.weight",
        projection=f"{prefix}eh_proj.weight",
        norm=f"{prefix}shared_head.norm.weight",
        state_first=False,
        depths=depths,
        belongs=re.compile(rf"(model\.)?layers\.({numbers})\."),
        embedding=f"{prefix}embed_tokens.weight",
        lm_head=f"{prefix}shared_head.head.weight",
    )


def _mimo(depths: int) -> MtpLayout:
    prefix = "model.mtp_layers.0."
    return MtpLayout(
        prefix=prefix,
        block=prefix,
        embedding_norm=f"{prefix}token_layernorm.weight",
        hidden_norm=f"{prefix}hidden_layernorm.weight",
        projection=f"{prefix}input_proj.weight",
        norm=f"{prefix}final_layernorm.weight",
        state_first=True,
        depths=depths,
        belongs=re.compile(r"(model\.)?mtp_layers\."),
    )


def _qwen(depths: int) -> MtpLayout:
    return MtpLayout(
        prefix="mtp.",
        block="mtp.layers.0.",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        norm="mtp.norm.weight",
        state_first=False,
        depths=max(1, depths),
        belongs=re.compile(r"mtp\."),
        later=re.compile(r"mtp\.layers\.[1-9]"),
    )
