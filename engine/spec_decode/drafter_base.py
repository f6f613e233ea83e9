"""What the drafters of all kinds of heads share: how logits are ranked and calibrated, and a state for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypedDict, TypeVar

from engine.spec_decode.candidates import HeadCompute
from engine.spec_decode.draft_block import Committed
from engine.spec_decode.drafter import DraftContext, ExtraRows
from engine.spec_decode.head_ranking import Calibrations, HeadRanking
from engine.spec_decode.tree import DraftTree
from heads.config import Calibration
from heads.lm_head import DraftLmHead

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


class _Deep(Protocol):
    """Heads of some depths."""

    @property
    def num_heads(self) -> int: ...


HeadsT = TypeVar("HeadsT", bound=_Deep)
StateT = TypeVar("StateT")  # of a request


class HeadOptions(TypedDict, total=False):
    """What ``HeadDrafter`` takes beside the heads. calibration: measured after training; None trusts the heads' word.
    coupling: draft with the verification's own noise."""

    calibration: Calibration | None
    coupling: bool
    eos_token_ids: tuple[int, ...]


def committed(context: DraftContext) -> Committed:
    """What of a request's text is in the cache: all but the newest token."""
    return Committed(context.block_ids, len(context.token_ids) - 1)


class HeadDrafter(ABC, Generic[HeadsT, StateT]):
    """See the module's docstring. A kind of drafting adds ``propose``, ``extend`` and ``observe``."""

    method: str
    needs_hidden = True
    hidden_layers: tuple[int, ...] = ()
    max_extra_rows = 0

    def __init__(
        self,
        heads: HeadsT,
        lm_head: DraftLmHead,
        *,
        calibration: Calibration | None = None,
        coupling: bool = True,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """See ``HeadOptions``."""
        self._heads = heads
        self._lm_head = lm_head
        self._ranking = HeadRanking(lm_head, coupling=coupling, eos_token_ids=eos_token_ids)
        self._calibrations = Calibrations(heads.num_heads, calibration)
        self._requests: dict[str, StateT] = {}

    def prepare(self, compute: HeadCompute, runner: ModelRunner) -> None:
        """Packs the heads: afterwards they cannot be trained or saved any more."""
        self._ranking.compute = compute
        self._pack(compute, runner)

    @abstractmethod
    def _pack(self, compute: HeadCompute, runner: ModelRunner) -> None:
        """Makes the heads ready to draft."""

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        return None

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
