"""One choice of an answer: engine outputs in, text deltas out, cut at stop strings."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from engine.outputs import RequestOutput, RequestTimes, TokenLogprob, TokenOutput
from engine.sampling_params import EngineRequest
from server.acceptance import AcceptanceStats
from server.detokenizer import Detokenizer
from server.stop_strings import StopMatcher

AnswerEnd = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new and certain of one choice. ``offsets``: the character of the choice's text where each token begins.

    Tokens travel with the text they complete: those whose text is still held back come in a later delta.
    """

    index: int
    text: str
    tokens: tuple[TokenOutput, ...]
    offsets: tuple[int, ...]
    finish_reason: AnswerEnd | None = None


class Choice:
    """``feed`` it every output of its engine request until it is finished.

    The answer depends on the tokens alone, not on how the engine's steps grouped them. ``tokens`` and the figures
    count the token that completes a stop string and nothing after it.
    """

    def __init__(self, index: int, request: EngineRequest, detokenizer: Detokenizer, stops: StopMatcher) -> None:
        self.index = index
        self.request = request
        self.stats = AcceptanceStats()
        self.times = RequestTimes(arrived=time.monotonic())
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.finish_reason: AnswerEnd | None = None
        self.kept: tuple[TokenOutput, ...] = ()  # of the last output fed
        self._detokenizer = detokenizer
        self._stops = stops
        self._has_begun = False
        self._num_characters = 0
        self._pending: list[TokenOutput] = []
        self._pending_offsets: list[int] = []

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        """The delta of one output; None while there is neither text nor an end nor the first sign of life.

        Outputs that end in "abort" or "error" are the caller's to handle.
        """
        self.times = output.times
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        before = len(self._pending)
        text = self._take_tokens(output)
        self.kept = tuple(self._pending[before:])
        self.stats.observe(output, self.kept)
        if self._stops.has_cut:
            self.finish_reason = "stop"
        elif output.finish_reason in ("stop", "length"):
            self.finish_reason = output.finish_reason
            text += self._flush()
        if self.finish_reason is not None and self.times.finished is None:
            self.times = replace(self.times, finished=time.monotonic())
        if not text and self.finish_reason is None and self._has_begun:
            return None
        self._has_begun = True
        return self._delta(text)

    def _take_tokens(self, output: RequestOutput) -> str:
        text = ""
        for token in output.tokens:
            self._pending.append(token)
            self._pending_offsets.append(self._num_characters)
            self.num_tokens += 1
            is_stop_id = output.stop_token_id is not None and token is output.tokens[-1]
            # The id that ends the answer is a token of it, but not its text.
            piece = "" if is_stop_id else self._detokenizer.push(token.token_id)
            self._num_characters += len(piece)
            text += self._stops.feed(piece, may_cut=self.num_tokens >= self.request.sampling.min_tokens)
            if self._stops.has_cut:
                break
        return text

    def _flush(self) -> str:
        """What was held back, at an end that no stop string made; it may still complete one."""
        may_cut = self.num_tokens >= self.request.sampling.min_tokens
        text = self._stops.feed(self._detokenizer.flush(), may_cut)
        if self._stops.has_cut:
            self.finish_reason = "stop"
            return text
        return text + self._stops.flush()

    def _delta(self, text: str) -> ChoiceDelta:
        tokens, offsets = tuple(self._pending), tuple(self._pending_offsets)
        if not text and self.finish_reason is None:
            return ChoiceDelta(self.index, "", (), ())  # the first sign of life: its tokens wait for their text
        self._pending.clear()
        self._pending_offsets.clear()
        return ChoiceDelta(self.index, text, tokens, offsets, self.finish_reason)
