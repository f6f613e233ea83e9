"""The tokenizer's face: loading from a folder, bytes and names of tokens, the chat template's borders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from wire_app import smollm2_tokenizer, tiny_tokenizer

from server.errors import ApiError
from server.tokenizer import Tokenizer, TokenizerLoadError

USER = {"role": "user", "content": "hi"}


def saved(folder: Path, template: str) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._backend, bos_token="<|start|>")
    fast.chat_template = template
    fast.backend_tokenizer.enable_truncation(4)
    fast.save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_and_its_truncation_is_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path, "{{ messages[0]['content'] }}"))
    text = "a long text of many more tokens than four"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.render_chat([USER]) == tokenizer.encode("hi")
    assert tokenizer.special_ids == {0, 1}


def test_a_folder_without_a_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="No usable tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_not_jinja_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="not valid Jinja"):
        Tokenizer.load(saved(tmp_path, "{% for x in %}"))


def test_bytes_of_tokens_join_to_the_text() -> None:
    tokenizer = smollm2_tokenizer()
    text = "Ünïcödé 👋🏽 世界\n\ttabs"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text
    assert tokenizer.token_bytes(10**6) == b""
    assert "ï" in [tokenizer.token_text(token_id) for token_id in ids]
    assert any(tokenizer.token_text(token_id).startswith("bytes:\\x") for token_id in ids)


def test_a_draft_vocabulary_needs_the_special_tokens_of_answers_alone() -> None:
    """Not those that a model only keeps in reserve, of which Gemma 3 has six thousand."""

    def made(template: str | None) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(tiny_tokenizer()._backend.to_str())
        backend.add_special_tokens([f"<unused{index}>" for index in range(50)] + ["<call>"])
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>")
        fast.chat_template = template
        return Tokenizer(fast)

    plain, chat = made(None), made("<|start|>{{ messages[0]['content'] }}{% if tools %}<call>{% endif %}")
    (call,) = chat.encode("<call>")
    eos, start = plain.encode("<|end|><|start|>")
    assert plain.special_ids & set(plain.ids_always_drafted()) == {eos}
    assert chat.special_ids & set(chat.ids_always_drafted()) == {eos, start, call}
    characters = {token_id for text in "aZ7 \n~" for token_id in plain.encode(text)}
    assert characters <= set(plain.ids_always_drafted())


def test_the_sandbox_holds_and_a_type_error_is_a_400() -> None:
    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7]['content'].upper() + '' }}",
        "{{ raise_exception('no') }}",
    ):
        with pytest.raises(ApiError) as refusal:
            tiny_tokenizer(template).render_chat([USER])
        assert refusal.value.status == 400


def test_only_the_templates_own_variables_are_passed() -> None:
    tokenizer = tiny_tokenizer("{{ messages[0]['content'] }}{{ style }}{{ eos_token }}")
    assert tokenizer.decode(tokenizer.render_chat([USER], chat_template_kwargs={"style": "x", "other": 1})) == "hix"
    for name in ("eos_token", "messages", "chat_template"):
        with pytest.raises(ApiError, match=name):
            tokenizer.render_chat([USER], chat_template_kwargs={name: "x"})


def test_transformers_own_tag_does_not_stop_a_template() -> None:
    tokenizer = tiny_tokenizer("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}")
    assert tokenizer.decode(tokenizer.render_chat([USER])) == "hi"


async def test_a_long_text_does_not_halt_the_event_loop() -> None:
    """``tokenizers`` releases the interpreter in one of its two calls only."""
    tokenizer, text, ticks = smollm2_tokenizer(), "the cat sat " * 200_000, 0
    work = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
    while not work.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert len(await work) > 500_000
    assert ticks > 10
