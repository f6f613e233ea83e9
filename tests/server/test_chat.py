"""``/v1/chat/completions``: bodies, frames, and that a stream joined is the body."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_app import CHAT, CONTEXT, Wire, fake, smollm2_tokenizer, tiny_info, tiny_tokenizer

from engine.sampling_params import choice_seed

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "the cat 😀 sat, 世界 END and more"


def prompt_of(wire: Wire) -> str:
    return wire.context.tokenizer.decode(wire.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def check_frames(chunks: list[dict[str, Any]], n: int, *, usage: bool) -> None:
    """The grammar of a stream: role first, one finish a choice, usage rule, equal heads, keys never missing."""
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    body = chunks[:-1] if usage else chunks
    assert all(("usage" in c) == usage for c in chunks)
    assert all(c["usage"] is None for c in body if usage)
    if usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0
    for index in range(n):
        own = [c["choices"][0] for c in body if c["choices"][0]["index"] == index]
        assert all(set(c) >= {"index", "delta", "logprobs", "finish_reason"} for c in own)
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all("role" not in c["delta"] for c in own[1:])
        assert [c["finish_reason"] is not None for c in own] == [False] * (len(own) - 1) + [True]
        assert own[-1]["delta"] == {}


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") for c in choices)


async def test_a_whole_answer_has_every_required_key() -> None:
    wire = Wire(fake("Hello"))
    body = await wire.ask(CHAT, messages=MESSAGES, model="tiny")
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("chat.completion", "tiny", "fp_test")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "stop",
    }
    prompt_tokens = len(wire.engine.requests[0].prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["completion_tokens"] == len(tiny_tokenizer().encode("Hello")) + 1
    assert body["usage"]["total_tokens"] == prompt_tokens + body["usage"]["completion_tokens"]
    assert "tool_calls" not in choice["message"]
    assert wire.metrics.ends == [("stop", prompt_tokens, body["usage"]["completion_tokens"])]
    assert wire.context.live_streams == set()
    assert wire.engine.aborted == []


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("bursts", [(1,), (4,), (2, 5, 1), (64,)])
@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_is_well_framed_and_joins_to_the_body(n: int, bursts: tuple[int, ...], usage: bool) -> None:
    wire = Wire(fake(TEXT, bursts=bursts, num_cached_tokens=3))
    fields = {"messages": MESSAGES, "n": n, "stop": ["END"], "logprobs": True, "top_logprobs": 2}
    body = await wire.ask(CHAT, **fields)
    chunks = await wire.stream(CHAT, **fields, stream_options={"include_usage": usage})
    check_frames(chunks, n, usage=usage)
    for choice in body["choices"]:
        index = choice["index"]
        assert choice["message"]["content"] == joined(chunks, index) == "the cat 😀 sat, 世界 "
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
    if usage:
        assert chunks[-1]["usage"] == body["usage"]
    assert body["usage"]["completion_tokens"] == n * len(body["choices"][0]["logprobs"]["content"])
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert wire.engine.live == {}
    assert [end[0] for end in wire.metrics.ends] == ["stop"] * 2 * n


@given(
    st.lists(st.sampled_from(["Hello", " 👋🏽", "世界", "EN", "D", "\n", " the", "é"]), min_size=1, max_size=12).map(
        "".join
    ),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.sampled_from([None, "END", ["世界", "D\n"], ["\n", "👋🏽"]]),
)
@settings(max_examples=25, deadline=None)
def test_a_stream_joins_to_the_body_with_the_real_tokenizer(text: str, bursts: list[int], stop: Any) -> None:
    tokenizer = smollm2_tokenizer()
    info = tiny_info(vocab_size=49152, eos_token_ids=(2,))
    wire = Wire(fake(text, tokenizer=tokenizer, info=info, bursts=bursts), tokenizer)
    fields = {"messages": MESSAGES, "stop": stop, "return_token_ids": True, "stream_options": {"include_usage": True}}
    body = asyncio.run(wire.ask(CHAT, **fields))
    chunks = asyncio.run(wire.stream(CHAT, **fields))
    stops = [stop] if isinstance(stop, str) else stop or []
    ends = [i for i in range(len(text)) if any(text[: i + 1].endswith(s) for s in stops)]
    expected = text if not ends else text[: ends[0] + 1 - max(len(s) for s in stops if text[: ends[0] + 1].endswith(s))]
    assert body["choices"][0]["message"]["content"] == joined(chunks) == expected
    streamed = [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])]
    assert streamed == body["choices"][0]["token_ids"]
    assert chunks[-1]["usage"] == body["usage"]
    assert body["usage"]["completion_tokens"] == len(streamed)


async def test_headers_of_a_stream_and_of_a_body() -> None:
    wire = Wire(fake("x"))
    response = await wire.post(CHAT, {"messages": MESSAGES, "stream": True}, headers={"x-request-id": "mine-1"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "mine-1"
    response = await wire.post(CHAT, {"messages": MESSAGES}, headers={"x-request-id": "not sane\t"})
    assert response.headers["x-request-id"].startswith("req_")
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_logprobs_are_finite_and_carry_bytes() -> None:
    wire = Wire(fake("Hi 😀"))
    body = await wire.ask(CHAT, messages=MESSAGES, logprobs=True)
    entries = body["choices"][0]["logprobs"]["content"]
    assert body["choices"][0]["logprobs"]["refusal"] is None
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Hi 😀<|end|>"
    wire = Wire(fake("", ends=False))
    wire.engine.speak = lambda _: [7, 15, 16]
    body = await wire.ask(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=2)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-9999.0, -9999.0]
    assert [len(entry["top_logprobs"]) for entry in entries] == [3, 3]
    assert (await wire.ask(CHAT, messages=MESSAGES))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_ends_with_length(max_tokens: int, name: str) -> None:
    wire = Wire(fake("abcdefghijkl", bursts=(4,)))
    body = await wire.ask(CHAT, **{"messages": MESSAGES, name: max_tokens})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == max_tokens


async def test_the_default_limit_is_what_is_left_of_the_context() -> None:
    wire = Wire(fake("x"))
    await wire.ask(CHAT, messages=MESSAGES)
    request = wire.engine.requests[0]
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == CONTEXT
    await wire.ask(CHAT, messages=MESSAGES, max_completion_tokens=7, max_tokens=9)
    assert wire.engine.requests[1].sampling.max_tokens == 7


async def test_usage_with_continuous_stats_grows() -> None:
    wire = Wire(fake("abcdef"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await wire.stream(CHAT, messages=MESSAGES, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 7
    assert chunks[-1]["choices"] == []


async def test_token_ids_margins_and_detail() -> None:
    wire = Wire(fake("abcdef", bursts=(3,)))
    fields = {
        "messages": MESSAGES,
        "return_token_ids": True,
        "return_margins": True,
        "speculation": {"detail": True, "stats": True},
    }
    body = await wire.ask(CHAT, **fields)
    (choice,) = body["choices"]
    ids = [*tiny_tokenizer().encode("abcdef"), 1]
    assert choice["token_ids"] == ids
    assert choice["margins"] == [0.25] * 7
    pair = [{"depth": 1, "method": "suffix"}, {"depth": 2, "method": "suffix"}, {"depth": 0, "method": None}]
    assert choice["accepted_by"] == [*pair, *pair, {"depth": 0, "method": None}]
    assert body["prompt_token_ids"] == list(wire.engine.requests[0].prompt_token_ids)
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 2],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 4,
        "num_spec_tokens": 2,
        "acceptance_length": 7 / 3,
        "num_decode_steps": 3,
    }
    chunks = await wire.stream(CHAT, **fields)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [body["prompt_token_ids"]]
    streamed = [c for chunk in chunks for c in chunk["choices"]]
    assert [token for c in streamed for token in c.get("token_ids", [])] == ids
    assert [by for c in streamed for by in c.get("accepted_by", [])] == choice["accepted_by"]
    assert [i for i, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["metrics"] == body["metrics"]
    chunks = await wire.stream(CHAT, **fields, stream_options={"include_usage": True})
    assert [chunk.get("metrics") for chunk in chunks[-2:]] == [None, body["metrics"]]


async def test_stats_of_several_choices_are_null_and_of_none_asked_absent() -> None:
    wire = Wire(fake("ab"))
    body = await wire.ask(CHAT, messages=MESSAGES, n=2, speculation={"stats": True})
    assert body["metrics"] == {"speculative_decoding": None}
    assert "metrics" not in await wire.ask(CHAT, messages=MESSAGES)
    body = await wire.ask(CHAT, messages=MESSAGES, speculation={"stats": True, "enabled": False})
    assert body["metrics"]["speculative_decoding"]["mean_acceptance_length"] is None
    assert body["metrics"]["speculative_decoding"]["acceptance_length"] == 1.0
    assert wire.engine.requests[-1].speculation.enabled is False


async def test_min_tokens_lets_an_early_stop_string_through() -> None:
    wire = Wire(fake("END and END", bursts=(5,)))
    fields = {"messages": MESSAGES, "stop": "END", "min_tokens": 4}
    body = await wire.ask(CHAT, **fields)
    assert body["choices"][0]["message"]["content"] == "END and " == joined(await wire.stream(CHAT, **fields))


async def test_a_stop_string_aborts_the_engine_request() -> None:
    wire = Wire(fake("one END two", hang_after=8))
    body = await wire.ask(CHAT, messages=MESSAGES, stop=["END"])
    assert body["choices"][0]["message"]["content"] == "one "
    assert wire.engine.aborted == [f"{body['id']}-0"]
    assert wire.metrics.ends[0][0] == "stop"


async def test_what_the_template_sees() -> None:
    wire = Wire(fake("x"))
    await wire.ask(CHAT, messages=[{"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]}])
    assert prompt_of(wire) == "<|start|>system\nab<|end|>\n<|start|>assistant\n"
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": []}]
    await wire.ask(CHAT, messages=history, add_generation_prompt=False)
    assert prompt_of(wire) == "<|start|>user\nq<|end|>\n<|start|>assistant\n<|end|>\n"
    history[1] = {"role": "assistant", "content": "part"}
    await wire.ask(CHAT, messages=history, continue_final_message=True)
    assert prompt_of(wire) == "<|start|>user\nq<|end|>\n<|start|>assistant\npart"
    await wire.ask(CHAT, messages=MESSAGES, chat_template_kwargs={"enable_thinking": True, "unknown": 1})
    assert prompt_of(wire).endswith("<|start|>assistant\nthink ")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000, "{", "not JSON", '{"a": 1}'])
async def test_arguments_that_are_no_object_reach_the_template_as_they_came(arguments: str) -> None:
    wire = Wire(fake("x"))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    response = await wire.post(CHAT, {"messages": history})
    assert response.status_code == 200, response.text


async def test_a_failure_of_the_engine() -> None:
    wire = Wire(fake("abcdef", fail_after=3))
    response = await wire.post(CHAT, {"messages": MESSAGES, "n": 2})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"
    response = await wire.post(CHAT, {"messages": MESSAGES, "stream": True})
    assert response.status_code == 200
    frames = response.text.split("\n\n")
    assert frames[-2].startswith('data: {"error":{"message":')
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert wire.engine.live == {}
    assert sorted(end[0] for end in wire.metrics.ends) == ["abort", "error", "error"]
    assert wire.context.live_streams == set()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_shuts_down_ends_an_answer_with_503(stream: bool) -> None:
    wire = Wire(fake("abcdef", shut_down_after=2))
    response = await wire.post(CHAT, {"messages": MESSAGES, "stream": stream})
    assert response.status_code == (200 if stream else 503)
    assert '"code":"service_unavailable"' in response.text
    assert "[DONE]" not in response.text
    assert wire.metrics.ends[0][0] == "abort"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_over_its_time_is_aborted(stream: bool) -> None:
    wire = Wire(fake("abcdef", hang_after=3), request_timeout=0.2)
    response = await wire.post(CHAT, {"messages": MESSAGES, "stream": stream})
    assert response.status_code == (200 if stream else 408)
    assert '"code":"request_timeout"' in response.text
    assert stream or response.headers["x-should-retry"] == "false"
    assert len(wire.engine.aborted) == 1
    assert wire.metrics.ends[0][0] == "abort"


async def test_pings_come_in_silence_only() -> None:
    wire = Wire(fake("abcdef", step_seconds=0.25), ping_seconds=0.1)
    response = await wire.post(CHAT, {"messages": MESSAGES, "stream": True})
    assert response.text.startswith(": ping\n\n")
    assert response.text.count(": ping\n\n") >= 6
    quick = Wire(fake("abcdefghijklmnopqrst", step_seconds=0.02), ping_seconds=0.3)
    response = await quick.post(CHAT, {"messages": MESSAGES, "stream": True})
    assert ": ping" not in response.text


async def test_sampling_fields_reach_the_engine() -> None:
    info = tiny_info(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1})
    wire = Wire(fake("x", info=info))
    await wire.ask(CHAT, messages=MESSAGES)
    silent = wire.engine.requests[-1].sampling
    assert (silent.temperature, silent.top_k, silent.top_p, silent.repetition_penalty) == (0.6, 20, 0.9, 1.1)
    await wire.ask(
        CHAT,
        messages=MESSAGES,
        n=3,
        seed=-1,
        temperature=0,
        top_k=-1,
        top_p=0,
        min_p=0.1,
        repetition_penalty=1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100, "6": 2.5},
        stop_token_ids=[9],
        bad_words=["cat"],
        ignore_eos=True,
        min_tokens=2,
        cache_salt="tenant",
        max_tokens=4,
        speculation={"method": "suffix", "max_draft_tokens": 99},
    )
    first, second, third = (request.sampling for request in wire.engine.requests[-3:])
    assert [first.seed, second.seed, third.seed] == [choice_seed(-1, i) for i in range(3)]
    assert first.seed == (1 << 64) - 1
    assert first.temperature == 0.0
    assert (first.top_k, first.top_p, first.min_p) == (0, 1e-6, 0.1)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.0, 1.0, -1.0)
    assert first.logit_bias == ((5, -100.0), (6, 2.5))
    assert (first.stop_token_ids, first.ignore_eos, first.min_tokens, first.max_tokens) == ((9,), True, 2, 4)
    tokenizer = tiny_tokenizer()
    assert first.bad_words == (tuple(tokenizer.encode("cat")), tuple(tokenizer.encode(" cat")))
    request = wire.engine.requests[-1]
    assert (request.speculation.method, request.speculation.max_draft_tokens) == ("suffix", 16)
    assert request.cache_salt == "tenant"


async def test_metrics_see_every_token_once() -> None:
    wire = Wire(fake("abcdefgh", bursts=(3,)))
    await wire.stream(CHAT, messages=MESSAGES)
    assert sum(len(kept) for kept in wire.metrics.kept) == 9
    intervals = [interval for kept, interval in zip(wire.metrics.kept, wire.metrics.intervals, strict=True) if kept]
    assert intervals[0] is None
    assert all(interval is not None and interval >= 0 for interval in intervals[1:])
    assert len(wire.metrics.chunks) == 2
