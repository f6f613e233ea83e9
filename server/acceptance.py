"""One request's speculation figures: vLLM's object, and the acceptance length over all its decode steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.outputs import RequestOutput, TokenOutput


class AcceptanceStats:
    """Counts what the cut left: drafted tokens that a stop string cut off were not accepted by anyone."""

    def __init__(self) -> None:
        self._accepted_per_draft: Counter[int] = Counter()
        self._num_draft_tokens = 0
        self._num_decode_steps = 0
        self._num_tokens = 0
        self._max_depth = 0

    def observe(self, output: RequestOutput, kept: Sequence[TokenOutput]) -> None:
        """One engine step, with the tokens that were kept of it."""
        self._num_tokens += len(kept)
        self._num_decode_steps += output.is_decode_step
        self._max_depth = max(self._max_depth, output.max_draft_depth)
        drafted = sum(sum(counts) for counts in output.drafted.values())
        if drafted:
            self._num_draft_tokens += drafted
            self._accepted_per_draft[sum(token.depth > 0 for token in kept)] += 1

    def report(self) -> dict[str, object]:
        """``mean_acceptance_length`` (1 + accepted / drafts) and the rate speak of drafted steps only and are null
        without any; ``acceptance_length`` is output tokens over decode forwards: plain ones
        are included, and the forward that ends the prompt and gives the first token."""
        steps = self._accepted_per_draft.total()
        accepted = sum(count * times for count, times in self._accepted_per_draft.items())
        deepest = max(self._max_depth, *self._accepted_per_draft, 0)
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else None,
            "draft_acceptance_rate": accepted / self._num_draft_tokens if steps else None,
            "acceptance_histogram": [self._accepted_per_draft[k] for k in range(deepest + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self._num_draft_tokens,
            "num_spec_tokens": deepest,
            "acceptance_length": self._num_tokens / self._num_decode_steps if self._num_decode_steps else None,
            "num_decode_steps": self._num_decode_steps,
        }
