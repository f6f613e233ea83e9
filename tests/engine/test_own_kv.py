"""Modules with a KV layer of their own, inside whole engines: after every step the layer holds what the verified tokens
alone say, and every pass of drafting computes what training's forward does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from compiled_engine import backend as compiled_backend
from compiled_engine import compiled_core
from compiled_models import BLOCK, random_model
from tiny_engine import (
    VOCAB,
    Answer,
    OracleDrafter,
    Sizes,
    as_loaded,
    assert_all_free,
    collect,
    request,
    run,
    tiny_core,
    tiny_model,
)
from tiny_heads import FusedModule, own_kv_drafter, random_mtp

from engine.backend import Backend, RunnerNeeds, TransformersBackend
from engine.batch import build_batch
from engine.core import EngineCore
from engine.loading.heads import output_head
from engine.request import Request
from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.scheduler import ScheduledRequest
from engine.spec_decode.draft_block import Committed, DepthRows
from engine.spec_decode.drafter import CommittedRows, HiddenStates
from engine.spec_decode.own_kv_drafter import OwnKvDrafter
from engine.spec_decode.tree import DraftTree
from engine.spec_decode.watched import WatchedDrafter
from heads.batch import make_batch
from heads.data import Answer as Text
from heads.data import Ask, Context
from heads.lm_head import DraftLmHead
from heads.mtp import MtpModule
from heads.recursive import OwnKvModule

pytestmark = pytest.mark.usefixtures("no_drafter_fails")

KINDS = ("transformers", "float", "int8", "fused", "fused float")
_CHECKED = 0.1  # share of the drafted rows that are computed again
SAMPLING = SamplingParams(temperature=0.9, ignore_eos=True)


class Engine:
    """A core that drafts with a module and an oracle, and what its layer and its passes must be."""

    def __init__(self, kind: str, truth: dict[str, list[int]], sizes: Sizes) -> None:
        self.is_compiled = kind in ("float", "int8", "fused float")
        self.is_int8 = kind == "int8"
        self._truth = truth
        model = random_model("llama") if self.is_compiled else tiny_model("llama")
        self.backend: Backend = (
            compiled_backend("llama", self.is_int8)
            if self.is_compiled
            else TransformersBackend(as_loaded(copy.deepcopy(model)), packs=False)
        )
        self.module: Any = FusedModule(model) if kind.startswith("fused") else random_mtp(model, kv="own")
        self.lm_head = DraftLmHead(output_head(model), torch.arange(0, VOCAB, 2))
        self.drafter = OwnKvDrafter(copy.deepcopy(self.module), copy.deepcopy(self.lm_head), method="mtp")
        drafters = [OracleDrafter(truth, seed=4), self.drafter]
        self.block_size = BLOCK if self.is_compiled else sizes.block_size
        make: Callable[..., EngineCore] = (
            (lambda *given: compiled_core("llama", self.is_int8, *given))
            if self.is_compiled
            else (lambda *given: tiny_core("llama", *given))
        )
        self.core = make(drafters, sizes)
        self.block: Any = self.drafter._own
        self.checked = {"entries": 0, "passes": 0, "deepest": 0}
        self._wholes: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, ...], HiddenStates] = {}
        self._draw = random.Random(7)
        self.spoil(range(self.core.scheduler.pool.num_blocks))
        begin = self.block.begin
        self.block.begin = lambda requests: _WatchedPass(self, requests, begin(requests))

    def spoil(self, blocks: Sequence[int]) -> None:
        """Overwrites all that lies in ``blocks``."""
        states = self.block._states._states
        states[list(blocks)] = float("nan")
        if hasattr(self.block, "base"):
            cache = self.block.base.owner
            for array in (cache.keys, cache.values):
                array.reshape(*array.shape[:2], cache.num_tiles, -1)[:, :, list(blocks)] = float("nan")
            return
        slots = [block * self.block_size + at for block in blocks for at in range(self.block_size)]
        for tensor in (*self.block._cache.keys, *self.block._cache.values):
            tensor[:, slots] = float("nan")

    def entries(self, block_ids: Sequence[int], length: int, block: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values of positions 1 to length - 1, [entries, kv_heads, dim], as the engine's block has them."""
        block = block or self.block
        if hasattr(block, "base"):
            slots = [block_ids[at // BLOCK] * BLOCK + at % BLOCK for at in range(1, length)]
            found: tuple[torch.Tensor, torch.Tensor] = block.base.owner.read(0, np.array(slots))
            return found
        keys, values = block.entries_of(Committed(block_ids, length))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def hidden(self, tokens: Sequence[int]) -> HiddenStates:
        """States of a text, computed in one piece with all that will follow by a runner that knows nothing else."""
        count = len(tokens)
        whole = next((text for text in self._wholes if text[:count] == tuple(tokens)), tuple(tokens))
        if whole not in self._known:
            blocks = range(-(-len(whole) // self.block_size) + 1)
            needs = RunnerNeeds(len(blocks) * self.block_size, self.block_size, True, self.module.hidden_layers)
            one = Request.from_source(EngineRequest("r", (*whole, 0), SAMPLING), ())
            one.block_ids = list(blocks)
            item = ScheduledRequest(one, 0, len(whole), DraftTree())
            found = self.backend.make_runner(needs).forward(build_batch([item], [None])).hidden
            assert found is not None
            self._known[whole] = found
        found = self._known[whole]
        return HiddenStates(
            found.final[:count].float(), {layer: states[:count].float() for layer, states in found.layers.items()}
        )

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        hidden = self.hidden(tokens)
        found: torch.Tensor = self.module.condition(hidden.final, hidden.layers)
        return found

    @torch.inference_mode()
    def check_entries(self) -> None:
        for one in self.core.scheduler.running:
            length = one.num_computed_tokens
            if length < 2:
                continue
            tokens = one.token_ids[:length]
            states = self.states(tokens)
            wanted = self.module.entries(states[:-1], torch.tensor(tokens[1:]), torch.arange(1, length))
            if self.is_int8:
                wanted = self.entries(range(8), length, self._afresh(tokens))
            for found, expected in zip(self.entries(one.block_ids, length), wanted, strict=True):
                assert_close(found, expected, 0.0 if self.is_int8 else 1e-5)
            last = self.block.last_state(Committed(one.block_ids, length))
            assert_close(last, states[-1], 0.0 if self.is_int8 else 1e-5)
            self.checked["entries"] += length

    def check_pass(self, text: Sequence[int], path: Sequence[int], logits: torch.Tensor) -> None:
        """text: verified tokens, the last of which has no KV yet. path: tokens drafted below it."""
        if self._draw.random() > _CHECKED:
            return
        if self.is_int8:
            wanted = self._by_another_block(text, path)
        elif isinstance(self.module, MtpModule):
            wanted = self._by_training(text, path)
        else:
            wanted = by_definition(self.module, self.lm_head, self.states(text[:-1]), [*text, *path])
        assert_close(logits, wanted, 0.0 if self.is_int8 else 1e-4)
        self.checked["passes"] += 1
        self.checked["deepest"] = max(len(path) + 1, self.checked["deepest"])

    @functools.cached_property
    def _other(self) -> Any:
        """A block like the engine's, of eight blocks of KV."""
        runner = self.backend.make_runner(RunnerNeeds(8 * BLOCK, BLOCK, True, passes=1))
        return runner.make_own_block(copy.deepcopy(self.module), copy.deepcopy(self.lm_head), self.backend.head_compute)

    def _afresh(self, tokens: Sequence[int]) -> Any:
        """``_other`` with the entries of a text, made at once: int8 rounds, so that training computes other numbers,
        but a row's are the same bits among whatever rows."""
        self._other.store(self.hidden(tokens), [CommittedRows(0, range(len(tokens)), tokens, range(8))])
        return self._other

    def _by_another_block(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        block, before = self._afresh(text[:-1]), Committed(range(8), len(text) - 1)
        drafting, states, logits = block.begin([before]), block.last_state(before)[None], torch.empty(0)
        for depth, token in enumerate([text[-1], *path], start=1):
            states, logits = drafting.run(DepthRows(states, [token], [0], [range(depth)], depth))
        return logits[0]

    def _by_training(self, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        states, rest = self.states(text[:-1]), (*text[1:], *path, 0)
        row = len(states) - 1  # the state that chose the last token of the text
        # What was drafted has no states of the base model, and none matters.
        behind = torch.full((len(rest) - len(states), states.shape[1]), 99.0)
        none = torch.empty(0, self.module.kv_heads, self.module.key_dim)
        context = Context(none, none, torch.tensor(text[:1]), torch.empty(0, states.shape[1]))
        answer = Text(Ask((text[0],), 0.0, 0), rest, torch.cat([states, behind]), context)
        outputs = list(self.module.outputs(make_batch([answer], self.lm_head)))[len(path)]
        found: torch.Tensor = self.module.logits(self.lm_head, outputs, len(path) + 1)[row]
        return found

    def run(self, requests: Sequence[EngineRequest], *, spoils: bool = False) -> tuple[dict[str, Answer], int]:
        """Answers and the number of preemptions; everything is checked after each step."""
        answers: dict[str, Answer] = {}
        preemptions = 0
        for one in requests:
            self._wholes.append((*one.prompt_token_ids, *self._truth[one.request_id]))
            self.core.add(one)
        while self.core.has_work:
            step = self.core.step()
            preemptions += step.stats.preemptions
            collect(answers, step.outputs)
            self.check_entries()
            if spoils:
                self.spoil(list(self.core.scheduler.pool._free))
        assert_all_free(self.core)
        return answers, preemptions


def assert_close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=bound * max(1.0, float(wanted.abs().max())))


class _WatchedPass:
    """Checks every row."""

    def __init__(self, engine: Engine, requests: Sequence[Committed], inner: Any) -> None:
        self._engine = engine
        self._inner = inner
        self._texts = []
        self._tokens: list[list[int]] = [[] for _ in requests]
        for one in requests:
            owners = [r for r in engine.core.scheduler.running if r.block_ids == list(one.block_ids)]
            (owner,) = owners
            assert one.length == owner.num_tokens - 1
            self._texts.append(list(owner.token_ids))

    @torch.inference_mode()
    def run(self, rows: DepthRows) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = self._inner.run(rows)
        for row, owner in enumerate(rows.owners):
            self._tokens[owner].append(rows.tokens[row])
            path = [self._tokens[owner][at] for at in rows.paths[row]]
            assert path[0] == self._texts[owner][-1]
            self._engine.check_pass(self._texts[owner], path[1:], logits[row])
        return states, logits


def by_definition(
    module: OwnKvModule, lm_head: DraftLmHead, states: torch.Tensor, tokens: Sequence[int]
) -> torch.Tensor:
    """Logits below the last of ``tokens``: one row a depth over entries that are made from scratch.

    states: [n, hidden], verified, of the first n tokens."""
    count = len(states)
    known = torch.tensor(tokens[1:count], dtype=torch.long)
    keys, values = module.entries(states[:-1], known, torch.arange(1, count))
    entries = [list(keys), list(values)]

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        entries[0].append(keys[0])
        entries[1].append(values[0])
        groups = queries.shape[1] // module.kv_heads
        k, v = (torch.stack(part).repeat_interleave(groups, 1) for part in entries)
        shares = torch.softmax(torch.einsum("hd,ehd->he", queries[0], k) * module.scale, dim=-1)
        return torch.einsum("he,ehd->hd", shares, v)[None]

    state = outputs = states[-1:]
    for position in range(count, len(tokens)):
        state, outputs = module.step(state, torch.tensor([tokens[position]]), torch.tensor([position]), attend)
    return module.logits(lm_head, outputs, len(tokens) - count)[0]


def plain_ids(kind: str, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """What the model answers, each request alone."""
    ids = {}
    for one in requests:
        off = dataclasses.replace(one, speculation=SpeculationParams(enabled=False))
        sizes = Sizes(prefix_caching=False)
        core = (
            compiled_core("llama", kind == "int8", (), sizes)
            if kind in ("float", "int8", "fused float")
            else tiny_core("llama", (), sizes)
        )
        ids |= {name: answer.ids for name, answer in run(core, [off]).items()}
    return ids


def made_up(seed: int, lengths: Sequence[int], max_tokens: int, shared: int = 0) -> list[EngineRequest]:
    draw = random.Random(seed)
    beginning = [draw.randrange(VOCAB - 1) for _ in range(shared)]
    return [
        request(
            f"r{index}",
            beginning[:length] + [draw.randrange(VOCAB - 1) for _ in range(length - shared)],
            dataclasses.replace(SAMPLING, seed=index, max_tokens=max_tokens),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_requests_with_accepted_and_rejected_trees(kind: str) -> None:
    """Prompts come in chunks of any size; one request is not drafted for, one begins with a single token."""
    requests = made_up(1, [1, 2, 23, 40], 16)
    requests[2] = dataclasses.replace(requests[2], speculation=SpeculationParams(enabled=False))
    truth = plain_ids(kind, requests)
    engine = Engine(kind, truth, Sizes(max_num_batched_tokens=22))
    answers, _ = engine.run(requests)
    assert {name: answer.ids for name, answer in answers.items()} == truth
    assert sum(answer.accepted for answer in answers.values()) > 20
    assert engine.checked["passes"] > 10
    assert engine.checked["deepest"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_bring_the_entries_along(kind: str) -> None:
    """Of a request that went on after its prompt, and of one that was not drafted for; one token stays to be computed,
    or many do."""
    size = BLOCK if kind in ("float", "int8", "fused float") else 4
    first = made_up(2, [2 * size + 3, size + 1], 12, shared=size)
    first[1] = dataclasses.replace(first[1], speculation=SpeculationParams(enabled=False))
    truth = plain_ids(kind, first)
    whole = [[*one.prompt_token_ids, *truth[one.request_id]] for one in first]
    prompts = [whole[0][: 2 * size + 1], whole[0][: 2 * size + 9], whole[1][: size + 12], [*whole[1][:size], 3, 5, 7]]
    later = [
        request(f"s{index}", prompt, dataclasses.replace(SAMPLING, seed=9 + index, max_tokens=7))
        for index, prompt in enumerate(prompts)
    ]
    truth |= plain_ids(kind, later)
    engine = Engine(kind, truth, Sizes())
    engine.run(first)
    free = [block for block in engine.core.scheduler.pool._free if not engine.core.scheduler.pool._blocks[block].digest]
    engine.spoil(free)
    answers, _ = engine.run(later)
    assert {name: answer.ids for name, answer in answers.items()} == {f"s{i}": truth[f"s{i}"] for i in range(4)}
    hits = [answers[f"s{i}"].outputs[0].num_cached_tokens for i in range(4)]
    assert hits == [2 * size, (2 * size + 8) // size * size, (size + 11) // size * size, size]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("kind", ["transformers", "float"])
def test_preempted_requests_are_computed_again(kind: str, prefix_caching: bool) -> None:
    requests = made_up(3, [20, 20, 21, 21, 22], 28 if kind == "float" else 16)
    truth = plain_ids(kind, requests)
    blocks = 11 if kind == "float" else 29
    sizes = Sizes(num_blocks=blocks, prefix_caching=prefix_caching, max_num_batched_tokens=120)
    engine = Engine(kind, truth, sizes)
    answers, preemptions = engine.run(requests, spoils=not prefix_caching)
    assert preemptions > 1
    assert {name: answer.ids for name, answer in answers.items()} == truth


def test_a_watched_drafter_stores_what_the_inner_one_does() -> None:
    core = tiny_core("llama", [WatchedDrafter(own_kv_drafter(tiny_model("llama")))])
    inner: Any = core.drafting.drafters[0]._inner._own  # type: ignore[attr-defined]
    inner._cache.keys[0].fill_(float("nan"))
    run(core, made_up(4, [11], 4))
    computed = 11 + 4 - 1
    assert int(inner._cache.keys[0].isfinite().all(dim=2).all(dim=0).sum()) >= computed - 1
