"""SmolLM2 over HTTP: what a client gets, and that speculation changes nothing of it."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest
from running_server import RunningServer, running_server

from engine.compiled.build import CompiledStepError, find_compiler

EDIT = (
    "Repeat this Python code exactly, but rename `total` to `amount`. Output only the code.\n\n```python\n"
    "def add_all(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total\n\n\n"
    "def mean(numbers):\n    total = add_all(numbers)\n    return total / len(numbers)\n```"
)
PROMPTS = [EDIT, "Why is the sky blue?", "List the days of the week, twice."]


def chat(server: RunningServer, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def model_of(server: RunningServer) -> dict[str, Any]:
    model: dict[str, Any] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]
    return model


def both_ways(server: RunningServer, content: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice with speculation and without."""
    fields = {"return_token_ids": True, "return_margins": True, **fields}
    on, off = (chat(server, content, **fields, speculation={"enabled": enabled}) for enabled in (True, False))
    return on["choices"][0], off["choices"][0]


def assert_same_or_near_tie(on: dict[str, Any], off: dict[str, Any], bound: float) -> None:
    """bound: the server's margin_bound; 0, that of a deterministic runner, allows no difference."""
    for index, (one, two) in enumerate(zip(on["token_ids"], off["token_ids"], strict=False)):
        if one != two:
            assert min(on["margins"][index], off["margins"][index]) < bound, f"token {index} differs"
            return
    assert on["message"] == off["message"]
    assert on["finish_reason"] == off["finish_reason"]


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.5, "top_k": 40},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "presence": {"temperature": 0, "presence_penalty": 1.0},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8},
    "repetition": {"temperature": 0, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.7, "logit_bias": {"260": 5, "28": -100}},
    "min_tokens": {"temperature": 0.7, "min_tokens": 20},
    "ignore_eos": {"temperature": 0, "ignore_eos": True},
    "stop": {"temperature": 0, "stop": ["number", "day"]},
    "stop_ids": {"temperature": 0, "stop_token_ids": [198]},
    "bad_words": {"temperature": 0, "bad_words": ["total", "the"]},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_gives_the_same_tokens_with_and_without_speculation(server: RunningServer, name: str) -> None:
    accepted = server.metric("headlong_spec_decode_num_accepted_tokens_total")
    fields = {"seed": 11, "max_tokens": 40, "logprobs": True, "top_logprobs": 3, **PARAMETERS[name]}
    on, off = both_ways(server, EDIT, **fields)
    model = model_of(server)
    assert_same_or_near_tie(on, off, model["margin_bound"])
    if on["token_ids"] == off["token_ids"]:
        for one, two in zip(on["logprobs"]["content"], off["logprobs"]["content"], strict=True):
            assert one["logprob"] == pytest.approx(two["logprob"], abs=0.0 if model["deterministic"] else 1e-4)
    if name == "greedy":
        assert server.metric("headlong_spec_decode_num_accepted_tokens_total") > accepted + 10


def test_the_default_model_computes_in_int8_with_the_compiled_step(server: RunningServer) -> None:
    try:
        find_compiler()
    except CompiledStepError as error:
        pytest.skip(str(error))
    model = model_of(server)
    found = (model["runner"], model["quantization"], model["deterministic"], model["margin_bound"])
    assert found == ("compiled", "int8", True, 0.0)


@pytest.mark.parametrize("content", PROMPTS)
def test_streamed_equals_whole(server: RunningServer, content: str) -> None:
    fields = {"max_tokens": 48, "temperature": 0.8, "seed": 5, "n": 2}
    whole = chat(server, content, **fields)
    body = {
        "messages": [{"role": "user", "content": content}],
        **fields,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts, finishes, usage = {0: "", 1: ""}, {}, None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    finishes[choice["index"]] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["message"]["content"]
        assert finishes[choice["index"]] == choice["finish_reason"]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_curl_streams(server: RunningServer) -> None:
    curl = shutil.which("curl")
    assert curl, "curl is needed"
    body = '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"stream":true,"max_tokens":12}'
    command = [curl, "-sN", f"{server.url}/v1/chat/completions", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert all("\r" not in line and line.startswith("data: ") for line in lines[:-1])


async def test_the_openai_package_sync_and_async_streamed_and_not(server: RunningServer) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answer = client.chat.completions.create(**request, stream=False)
            with client.chat.completions.create(**request, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert answer.choices[0].message.content == text
        return text

    models = await asyncio.to_thread(httpx.get, f"{server.url}/v1/models")
    request: Any = {
        "model": models.json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_completion_tokens": 24,
    }
    sync_text = await asyncio.to_thread(ask)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(**request, stream=False)
        stream = await client.chat.completions.create(**request, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert answer.choices[0].message.content == text == sync_text


def test_a_second_turn_finds_the_first_in_the_cache(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Tell me about the town of Ulm. " * 4}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    first = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=60).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + 16
    assert cached % 16 == 0


def test_a_name_that_is_not_served_is_404(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "gpt-9", "messages": []})
    assert response.status_code in (400, 404)
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_clients_that_leave_at_random_leave_nothing_behind(server: RunningServer) -> None:
    draw = random.Random(3)
    finished = 0

    async def one(client: httpx.AsyncClient, index: int) -> int:
        body = {
            "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
            "max_tokens": draw.randint(1, 40),
            "stream": index % 3 > 0,
            "n": draw.choice([1, 1, 2]),
        }
        try:
            async with asyncio.timeout(draw.choice([0.05, 0.3, 0.8, 60])):
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                return 1
        except TimeoutError:
            return 0

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for _ in range(2):
            finished += sum(await asyncio.gather(*(one(client, index) for index in range(16))))
    assert finished > 0
    deadline = time.monotonic() + 10
    while server.metric("headlong_requests_running") + server.metric("headlong_requests_waiting"):
        assert time.monotonic() < deadline, "a request is stuck"
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.2)
    assert server.metric("headlong_kv_cache_usage_ratio") == 0
    health = await asyncio.to_thread(httpx.get, f"{server.url}/health")
    assert health.status_code == 200


def test_a_stopped_server_lets_a_stream_finish() -> None:
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 60, "ignore_eos": True, "stream": True}
    with running_server("--set", "server.drain_seconds=60") as server:
        lines = []
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    server.process.terminate()
                    time.sleep(0.2)
                    assert httpx.get(f"{server.url}/ready").status_code == 503
        assert lines[-2:] == ["data: [DONE]", ""]
        assert server.process.wait(30) == 0
