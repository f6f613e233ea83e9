"""``headlong bench`` against our API around a fake engine, and against servers that are not ours."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner, Result
from wire_app import Wire, tiny_info, tiny_tokenizer

from engine.outputs import RequestOutput
from engine.sampling_params import EngineRequest
from server.bench.client import Measured, Sampling, ServerFault, measure
from server.bench.datasets import DATASETS, DatasetError, load_dataset
from server.bench.side import Peer, PeerError, PeerSide, parse_peers, peer_side
from server.cli.main import app

ANSWER = "the cat sat on the mat and the hat"
SAMPLING = Sampling(max_tokens=32, temperature=0.5, seed=9)
# All that OpenAI's own reference knows, and nothing of ours.
PLAIN = {"model", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options"}


@dataclass
class HonestEngine(FakeEngine):
    """Drafts only for those who ask for it."""

    def _outputs(self, request: EngineRequest) -> list[RequestOutput]:
        asked = request.speculation.enabled
        return FakeEngine._outputs(self if asked else replace(self, bursts=(1,)), request)


def ours(**options: Any) -> Wire:
    ids = [*tiny_tokenizer().encode(ANSWER), 1]
    return Wire(HonestEngine(tiny_info(), lambda _: ids, **({"bursts": (3,)} | options)))


def delta(text: str | None, finish: str | None = None, **changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **changes}, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": 3, "total_tokens": tokens + 3}}


ROLE = delta(None, role="assistant")
WHOLE = [ROLE, delta("the "), delta("cat"), delta("", "stop"), usage(5)]


@dataclass
class OtherServer:
    """Speaks OpenAI's protocol as other servers do: answers each question with ``chunks``.

    models: what it lists; None: it has no list. refuses_after: questions after which it answers with 503.
    """

    chunks: Sequence[dict[str, Any]] = tuple(WHOLE)
    models: Sequence[Any] | None = ({"id": "big", "n_ctx": 7},)
    refuses_after: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def live(self) -> Any:
        wire = object.__new__(Wire)
        wire.app = self.app  # type: ignore[assignment]
        return wire.live()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://other")

    async def _models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        if self.models is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"object": "list", "data": list(self.models)})

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refuses_after is not None and len(self.asked) > self.refuses_after:
            return JSONResponse({"error": {"message": "out of slots"}}, 503)
        frames = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks)
        return Response(f": ping\n\n{frames}data: [DONE]\n\n", media_type="text/event-stream")


async def asked_of(server: OtherServer) -> Measured:
    async with server.client() as client:
        side = await peer_side(Peer("other", "http://other", None), client, SAMPLING)
        return await side.answer("one", "salt")


async def test_a_peer_is_asked_what_openai_knows_and_no_more() -> None:
    server = OtherServer()
    found = await asked_of(server)
    (body,) = server.asked
    assert set(body) == PLAIN
    assert body["model"] == "big"
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (32, 0.5, 9)
    assert body["stream_options"] == {"include_usage": True}
    assert (found.text, found.completion_tokens, found.has_usage, found.finish_reason) == ("the cat", 5, True, "stop")


async def test_an_opening_chunk_without_text_is_not_the_first_token() -> None:
    found = await asked_of(OtherServer())
    assert len(found.chunk_times) == 2
    assert len(found.gaps) == 1
    assert 0 < found.first_token <= found.total


@pytest.mark.parametrize(
    ("chunks", "tokens", "text"),
    [
        # Text with the role, usage with the last text.
        ([delta("the", role="assistant"), delta(" cat", "length") | {"usage": usage(9)["usage"]}], 9, "the cat"),
        # A null usage on every chunk until the last.
        ([chunk | {"usage": chunk.get("usage")} for chunk in WHOLE], 5, "the cat"),
        # No usage at all: chunks with text are counted.
        (WHOLE[:-1], 2, "the cat"),
        # Thoughts are tokens too.
        ([delta(None, reasoning_content="hm"), delta("cat"), delta(None, "stop")], 2, "cat"),
    ],
)
async def test_other_shapes_of_chunks(chunks: list[dict[str, Any]], tokens: int, text: str) -> None:
    found = await asked_of(OtherServer(chunks))
    assert (found.completion_tokens, found.text) == (tokens, text)
    assert len(found.chunk_times) == 2


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        (WHOLE[:2], "without a finish reason"),
        ([*WHOLE[:2], {"error": {"message": "out of memory"}}], "out of memory"),
        ([{"choices": None}], "unforeseen shape"),
        ([*WHOLE[:4], {"choices": [], "usage": {"total_tokens": 3}}], "unforeseen shape"),
        ([*WHOLE[:4], {"choices": [], "usage": {"completion_tokens": "5", "prompt_tokens": 3}}], "'5' is no number"),
        ([*WHOLE[:4], {"choices": [], "usage": {"completion_tokens": -5, "prompt_tokens": 3}}], "-5 is no number"),
    ],
)
async def test_a_broken_stream_of_a_peer_is_a_fault(chunks: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ServerFault, match=reason):
        await asked_of(OtherServer(chunks))


async def test_a_server_that_only_looks_like_ours_is_a_fault() -> None:
    async with OtherServer([{"choices": [{"index": 0, "delta": {"content": ["the"]}}]}]).client() as client:
        with pytest.raises(ServerFault, match="unforeseen shape"):
            await measure(client, "one", SAMPLING, speculate=True)


async def named(server: OtherServer, model: str | None) -> PeerSide:
    async with server.client() as client:
        return await peer_side(Peer("other", "http://other", model), client, SAMPLING)


async def test_the_model_of_a_peer() -> None:
    two = OtherServer(models=[{"id": "first", "a": 1}, {"id": "second", "b": 2}])
    assert (await named(two, None)).model == "first"
    second = await named(two, "second")
    assert (second.model, second.facts) == ("second", {"id": "second", "b": 2})
    assert (await named(OtherServer(models=None), "mine")).model == "mine"
    for server in (OtherServer(models=None), OtherServer(models=[])):
        with pytest.raises(ServerFault, match="other=URL#MODEL"):
            await named(server, None)
    with pytest.raises(ServerFault, match="as OpenAI does"):
        await named(OtherServer(models=["big"]), None)


def test_peers_are_named() -> None:
    assert parse_peers(["a=http://x:1/v1", "b=http://y#org/model"]) == [
        Peer("a", "http://x:1/v1", None),
        Peer("b", "http://y", "org/model"),
    ]
    for texts, reason in (
        (["http://x"], "NAME=URL"),
        (["=http://x"], "NAME=URL"),
        (["a="], "NAME=URL"),
        (["on=http://x"], "'on'"),
        (["a=http://x", "a=http://y"], "'a'"),
    ):
        with pytest.raises(PeerError, match=reason):
            parse_peers(texts)


def bench(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--url", url, *arguments])


def cells(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["load"], row["side"]) for row in report["rows"]]


def test_a_whole_run_with_a_peer(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["headlong", "bench", "--api-key", "open-sesame", "--seed", "5"])
    wire, server, out = ours(), OtherServer(), tmp_path / "results"
    with wire.live() as url, server.live() as other:
        result = bench(
            url, "--dataset", str(prompts), "--clients", "1,4", "--rounds", "2", "--max-tokens", "64", "--seed", "5",
            "--peer", f"other={other}/v1", "--note", "by hand", "--api-key", "open-sesame", "--out", str(out),
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    sides = ("on", "off", "other")
    assert cells(report) == [(load, side) for load in ("1 client", "4 clients") for side in sides]
    assert [(row["load"], row["against"]) for row in report["ratios"]] == [
        (load, side) for load in ("1 client", "4 clients") for side in sides[1:]
    ]
    for ratio in report["ratios"]:
        speed = ratio["total_tokens_per_second"]
        assert len(speed["rounds"]) == 2
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    num_tokens = len(tiny_tokenizer().encode(ANSWER)) + 1
    on, off, peer = report["rows"][:3]
    assert (on["requests"], on["completion_tokens"]) == (6, 6 * num_tokens)
    assert report["rows"][3]["requests"] == 8
    assert on["acceptance"]["length"] == pytest.approx(num_tokens / -(-num_tokens // 3))
    assert on["acceptance"]["length_without_loops"] == pytest.approx(on["acceptance"]["length"])
    assert on["acceptance"]["by_drafter"]["suffix"]["accepted_tokens"] > 0
    assert off["acceptance"] is peer["acceptance"] is None
    assert (peer["completion_tokens"], peer["errors"]) == (30, 0)
    assert [row["identical"] for row in report["ratios"] if row["against"] == "off"] == [6, 8]
    # What makes it a report.
    assert report["command"] == ["headlong", "bench", "--api-key", "...", "--seed", "5"]
    assert report["sampling"] == {"max_tokens": 64, "temperature": 0.0, "seed": 5, "margins": False}
    digest = hashlib.sha256(b"one\0two\0three").hexdigest()
    assert report["datasets"] == {str(prompts): {"prompts": 3, "sha256": digest}}
    assert report["headlong"] == report["server"]["version"]
    assert report["server"]["model"]["methods"] == ["suffix"]
    assert report["peers"] == {"other": {"url": other, "model": "big", "facts": {"id": "big", "n_ctx": 7}}}
    assert report["notes"] == ["by hand"]
    assert report["rounds"] == 2
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".md", ".svg"]
    # A warm-up a load, then 3 or 4 requests in each of two rounds; half of ours with speculation.
    assert Counter(request.speculation.enabled for request in wire.engine.requests) == {True: 16, False: 16}
    assert len(server.asked) == 16
    assert all(set(body) == PLAIN for body in server.asked)
    assert not any("authorization" in headers for headers in server.headers), "a peer was told our key"


def test_speculation_off_is_a_side_unless_it_is_not_wanted(prompts: Path, tmp_path: Path) -> None:
    wire, out = ours(), tmp_path / "one.json"
    with wire.live() as url:
        with_off = bench(url, "--dataset", str(prompts), "--rounds", "1", "--out", str(out))
        assert with_off.exit_code == 0, with_off.output
        assert cells(json.loads(out.read_text())) == [("1 client", "on"), ("1 client", "off")]
        wire.engine.requests.clear()
        alone = bench(url, "--dataset", str(prompts), "--rounds", "1", "--no-off", "--out", str(out))
    assert alone.exit_code == 0, alone.output
    assert cells(json.loads(out.read_text())) == [("1 client", "on")]
    assert json.loads(out.read_text())["ratios"] == []
    assert {request.speculation.enabled for request in wire.engine.requests} == {True}


def test_open_loop(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.json"
    with ours().live() as url:
        result = bench(url, "--dataset", str(prompts), "--rate", "500", "--rounds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert cells(report) == [("500 requests/s", "on"), ("500 requests/s", "off")]
    assert [(row["clients"], row["rate"], row["requests"]) for row in report["rows"]] == [(None, 500.0, 6)] * 2


def test_goodput_bounds_are_milliseconds(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.json"
    with ours().live() as url:
        for bound, share in (("0.001", 0.0), ("600000", 1.0)):
            asked = ("--dataset", str(prompts), "--rounds", "1", "--goodput-ttft", bound, "--goodput-tpot", "600000")
            assert bench(url, *asked, "--out", str(out)).exit_code == 0
            report = json.loads(out.read_text())
            assert [row["goodput"]["share"] for row in report["rows"]] == [share, share]
            assert report["goodput_bounds"] == {"ttft_ms": float(bound), "tpot_ms": 600000.0}


def test_a_peer_that_fails_is_counted_and_told(prompts: Path, tmp_path: Path) -> None:
    server, out = OtherServer(refuses_after=2), tmp_path / "one.json"
    with ours().live() as url, server.live() as other:
        asked = ("--dataset", str(prompts), "--rounds", "2", "--peer", f"other={other}", "--out", str(out))
        result = bench(url, *asked)
    assert result.exit_code == 0, result.output
    row = json.loads(out.read_text())["rows"][2]
    assert (row["requests"], row["errors"]) == (6, 5)
    assert "503: out of slots" in row["first_error"]
    assert "other: 5 of 6 requests failed, first: " in result.stdout


def test_our_failure_ends_the_run(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.json"
    with ours(fail_after=3).live() as url:
        result = bench(url, "--dataset", str(prompts), "--clients", "2", "--out", str(out))
    assert result.exit_code == 1
    assert "prompt 0: the stream ended with an error" in result.stderr
    assert not out.exists()


def test_each_dataset_may_have_loads_of_its_own(prompts: Path, tmp_path: Path) -> None:
    out, short = tmp_path / "one.json", tmp_path / "short.txt"
    short.write_text("four\n")
    with ours().live() as url:
        asked = ("--dataset", str(prompts), "--dataset", f"{short}@1,3", "--clients", "2", "--clients", "2")
        result = bench(url, *asked, "--rounds", "1", "--no-off", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = [
        (Path(row["dataset"]).name, row["clients"], row["requests"]) for row in json.loads(out.read_text())["rows"]
    ]
    assert found == [("prompts.txt", 2, 3), ("short.txt", 1, 1), ("short.txt", 3, 3)]


def test_all_datasets_in_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("one\n")
    monkeypatch.setattr(
        "server.cli.bench.load_dataset", lambda name, n: replace(load_dataset(str(short), n), name=name)
    )
    out = tmp_path / "one.json"
    with ours().live() as url:
        asked = ("--dataset", "all", "--clients", "1,2,5", "--rounds", "1", "--max-tokens", "4")
        result = bench(url, *asked, "--out", str(out))
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [(row["dataset"], row["clients"]) for row in report["ratios"]] == [
        (name, clients) for name in DATASETS for clients in (1, 2, 5)
    ]
    assert set(report["datasets"]) == set(DATASETS)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--clients", "0"), "whole numbers from 1"),
        (("--clients", "1;4"), "whole numbers from 1"),
        (("--dataset", "edits@0"), "whole numbers from 1"),
        (("--rate", "0"), "a rate must be above 0"),
        (("--rate", "nan"), "a rate must be above 0"),
        (("--peer", "http://x"), "NAME=URL"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, str], reason: str) -> None:
    result = bench("http://unused", *arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.replace("│", " ").split())


def test_a_peer_that_does_not_answer_is_one_line(prompts: Path) -> None:
    with ours().live() as url:
        gone = bench(url, "--dataset", str(prompts), "--peer", "other=http://127.0.0.1:9")
        wrong = bench(url, "--dataset", str(prompts), "--peer", "other=http://host:port")
    assert "headlong: the peer other does not answer on http://127.0.0.1:9" in gone.stderr
    assert "headlong: the peer other: http://host:port is not a URL" in wrong.stderr
    assert gone.exit_code == wrong.exit_code == 1


def test_a_port_that_cannot_be_is_one_line(prompts: Path) -> None:
    url = "http://127.0.0.1:99999"
    result = bench(url, "--dataset", str(prompts))
    assert (result.exit_code, f"headlong: {url} is not a URL: the last port is 65535" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deep"),
        ('{"prompt": 3}', "text"),
    ],
)
def test_a_bad_line_of_a_dataset_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(DatasetError, match=rf"mine\.jsonl, line 2: .*{reason}"):
        load_dataset(str(file))


def test_only_a_line_feed_ends_a_line_of_a_dataset(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8-sig")
    assert load_dataset(str(file)).prompts == ("one\u2028two",)


@pytest.mark.parametrize("name", ["long-context", "shared-prefix"])
def test_long_prompts_come_with_python(name: str) -> None:
    data = load_dataset(name)
    assert len(set(data.prompts)) == len(data.prompts) >= 8
    assert all(len(prompt) > 4000 for prompt in data.prompts)
    first, second = data.prompts[:2]
    assert (first[:4000] == second[:4000]) == (name == "shared-prefix")
