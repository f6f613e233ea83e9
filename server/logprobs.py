"""Log-probabilities as chat completions and as legacy completions show them. No infinities: they are not JSON."""

from __future__ import annotations

from collections.abc import Sequence

from engine.outputs import SILENT_LOGPROB, TokenLogprob, TokenOutput
from server.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenOutput]) -> dict[str, object]:
    """``{"content": [...], "refusal": null}``, one entry a token, in the order of the tokens."""
    return {"content": [_chat_entry(tokenizer, token) for token in tokens], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: TokenOutput) -> dict[str, object]:
    known = _known(token)
    top = [_token_entry(tokenizer, token_id, logprob) for token_id, logprob in known.top]
    return {**_token_entry(tokenizer, token.token_id, known.logprob), "top_logprobs": top}


def _token_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}


class LegacyLogprobs:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``, filled token by token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add_prompt(
        self, token_ids: Sequence[int], offsets: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> None:
        """An echoed prompt; its first token has no log-probability."""
        for token_id, offset, known in zip(token_ids, offsets, logprobs, strict=True):
            self._add(token_id, offset, known)

    def add_output(self, tokens: Sequence[TokenOutput], offsets: Sequence[int]) -> None:
        for token, offset in zip(tokens, offsets, strict=True):
            self._add(token.token_id, offset, _known(token))

    def _add(self, token_id: int, offset: int, known: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token_id)
        self.tokens.append(text)
        self.text_offset.append(offset)
        if known is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(_finite(known.logprob))
        top: dict[str, float] = {}
        for other, logprob in known.top if self._num_top else ():
            top.setdefault(self._tokenizer.token_text(other), _finite(logprob))  # best first, so the best stays
        if self._num_top:
            top.setdefault(text, _finite(known.logprob))
        self.top_logprobs.append(top if self._num_top else None)

    def body(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if self._num_top else None,
            "text_offset": self.text_offset,
        }


def _known(token: TokenOutput) -> TokenLogprob:
    if token.logprob is None:
        raise RuntimeError("the engine returned a token without the log-probability that was asked for")
    return token.logprob


def _finite(logprob: float) -> float:
    return logprob if logprob > SILENT_LOGPROB else SILENT_LOGPROB
