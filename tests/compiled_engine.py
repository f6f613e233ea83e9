"""Whole engines over the compiled step: ``tiny_engine`` with strict answers, logits of which every bit counts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from compiled_models import BLOCK, POSITIONS, library, random_model
from tiny_engine import EOS, Answer, HostileDrafter, OracleDrafter, Sizes, collect, run
from tiny_heads import markov_drafter, mtp_drafter, own_kv_drafter, streaming_drafter
from torch import nn

from engine.assembly import assemble
from engine.backend import CompiledBackend
from engine.config import EngineConfig, EngineSettings, ModelConfig, SpeculationConfig
from engine.core import EngineCore
from engine.loading import LoadedModel
from engine.loading.heads import output_head
from engine.sampling_params import EngineRequest, SpeculationParams
from engine.spec_decode.controller import Controller
from engine.spec_decode.drafter import Drafter, KvOwner
from engine.spec_decode.medusa import MedusaDrafter
from engine.spec_decode.suffix import SuffixDrafter
from heads.lm_head import DraftLmHead
from heads.medusa import MedusaHeads

DRAFTERS = ("suffix", "hostile", "medusa", "markov", "mtp", "mtp_own", "streaming", "all")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within, an engine is made with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loaded_model(family: str, **changes: Any) -> LoadedModel:
    """A copy of ``random_model`` as the loader would hand it over."""
    model = copy.deepcopy(random_model(family, **changes))
    return LoadedModel(
        model=model,
        path=Path("tiny"),
        digest="0" * 64,
        name=family,
        architecture=type(model).__name__,
        eos_token_ids=(EOS,),
        max_position_embeddings=POSITIONS,
    )


@functools.cache
def backend(family: str, is_int8: bool) -> CompiledBackend:
    return CompiledBackend(loaded_model(family), library(), "int8" if is_int8 else "none")


def compiled_core(
    family: str, is_int8: bool, drafters: Sequence[Drafter] = (), sizes: Sizes | None = None
) -> EngineCore:
    """Like ``tiny_core``; its KV cache starts as NaN, so that what was not computed cannot pass unseen."""
    sizes = dataclasses.replace(sizes or Sizes(), block_size=BLOCK)
    made = backend(family, is_int8)
    block_bytes = sum(shape.bytes_per_token(torch.float32) for shape in made.shapes) * BLOCK
    block_bytes += sum(
        drafter.block_bytes(BLOCK, torch.float32) for drafter in drafters if isinstance(drafter, KvOwner)
    )
    settings = EngineSettings(
        ModelConfig(path="tiny"),
        EngineConfig(
            device="cpu",
            kv_cache_memory=block_bytes * sizes.num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            prefix_caching=sizes.prefix_caching,
        ),
        SpeculationConfig(max_draft_tokens=sizes.max_draft_tokens, verifier=sizes.verifier),  # type: ignore[arg-type]
    )
    core = assemble(made, settings, lambda _: None, drafters=list(drafters), measures_steps=False).core
    core.scheduler.controller = Controller(None)
    spoil(core, range(sizes.num_blocks))
    return core


def spoil(core: EngineCore, blocks: Sequence[int]) -> None:
    """Overwrites the KV of ``blocks`` with NaN."""
    cache: Any = core._runner._kv  # type: ignore[attr-defined]
    for array in (cache.keys, cache.values):  # [layers, kv_heads, slots * head_dim]; a block is one tile here
        array.reshape(*array.shape[:2], cache.num_tiles, -1)[:, :, list(blocks)] = float("nan")


def medusa(family: str, *, coupling: bool = True) -> MedusaDrafter:
    """Random heads over the model's own output head."""
    torch.manual_seed(3)
    heads = MedusaHeads(64, 3).eval().requires_grad_(False)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    head = DraftLmHead(output_head(random_model(family)), torch.arange(0, 60, 2))
    return MedusaDrafter(heads, head, coupling=coupling, eos_token_ids=(EOS,))


def drafters(kind: str, family: str, truth: dict[str, Answer], seed: int) -> list[Drafter]:
    oracle = OracleDrafter({name: answer.ids for name, answer in truth.items()}, seed)
    return {
        "none": [],
        "suffix": [SuffixDrafter()],
        "hostile": [HostileDrafter(seed)],
        "medusa": [medusa(family, coupling=seed % 2 == 0)],
        "markov": [markov_drafter(random_model(family), coupling=seed % 2 == 0, draft_vocab=60)],
        "mtp": [mtp_drafter(random_model(family), coupling=seed % 2 == 0, draft_vocab=60)],
        "mtp_own": [own_kv_drafter(random_model(family), coupling=seed % 2 == 0, draft_vocab=60)],
        "streaming": [streaming_drafter(random_model(family), coupling=seed % 2 == 0, draft_vocab=60)],
        "oracle": [oracle],
        "all": [
            SuffixDrafter(),
            oracle,
            HostileDrafter(seed),
            medusa(family),
            markov_drafter(random_model(family), draft_vocab=60),
            mtp_drafter(random_model(family), draft_vocab=60),
            streaming_drafter(random_model(family), draft_vocab=60),
        ],
    }[kind]


@functools.cache
def _plain(family: str, is_int8: bool, requests: tuple[EngineRequest, ...]) -> dict[str, Answer]:
    core = compiled_core(family, is_int8, (), Sizes(prefix_caching=False, max_draft_tokens=1))
    answers: dict[str, Answer] = {}
    for one in requests:
        answers |= run(core, [dataclasses.replace(one, speculation=SpeculationParams(enabled=False))])
    return answers


def plain_answers(family: str, is_int8: bool, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """Each request alone, neither drafted nor cached, on one thread: the reference."""
    return _plain(family, is_int8, tuple(requests))


def run_counting(core: EngineCore, requests: Sequence[EngineRequest], *, spoils: bool) -> tuple[dict[str, Answer], int]:
    """Like ``run``; answers and the number of preemptions. spoils: every free block is overwritten after each step."""
    answers: dict[str, Answer] = {}
    preemptions = 0
    for one in requests:
        core.add(one)
    while core.has_work:
        step = core.step()
        preemptions += step.stats.preemptions
        collect(answers, step.outputs)
        if spoils:
            spoil(core, list(core.scheduler.pool._free))
    return answers, preemptions


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """The same tokens, ends and log-probabilities, bit for bit."""
    for name, reference in expected.items():
        answer = found[name]
        assert answer.ids == reference.ids, name
        assert answer.finish_reason == reference.finish_reason, name
        assert [token.logprob for token in answer.tokens] == [token.logprob for token in reference.tokens], name
        assert [token.margin for token in answer.tokens] == [token.margin for token in reference.tokens], name
        prompts = [[one.prompt_logprobs for one in x.outputs if one.prompt_logprobs] for x in (answer, reference)]
        assert prompts[0] == prompts[1], name
