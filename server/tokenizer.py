"""Text to token ids and back, and chat messages to a prompt: a thin face over transformers' fast tokenizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders
from transformers import AutoTokenizer

from server.errors import invalid
from server.protocol.messages import TemplateMessage

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"
_MAX_KWARG_CHARACTERS = 1024
# Names that the template receives from the server itself.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)


class TokenizerLoadError(Exception):
    """The folder holds no tokenizer that can be served; the message is one sentence a user can act on."""


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level BPE vocabulary (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """One model's tokenizer and chat template. Its methods keep no state, so worker threads may share it."""

    def __init__(self, hf_tokenizer: Any) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TokenizerLoadError("The model has no fast tokenizer (tokenizer.json).")
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf_tokenizer
        self._backend = backend
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._added = {id_: token.content for id_, token in added.items()}
        self._token_bytes: dict[int, bytes] = {}
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self._template: str | None = _chat_template(hf_tokenizer)
        self._template_names = _template_names(self._template) - _RESERVED if self._template else frozenset()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer in the folder ``path``; nothing is downloaded. Raises TokenizerLoadError."""
        try:
            return cls(AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError) as error:
            raise TokenizerLoadError(f"No usable tokenizer in {path}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Ids with the model's own special tokens, and the character of ``text`` at which each begins."""
        encoding = self._encoding(text, add_special_tokens=True)
        return list(encoding.ids), [start for start, _ in encoding.offsets]

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # Of the two, only the batch call releases the interpreter: a long prompt must not halt every stream.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            if all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            return piece.encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        fallback = _BYTE_FALLBACK.fullmatch(piece)
        return bytes([int(fallback[1], 16)]) if fallback else piece.replace(_SPACE_MARK, " ").encode()

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the (sentencepiece) vocabulary lacks."""
        piece = self._backend.id_to_token(token_id)
        return not self.is_byte_level and piece is not None and _BYTE_FALLBACK.fullmatch(piece) is not None

    def token_text(self, token_id: int) -> str:
        """A token for a log-probability entry: its text, or ``bytes:\\xe4\\xb8`` for a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def ids_always_drafted(self) -> list[int]:
        """The special tokens of answers, single ASCII characters, digits and whitespace: what a reduced draft
        vocabulary must hold, however rare they were in the text it was made from.

        A special token is of answers if it ends them or if the chat template writes it; thousands of others may only
        be reserved (Gemma 3).
        """
        ids = sorted(id_ for id_ in self.special_ids if id_ == self.eos_token_id or self.mentions(self._added[id_]))
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=False)):
            raw = self.token_bytes(token_id)
            text = raw.decode("ascii", errors="ignore")
            if len(text) == len(raw) and (len(text) == 1 or not text.strip() or text.strip().isdigit()):
                ids.append(token_id)
        return list(dict.fromkeys(ids))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def mentions(self, word: str) -> bool:
        """Whether the chat template speaks of ``word``."""
        return self._template is not None and word in self._template

    def render_chat(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a chat, in transformers' sandboxed Jinja.

        ``chat_template_kwargs``: scalars only; names that the template does not read have no effect.
        Raises ApiError 400 for a model without a template, and for whatever the template refuses.
        """
        if self._template is None:
            raise invalid("This model has no chat template; use /v1/completions.", "messages", "unsupported_value")
        extra = self._checked_kwargs(chat_template_kwargs or {})
        try:
            text = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise invalid(f"The model's chat template refuses these messages: {error}", "messages") from error
        return self.encode(text)

    def _checked_kwargs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            where = f"chat_template_kwargs.{name}"
            if name in _RESERVED or name == "chat_template":
                raise invalid(f"'{name}' may not be set through 'chat_template_kwargs'.", where)
            if not isinstance(value, str | int | float | bool | None):
                raise invalid(f"'{where}' must be a string, a number, a boolean or null.", where, "invalid_type")
            if isinstance(value, str) and len(value) > _MAX_KWARG_CHARACTERS:
                raise invalid(f"'{where}' is too long.", where, "string_above_max_length")
        return {name: value for name, value in given.items() if name in self._template_names}


def _chat_template(hf_tokenizer: Any) -> str | None:
    """The one template of a model; of several named ones the default."""
    template = hf_tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _template_names(template: str) -> frozenset[str]:
    """The variables a template reads. Raises TokenizerLoadError for one that is not Jinja."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # transformers' own tag
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerLoadError(f"The model's chat template is not valid Jinja: {error}") from error
