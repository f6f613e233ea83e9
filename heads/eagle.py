"""What the configuration of an EAGLE-3 module (arXiv 2503.01840) says, in its two public forms.

- Its authors' and SpecForge's: a Llama configuration of one layer with ``draft_vocab_size``.
- The library ``speculators``: ``speculators_model_type`` "eagle3" and the layer's configuration under
  ``transformer_layer_config``, of which values that are the architecture's defaults may be left out.

Which layers of the base model it fuses is counted in two ways. In the reference (``modeling_llama_kv``), in vLLM and
in ``eagle_aux_hidden_state_layer_ids`` at the top of a configuration, number i is what goes *into* layer i. Under
``eagle_config`` (SpecForge, ModelOpt), it is what comes *out of* layer i: SGLang adds one to those. Without either it
is the input of layers 2, N // 2 and N - 3 of N.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "eagle"
DEPTHS = 7  # a module is used for at most; the drafter stops where a depth does not pay
_COUNT = {"type": ["integer", "null"], "minimum": 1, "maximum": 1 << 24}
_LAYERS = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 4096}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "speculators_model_type": {"const": "eagle3"},
        "transformer_layer_config": {"type": "object"},
        "draft_vocab_size": _COUNT,
        "target_hidden_size": _COUNT,
        "norm_before_residual": {"type": "boolean"},
        "norm_before_fc": {"type": "boolean"},
        "eagle_aux_hidden_state_layer_ids": _LAYERS,
        "eagle_config": {
            "type": ["object", "null"],
            "properties": {"eagle_aux_hidden_state_layer_ids": _LAYERS, "use_aux_hidden_state": {"enum": [True]}},
        },
        "quantization_config": {"type": "null"},
        "speculators_config": {
            "type": "object",
            "properties": {
                "verifier": {"type": "object", "properties": {"name_or_path": {"type": ["string", "null"]}}}
            },
        },
    },
    "if": {"required": ["speculators_model_type"]},
    "then": {"required": ["transformer_layer_config"]},
    "else": {"required": ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]},
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """layer: the decoder layer's configuration, as transformers reads it. draft_vocab: how many tokens it drafts, None
    for all. target_hidden: width of the base model's states where it is not the layer's own. norm_before_residual: the
    state is normed before it is kept for the residual. norm_before_fc: the fused states are normed. outputs: decoder
    layers of the base model, ascending, whose outputs are fused; None for the reference's."""

    layer: Mapping[str, Any]
    draft_vocab: int | None = None
    target_hidden: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    outputs: tuple[int, ...] | None = None

    def fused(self, num_layers: int) -> tuple[int, ...]:
        """Decoder layers of a base model of ``num_layers`` whose outputs are fused; they may lie outside of it."""
        return self.outputs or (1, num_layers // 2 - 1, num_layers - 4)


def is_eagle(raw: Any) -> bool:
    """Whether a ``config.json`` is that of an EAGLE-3 module, or of another kind of ``speculators``."""
    if not isinstance(raw, dict) or "format" in raw:
        return False
    names = raw.get("architectures")
    return (
        "speculators_model_type" in raw
        or "draft_vocab_size" in raw
        or (isinstance(names, list) and any("eagle3" in str(name).lower() for name in names))
    )


def parse_eagle(raw: Mapping[str, Any]) -> EagleConfig:
    """raw: fits ``SCHEMA``."""
    return EagleConfig(
        layer=raw.get("transformer_layer_config", raw),
        draft_vocab=raw.get("draft_vocab_size"),
        target_hidden=raw.get("target_hidden_size"),
        norm_before_residual=raw.get("norm_before_residual", False),
        norm_before_fc=raw.get("norm_before_fc", False),
        outputs=_outputs(raw),
    )


def verifier_name(raw: Mapping[str, Any]) -> str:
    """The last part of what the configuration calls its base model, a hub id or somebody's path; or nothing."""
    name = raw.get("speculators_config", {}).get("verifier", {}).get("name_or_path") or ""
    parts = [part for part in re.split(r"[/\\]", name) if part]
    return parts[-1] if parts else ""


def _outputs(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    inputs = raw.get("eagle_aux_hidden_state_layer_ids")
    if inputs:
        return tuple(sorted(number - 1 for number in inputs))
    outputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(sorted(outputs)) if outputs else None
