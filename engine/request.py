"""One live request inside the engine: a token list, counters, its blocks and its draft."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from engine.kv_cache import chain_digest, chain_root
from engine.outputs import FinishReason, RequestTimes, TokenLogprob
from engine.sampling_params import EngineRequest, SamplingParams
from engine.spec_decode.drafter import HiddenStates
from engine.spec_decode.tree import DraftTree


@dataclass(slots=True, eq=False)
class Request:
    """``token_ids`` holds prompt and output; what is not a counter is derived from it.

    num_computed_tokens: leading tokens whose KV is in the cache and verified. The newest output token has none yet.
    proposal: what the drafters proposed below the last token. accepted, extra: states kept for them.
    digests: prefix-cache digests of the leading full blocks, computed as far as they were needed.
    """

    source: EngineRequest
    stop_ids: frozenset[int]
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    digests: list[bytes] = field(default_factory=list)
    proposal: DraftTree = field(default_factory=DraftTree)
    accepted: HiddenStates | None = None
    extra: HiddenStates | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None

    @classmethod
    def from_source(cls, source: EngineRequest, eos_token_ids: tuple[int, ...]) -> Request:
        ends = set(source.sampling.stop_token_ids)
        if not source.sampling.ignore_eos:
            ends.update(eos_token_ids)
        return cls(source=source, stop_ids=frozenset(ends), token_ids=list(source.prompt_token_ids))

    @property
    def request_id(self) -> str:
        return self.source.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.source.sampling

    @property
    def prompt_length(self) -> int:
        return len(self.source.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.source.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """All but the newest token are computed, and that one is an output."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    @property
    def times(self) -> RequestTimes:
        finished = time.monotonic() if self.finish_reason else None
        return RequestTimes(self.arrived, self.scheduled, self.first_token, finished)

    def tokens_left(self, max_model_len: int) -> int:
        """How many more tokens may be emitted before max_tokens or the context ends the answer."""
        return min(self.sampling.max_tokens - self.num_output_tokens, max_model_len - self.num_tokens)

    def block_digests(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Digests of the first ``num_blocks`` blocks, which must be full."""
        assert num_blocks * block_size <= self.num_tokens
        for block in range(len(self.digests), num_blocks):
            parent = self.digests[-1] if self.digests else chain_root(self.source.cache_salt)
            tokens = tuple(itertools.islice(self.token_ids, block * block_size, (block + 1) * block_size))
            self.digests.append(chain_digest(parent, tokens))
        return self.digests[:num_blocks]
