"""``/v1/completions``: prompts of every shape, echo, legacy log-probabilities."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_engine import FakeEngine
from wire_app import COMPLETIONS, Wire, fake, tiny_info, tiny_tokenizer


def joined(chunks: list[dict[str, Any]], index: int) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def merged_logprobs(chunks: list[dict[str, Any]], index: int) -> dict[str, list[Any]]:
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
    return {key: [item for part in parts for item in part[key] or []] for key in parts[0]}


async def test_a_whole_answer() -> None:
    wire = Wire(fake("Hello", ends=False))
    body = await wire.ask(COMPLETIONS, prompt="say", max_tokens=3)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert choice["text"] == tiny_tokenizer().decode(tiny_tokenizer().encode("Hello")[:3])
    assert body["usage"]["completion_tokens"] == 3
    assert wire.engine.requests[0].prompt_token_ids == tuple(tiny_tokenizer().encode("say"))


async def test_max_tokens_defaults_to_16() -> None:
    wire = Wire(fake("x"))
    await wire.ask(COMPLETIONS, prompt="say")
    assert wire.engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(67, 68)]),
        (["ab", "b"], [(67, 68), (68,)]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        ("", [(0,)]),
        (None, [(0,)]),
    ],
)
async def test_prompt_shapes(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    wire = Wire(fake("x"))
    if isinstance(prompt, str | list) and prompt in ("ab", ["ab", "b"]):
        tokenizer = tiny_tokenizer()
        texts = [prompt] if isinstance(prompt, str) else prompt
        expected = [tuple(tokenizer.encode(text)) for text in texts]
    body = await wire.ask(COMPLETIONS, prompt=prompt, return_token_ids=True)
    assert [request.prompt_token_ids for request in wire.engine.requests] == expected
    ids = [list(prompt_ids) for prompt_ids in expected]
    assert body["prompt_token_ids"] == (ids[0] if len(ids) == 1 else ids)
    assert body["usage"]["prompt_tokens"] == sum(len(prompt_ids) for prompt_ids in ids)


@pytest.mark.parametrize("bursts", [(1,), (3, 2)])
async def test_several_prompts_times_n(bursts: tuple[int, ...]) -> None:
    def speak(request: Any) -> list[int]:
        return [*request.prompt_token_ids, *tiny_tokenizer().encode(request.request_id[-1]), 1]

    wire = Wire(FakeEngine(tiny_info(), speak, bursts=bursts))
    fields: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2, "best_of": 2, "seed": 5}
    body = await wire.ask(COMPLETIONS, **fields)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ab0"), (1, "ab1"), (2, "cd2"), (3, "cd3")]
    seeds = [request.sampling.seed for request in wire.engine.requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 5 != seeds[1]
    chunks = await wire.stream(COMPLETIONS, **fields, stream_options={"include_usage": True})
    assert [joined(chunks, i) for i in range(4)] == ["ab0", "ab1", "cd2", "cd3"]
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(finishes) == [0, 1, 2, 3]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    await wire.ask(COMPLETIONS, **(fields | {"seed": None}))
    seeds = [request.sampling.seed for request in wire.engine.requests[-4:]]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("bursts", [(1,), (4,), (50,)])
async def test_legacy_logprobs_with_echo(bursts: tuple[int, ...]) -> None:
    wire = Wire(fake("the cat 😀!", bursts=bursts))
    fields: dict[str, Any] = {"prompt": "the hat", "echo": True, "logprobs": 2, "max_tokens": 40}
    body = await wire.ask(COMPLETIONS, **fields)
    (choice,) = body["choices"]
    assert choice["text"] == "the hat" + "the cat 😀!"
    logprobs = choice["logprobs"]
    prompt_ids = tiny_tokenizer().encode("the hat")
    assert wire.engine.requests[0].sampling.prompt_logprobs == 2
    lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(prompt_ids) + body["usage"]["completion_tokens"]}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value >= -9999.0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:") and token != "<|end|>":
            assert choice["text"][offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\xf0") for token in logprobs["tokens"])
    chunks = await wire.stream(COMPLETIONS, **fields)
    assert joined(chunks, 0) == choice["text"]
    assert merged_logprobs(chunks, 0) == logprobs


async def test_legacy_logprobs_hold_the_sampled_token_beside_the_top() -> None:
    wire = Wire(fake("z"))
    body = await wire.ask(COMPLETIONS, prompt="x", logprobs=1)
    for token, top in zip(*(body["choices"][0]["logprobs"][key] for key in ("tokens", "top_logprobs")), strict=True):
        assert token in top
    body = await wire.ask(COMPLETIONS, prompt="x", logprobs=0)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 2


async def test_scoring_a_prompt_without_continuing_it() -> None:
    wire = Wire(fake("never"))
    body = await wire.ask(COMPLETIONS, prompt="the cat", echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the cat", "length")
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    body = await wire.ask(COMPLETIONS, prompt=[5, 68], echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == tiny_tokenizer().decode([5, 68])
    assert body["choices"][0]["logprobs"] is None


async def test_echo_with_a_stop_string_in_the_prompt() -> None:
    wire = Wire(fake("one END two", bursts=(6,)))
    body = await wire.ask(COMPLETIONS, prompt="END ", echo=True, stop="END")
    assert body["choices"][0]["text"] == "END one "
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_much_text_is_tokenised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(fake("x", info=tiny_info(max_model_len=20_000)))
    threads: list[int] = []
    encode = wire.context.tokenizer.encode

    def recording(text: str, add_special_tokens: bool = False) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(wire.context.tokenizer, "encode", recording)
    await wire.ask(COMPLETIONS, prompt="short")
    await wire.ask(COMPLETIONS, prompt="x" * 5000)
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]
