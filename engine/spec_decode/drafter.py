"""The one interface of every drafter: matches in the text itself (suffix), and draft heads of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from engine.sampling_params import SamplingParams
from engine.spec_decode.tree import DraftTree

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner
    from engine.spec_decode.candidates import HeadCompute


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Rows a drafter adds to a request's verification forward beside the tree.

    They are computed, not verified, and their KV is dropped. Row e sees the committed prefix, the ancestors of its
    parent, and itself. parents[e]: -1 is the root, i < len(tree) a tree node, len(tree) + j the extra row j < e.
    embeddings: [E, hidden] replaces the embedding of ``tokens``, or None.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    embeddings: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """States of one request's rows. ``final`` is after the last norm (what lm_head reads); ``layers[i]`` is the
    output of decoder layer i. Each is [rows, hidden], or [hidden] for a single node."""

    final: torch.Tensor
    layers: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know of a request when it proposes.

    token_ids: every committed token, prompt first (a live view: do not keep or change it); the tree hangs under the
        last one. prompt_length: how many of them are the prompt.
    sampling: the target's processing; a drafter with logits applies it before ranking its children.
    accepted: states of the node that emitted the last token (the row whose logits chose it); None unless the drafter
        asks for hidden states. extra: states of the drafter's own extra rows of the last forward.
    max_depth: limit of this proposal (token and context limits are already in it). max_nodes: how many nodes may be
        verified at most; a proposal may hold more, of which the likeliest are taken. least: a node of less survival
        would not pay for its row; it need not be proposed. token_seconds: what one more token is worth; 0 where time
        does not matter.
    block_ids: of the KV cache, in which all tokens but the last have their entries.
    """

    request_id: str
    token_ids: Sequence[int]
    prompt_length: int
    sampling: SamplingParams
    max_depth: int
    max_nodes: int
    accepted: HiddenStates | None = None
    extra: HiddenStates | None = None
    least: float = 0.0
    token_seconds: float = 0.0
    block_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DraftFeedback:
    """What became of a proposal.

    Because a token depends on the seed and its position alone, ``emitted`` tells which proposed nodes were right
    whether or not they were verified: a drafter that was not given rows still learns how good it would have been.
    proposal: the tree of all drafters before pruning. emitted: the tokens that followed its root, at least one.
    """

    request_id: str
    proposal: DraftTree
    emitted: Sequence[int]


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """What a step added to one request's verified text: positions from ``start`` on, one a row.

    rows: of the flat batch, in order of position. token_ids: of the request, prompt first; it may be longer than what
    is verified. block_ids: in which the tokens have their KV entries.
    """

    start: int
    rows: Sequence[int]
    token_ids: Sequence[int]
    block_ids: Sequence[int]


@runtime_checkable
class KvOwner(Protocol):
    """What a drafter also is that keeps something of every verified token, whoever the request is drafted by: blocks
    are shared by way of the prefix cache."""

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Memory that it takes for each block of the KV cache. dtype: of the model."""
        ...

    def store(self, hidden: HiddenStates, committed: Sequence[CommittedRows]) -> None:
        """Called once a step with the states of all its rows, before anything is proposed."""
        ...


@runtime_checkable
class TextReader(Protocol):
    """What a drafter also is that learns the text by heart. The time for that is the same small share of a request's
    own however often drafts are made, so it does not speak against making them (``pacing``)."""

    def read(self, contexts: Sequence[DraftContext]) -> None:
        """Takes in what was written since the last time; called before ``propose``."""
        ...


class Drafter(Protocol):
    """A source of drafts. It changes the speed, never the text: any tokens it returns are verified.

    method: its name in requests, metrics and configuration. needs_hidden: hand it ``accepted`` states.
    hidden_layers: the decoder layers whose states it wants beside the final one (needs_hidden is true then).
    max_extra_rows: the most that ``extra_rows`` returns.
    """

    method: str
    needs_hidden: bool
    hidden_layers: tuple[int, ...]
    max_extra_rows: int

    def prepare(self, compute: HeadCompute, runner: ModelRunner) -> None:
        """Called once, before any proposal, with what the engine computes on."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree a context, maybe empty. Batched, so that heads run once a step."""
        ...

    def extend(self, context: DraftContext, tree: DraftTree) -> None:
        """Adds to ``tree``, which holds the proposals of all drafters, what this one expects below the others' nodes.

        Called after ``propose``, where more than one drafter takes part. A node it adds counts as its own.
        """
        ...

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        """Rows to compute beside ``tree``, the final tree of all drafters after pruning.

        They are dropped for a step when the KV cache has no room for them; ``DraftContext.extra`` is then None.
        """
        ...

    def observe(self, feedback: DraftFeedback) -> None:
        """Learns from the tokens that followed a proposal (all methods' nodes are in it)."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        ...
