"""Whatever is wrong with a request, the answer is a 4xx OpenAI error object that names the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from wire_app import CHAT, COMPLETIONS, CONTEXT, Wire, fake, tiny_info, tiny_tokenizer

from engine.errors import EngineBusyError, EngineDeadError, InvalidRequestError

MESSAGES = [{"role": "user", "content": "hello"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


RAW = [
    (b"{", "invalid_json"),
    (b"", "invalid_json"),
    (b"[1]", "invalid_type"),
    (b'"text"', "invalid_type"),
    (b'{"messages": "\xff"}', "invalid_json"),
    (b'{"temperature": NaN}', "invalid_json"),
    (b'{"temperature": -Infinity}', "invalid_json"),
    (b'{"n": 1, "n": 2}', "invalid_json"),
    (b'{"metadata": {"a": 1, "a": 2}}', "invalid_json"),
    (b'{"model": "\\ud800"}', "invalid_json"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
]


@pytest.mark.parametrize(("raw", "code"), RAW)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bodies_that_are_not_a_json_object(path: str, raw: bytes, code: str) -> None:
    wire = Wire(fake("x"))
    error = error_of(await wire.post(path, content=raw), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert wire.metrics.rejections == ["invalid"]
    assert wire.engine.requests == []


COMMON: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": 1e999}, "temperature", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"min_p": 2}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"presence_penalty": -3}, "presence_penalty", "decimal_below_min_value"),
    ({"frequency_penalty": 3}, "frequency_penalty", "decimal_above_max_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
    ({"stream": "false"}, "stream", "invalid_type"),
    ({"stream": 0}, "stream", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 17}, "n", "integer_above_max_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"stop": {}}, "stop", "invalid_type"),
    ({"stop": ["x"] * 3 + [str(i) for i in range(64)]}, "stop", "array_above_max_length"),
    ({"stop": "x" * 1025}, "stop", "string_above_max_length"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"seed": 1 << 64}, "seed", "integer_above_max_value"),
    ({"seed": "7"}, "seed", "invalid_type"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids.[0]", "invalid_type"),
    ({"bad_words": [" "]}, "bad_words", "invalid_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "integer_above_max_value"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "invalid_type"),
    ({"stream_options": 1}, "stream_options", "invalid_type"),
    ({"speculation": True}, "speculation", "invalid_type"),
    ({"speculation": {"method": "medusa"}}, "speculation.method", "unsupported_value"),
    ({"speculation": {"method": "nonsense"}}, "speculation.method", "unsupported_value"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens", "integer_below_min_value"),
    ({"guided_json": {"type": "object"}}, "guided_json", "unsupported_parameter"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "unsupported_parameter"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "unsupported_value"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages.[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages.[0].role", "missing_required_parameter"),
    ({"messages": [*MESSAGES, {"role": "robot", "content": "x"}]}, "messages.[1].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.[0].content.[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages.[0].content.[0].type",
        "unsupported_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}]},
        "messages.[0].content.[1].text",
        "invalid_type",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.[0].tool_calls.[0].function", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"tools": [TOOL]}, "tools", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"tool_choice": TOOL}, "tool_choice", "unsupported_value"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages", "invalid_value"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x", "invalid_type"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "invalid_value"),
]
COMPLETIONS_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt", "empty_array"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [1, True]}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [1, 300]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 65}, "prompt", "array_above_max_length"),
    ({"suffix": "after"}, "suffix", "unsupported_parameter"),
    ({"best_of": 3}, "best_of", "unsupported_value"),
    ({"n": 2, "best_of": 1}, "best_of", "unsupported_value"),
    ({"logprobs": 6}, "logprobs", "integer_above_max_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "code"), COMMON + CHAT_ONLY)
async def test_chat_fields(fields: dict[str, Any], param: str, code: str) -> None:
    wire = Wire(fake("x"))
    body = json.dumps({"messages": MESSAGES} | fields).replace("Infinity", "1e999")
    error = error_of(await wire.post(CHAT, content=body.encode()), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert wire.engine.requests == []
    assert wire.metrics.rejections == ["invalid"]


@pytest.mark.parametrize(("fields", "param", "code"), COMMON + COMPLETIONS_ONLY)
async def test_completion_fields(fields: dict[str, Any], param: str, code: str) -> None:
    wire = Wire(fake("x"))
    body = json.dumps({"prompt": "hello"} | fields).replace("Infinity", "1e999")
    error = error_of(await wire.post(COMPLETIONS, content=body.encode()), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert wire.engine.requests == []


async def test_an_unknown_model_is_404() -> None:
    wire = Wire(fake("x"))
    error = error_of(await wire.post(CHAT, {"model": "gpt-4o", "messages": MESSAGES}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert wire.metrics.rejections == ["not_found"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_over_the_context_is_refused_before_any_header(stream: bool) -> None:
    wire = Wire(fake("x"))
    long = [{"role": "user", "content": "x " * 600}]
    error = error_of(await wire.post(CHAT, {"messages": long, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    error = error_of(await wire.post(COMPLETIONS, {"prompt": "x " * 600, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    exact = {"prompt": [5] * CONTEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert (await wire.post(COMPLETIONS, exact)).status_code == 200


async def test_a_body_over_the_limit_is_413_by_header_and_while_it_streams() -> None:
    wire = Wire(fake("x"), max_body_bytes=1000)
    error = error_of(await wire.post(CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}), 413)
    assert error["code"] == "request_too_large"

    async def chunks() -> Any:
        for _ in range(5):
            yield b"x" * 300

    error = error_of(await wire.post(CHAT, content=chunks()), 413)
    assert error["code"] == "request_too_large"
    assert wire.metrics.rejections == ["too_large", "too_large"]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_engine_refuses(stream: bool) -> None:
    wire = Wire(fake("x"))
    body = {"messages": MESSAGES, "stream": stream}
    wire.engine.refusal = EngineBusyError("The queue is full.", retry_after=0.2)
    response = await wire.post(CHAT, body)
    assert error_of(response, 429)["code"] == "engine_overloaded"
    assert response.headers["retry-after"] == "1"
    wire.engine.refusal = EngineBusyError("The queue is full.", retry_after=999)
    assert (await wire.post(CHAT, body)).headers["retry-after"] == "30"
    wire.engine.refusal = EngineDeadError("dead")
    response = await wire.post(CHAT, body)
    assert error_of(response, 503)["code"] == "service_unavailable"
    assert "retry-after" in response.headers
    wire.engine.refusal = InvalidRequestError("Too long.", param="prompt", code="context_length_exceeded")
    assert error_of(await wire.post(CHAT, body), 400)["param"] == "messages"
    assert error_of(await wire.post(COMPLETIONS, {"prompt": "x"}), 400)["param"] == "prompt"
    assert wire.metrics.rejections == ["overloaded", "overloaded", "overloaded", "invalid", "invalid"]
    assert wire.context.live_streams == set()


async def test_a_refusal_halfway_leaves_no_choice_behind() -> None:
    class Half(FakeEngine):
        def add(self, request: Any) -> Any:
            if len(self.requests) == 2:
                raise EngineBusyError("The queue is full.", retry_after=1)
            return super().add(request)

    wire = Wire(Half(tiny_info(), lambda _: [5, 6]))
    error_of(await wire.post(CHAT, {"messages": MESSAGES, "n": 4}), 429)
    assert len(wire.engine.aborted) == 2
    assert wire.engine.live == {}
    assert wire.metrics.ends == []


async def test_unknown_urls_methods_and_bugs_are_error_objects() -> None:
    wire = Wire(fake("x"))
    assert error_of(await wire.post("/v1/nothing", {}), 404)["code"] == "unknown_url"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(wire.app), base_url="http://test") as client:
        assert error_of(await client.get(CHAT), 405)["code"] == "method_not_allowed"

    def explode(_: Any) -> Any:
        raise RuntimeError("secret detail")

    wire.context.tokenizer.render_chat, kept = explode, wire.context.tokenizer.render_chat  # type: ignore[method-assign]
    try:
        response = await wire.post(CHAT, {"messages": MESSAGES})
    finally:
        wire.context.tokenizer.render_chat = kept  # type: ignore[method-assign]
    assert "secret" not in json.dumps(error_of(response, 500))
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]
    assert response.headers["connection"] == "close"


async def test_an_option_of_ours_that_is_misspelt_is_refused() -> None:
    wire = Wire(fake("x"))
    response = await wire.post(CHAT, {"messages": MESSAGES, "speculation": {"enable": False}})
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("speculation.enable", "unknown_parameter")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_too_many_tokens_are_refused_under_the_name_they_were_asked_by(field: str) -> None:
    wire = Wire(fake("x"))
    error = error_of(await wire.post(CHAT, {"messages": MESSAGES, field: 10**9}), 400)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_content_type_and_a_trailing_slash_are_fine(path: str) -> None:
    wire = Wire(fake("x"))
    raw = json.dumps({"messages": MESSAGES, "prompt": "p"}).encode()
    for url, headers in ((path, {}), (path + "/", {"content-type": "application/x-www-form-urlencoded"})):
        assert (await wire.post(url, content=raw, headers=headers)).status_code == 200


async def test_nulls_unknown_keys_and_values_that_mean_nothing_pass() -> None:
    wire = Wire(fake("x"))
    names = (
        "model temperature top_p n stop max_tokens logit_bias logprobs seed stream stream_options speculation "
        "response_format frequency_penalty presence_penalty user suffix best_of echo tools tool_choice prediction "
        "audio top_logprobs"
    )
    nulls = dict.fromkeys(names.split())
    assert (await wire.post(CHAT, {"messages": MESSAGES} | nulls)).status_code == 200
    assert (await wire.post(COMPLETIONS, {"prompt": "x"} | nulls)).status_code == 200
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "functions": [],
        "function_call": "none",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": True,
        "metadata": {"nested": {"a": [1]}},
        "user": "u",
        "service_tier": "auto",
        "verbosity": "low",
        "reasoning_effort": "low",
        "safety_identifier": "s",
        "some_future_field": {"x": 1},
        "stream_options": {"include_obfuscation": True, "include_usage": True},
        "stop": ["a", "b", "c", "d", "e", "f"],
    }
    body = await wire.ask(CHAT, messages=MESSAGES, **neutral)
    assert body["service_tier"] == "default"
    assert "service_tier" not in await wire.ask(CHAT, messages=MESSAGES)


async def test_a_template_that_refuses_and_a_model_without_one_are_400() -> None:
    wire = Wire(fake("x"), tokenizer=tiny_tokenizer("{{ raise_exception('roles must alternate') }}"))
    error = error_of(await wire.post(CHAT, {"messages": MESSAGES}), 400)
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]
    wire = Wire(fake("x"), tokenizer=tiny_tokenizer(None))
    refusal = error_of(await wire.post(CHAT, {"messages": MESSAGES}), 400)["message"]
    assert refusal == "This model has no chat template; use /v1/completions."
