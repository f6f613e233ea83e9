"""Which drafter serves which kind of heads."""

from __future__ import annotations

from engine.spec_decode.drafter import Drafter
from engine.spec_decode.markov import MarkovDrafter
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.spec_decode.path_drafter import MtpDrafter
from heads.checkpoint import Heads
from heads.config import Calibration
from heads.eagle import METHOD as EAGLE
from heads.lm_head import DraftLmHead
from heads.markov import MarkovHeads
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule

HEAD_METHODS = (MedusaDrafter.method, MarkovDrafter.method, MtpDrafter.method, EAGLE)


def head_drafter(
    heads: Heads | OwnKvModule,
    lm_head: DraftLmHead,
    *,
    calibration: Calibration | None = None,
    coupling: bool = True,
    eos_token_ids: tuple[int, ...] = (),
) -> Drafter:
    """The drafter of the heads' method. Preparing it changes heads and lm_head for good."""
    if isinstance(heads, MtpModule) and heads.shape.kv == "base":
        return MtpDrafter(heads, lm_head, calibration=calibration, coupling=coupling, eos_token_ids=eos_token_ids)
    if isinstance(heads, MarkovHeads):
        return MarkovDrafter(heads, lm_head, calibration=calibration, coupling=coupling, eos_token_ids=eos_token_ids)
    if isinstance(heads, MedusaHeads):
        return MedusaDrafter(heads, lm_head, calibration=calibration, coupling=coupling, eos_token_ids=eos_token_ids)
    return OwnKvDrafter(
        heads, lm_head, method=heads.method, calibration=calibration, coupling=coupling, eos_token_ids=eos_token_ids
    )
