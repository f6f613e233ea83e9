"""Which drafter serves which kind of heads."""

from __future__ import annotations

from typing import Unpack

from engine.spec_decode.drafter import Drafter
from engine.spec_decode.drafter_base import HeadOptions
from engine.spec_decode.markov import MarkovDrafter
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.spec_decode.path_drafter import MtpDrafter
from engine.spec_decode.streaming import StreamingDrafter
from heads.checkpoint import Heads
from heads.eagle import METHOD as EAGLE
from heads.lm_head import DraftLmHead
from heads.markov import MarkovHeads
from heads.medusa import MedusaHeads
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule
from heads.streaming import StreamingHeads

HEAD_METHODS = (MedusaDrafter.method, MarkovDrafter.method, MtpDrafter.method, StreamingDrafter.method, EAGLE)
# Those that store entries of their own beside the KV of requests.
KV_METHODS = (MtpDrafter.method, StreamingDrafter.method)


def head_drafter(heads: Heads | OwnKvModule, lm_head: DraftLmHead, **options: Unpack[HeadOptions]) -> Drafter:
    """The drafter of the heads' method. Preparing it changes heads and lm_head for good."""
    if isinstance(heads, MtpModule) and heads.shape.kv == "base":
        return MtpDrafter(heads, lm_head, **options)
    if isinstance(heads, MarkovHeads):
        return MarkovDrafter(heads, lm_head, **options)
    if isinstance(heads, MedusaHeads):
        return MedusaDrafter(heads, lm_head, **options)
    if isinstance(heads, StreamingHeads):
        return StreamingDrafter(heads, lm_head, **options)
    return OwnKvDrafter(heads, lm_head, method=heads.method, **options)
