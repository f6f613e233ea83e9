"""The official client, sync and async, streamed and not, against a real port."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from wire_app import Wire, fake

TEXT = "Hello 😀, the cat 世界"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    with Wire(fake(TEXT, bursts=(3, 1))).live() as url:
        yield f"{url}/v1"


def test_sync_chat(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content or []) == answer.usage.completion_tokens
        assert answer._request_id
        with client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage == answer.usage


def test_the_stream_helper(url: str) -> None:
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream,
    ):
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].message.role == "assistant"


async def test_async_chat(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [TEXT, TEXT]


async def test_async_completions(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=100, logprobs=2)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        stream = await client.completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


def test_errors_have_the_clients_own_classes(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=2.5)
        assert (bad.value.code, bad.value.param) == ("decimal_above_max_value", "temperature")
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"


def test_a_failure_in_the_stream_is_an_api_error() -> None:
    with (
        Wire(fake(TEXT, fail_after=4)).live() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream,
        pytest.raises(openai.APIError) as failure,
    ):
        list(stream)
    assert failure.value.code == "internal_error"
