"""The step as a whole: faults stay with their request, drafters get their states, extra rows change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_engine import (
    ARCHITECTURES,
    EOS,
    VOCAB,
    Answer,
    OracleDrafter,
    ScriptedDrafter,
    Sizes,
    assert_all_free,
    collect,
    request,
    run,
    tiny_core,
    tiny_model,
)

from engine.model_runner import ForwardResult
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.spec_decode.drafter import DraftContext, ExtraRows
from engine.spec_decode.tree import ROOT, DraftTree

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
OFF = SpeculationParams(enabled=False)
PROMPT = [5, 9, 17, 3]


def eager_states(architecture: str, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(final norm states, output of layer 0) of every position, by the model's own eager attention."""
    model: Any = tiny_model(architecture)
    model.set_attn_implementation("eager")
    seen: list[torch.Tensor] = []
    layer = model.get_decoder().layers[0]
    hook = layer.register_forward_hook(lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out))
    final = model.get_decoder()(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    hook.remove()
    model.set_attn_implementation("headlong")
    return final, seen[0].reshape(len(token_ids), -1)


class WatchingDrafter(OracleDrafter):
    """Keeps the states it was handed, with the tokens they belong to."""

    needs_hidden = True
    hidden_layers = (0,)

    def __init__(self, truth: dict[str, list[int]]) -> None:
        super().__init__(truth, seed=3, skill=0.9)
        self.seen: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        for context in contexts:
            assert context.accepted is not None
            self.seen.append((list(context.token_ids), context.accepted.final, context.accepted.layers[0]))
        return super().propose(contexts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_drafter_gets_the_states_of_the_accepted_node(architecture: str) -> None:
    plain = run(tiny_core(architecture), [request("r", PROMPT, GREEDY, OFF)])["r"].ids
    drafter = WatchingDrafter({"r": plain})
    answer = run(tiny_core(architecture, [drafter]), [request("r", PROMPT, GREEDY)])["r"]
    assert answer.ids == plain
    assert answer.accepted > 4
    final, layer = eager_states(architecture, PROMPT + plain)
    for token_ids, state, inner in drafter.seen:
        # The row whose logits chose the last token is the one of the token before it.
        torch.testing.assert_close(state, final[len(token_ids) - 2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(inner, layer[len(token_ids) - 2], rtol=1e-4, atol=1e-4)


class StreamDrafter(WatchingDrafter):
    """Adds a chain of two extra rows below the root, by token or by embedding."""

    max_extra_rows = 2

    def __init__(self, truth: dict[str, list[int]], embeddings: torch.Tensor | None) -> None:
        super().__init__(truth)
        self._embeddings = embeddings
        self.extras: list[tuple[list[int], torch.Tensor]] = []

    def extra_rows(self, context: DraftContext, tree: DraftTree) -> ExtraRows | None:
        self._asked = list(context.token_ids)
        return ExtraRows((11, 12), (ROOT, len(tree)), self._embeddings)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        for context in contexts:
            assert context.extra is not None
            self.extras.append((self._asked, context.extra.final))
        return super().propose(contexts)


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_extra_rows_are_computed_and_change_nothing(architecture: str, embedded: bool) -> None:
    plain = run(tiny_core(architecture), [request("r", PROMPT, GREEDY, OFF)])["r"].ids
    model: Any = tiny_model(architecture)
    embeddings = model.get_input_embeddings()(torch.tensor([21, 22])) if embedded else None
    drafter = StreamDrafter({"r": plain}, embeddings)
    core = tiny_core(architecture, [drafter])
    assert run(core, [request("r", PROMPT, GREEDY)])["r"].ids == plain
    assert_all_free(core)
    tokens = [21, 22] if embedded else [11, 12]
    for known, states in drafter.extras:
        final, _ = eager_states(architecture, known + tokens)
        torch.testing.assert_close(states, final[-2:], rtol=1e-4, atol=1e-4)


def test_non_finite_logits_end_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(f"r{i}", [*PROMPT, i], GREEDY) for i in range(3)]
    expected = run(tiny_core("llama"), requests)
    core = tiny_core("llama")
    inner = core._runner.forward

    def poisoned(batch: Any) -> ForwardResult:
        logits = inner(batch).logits.clone()
        for span in batch.spans:
            if span.item.request.request_id == "r1" and span.item.request.num_output_tokens == 5:
                logits[span.root_logits] = float("nan")
        return ForwardResult(logits)

    monkeypatch.setattr(core._runner, "forward", poisoned)
    found = run(core, requests)
    assert found["r1"].finish_reason == "error"
    assert found["r1"].ids == expected["r1"].ids[:5]
    assert found["r0"].ids == expected["r0"].ids
    assert found["r2"].ids == expected["r2"].ids
    assert_all_free(core)


def test_non_finite_logits_of_a_prompt_end_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    requests = [request("r0", PROMPT, GREEDY), request("r1", [*PROMPT, 8], scored)]
    expected = run(tiny_core("llama"), requests)
    core = tiny_core("llama")
    inner = core._runner.forward

    def poisoned(batch: Any) -> ForwardResult:
        logits = inner(batch).logits.clone()
        for span in batch.spans:
            if span.item.request.request_id == "r1" and span.item.start == 0:
                logits[span.first_logits] = float("nan")
        return ForwardResult(logits)

    monkeypatch.setattr(core._runner, "forward", poisoned)
    found = run(core, requests)
    assert found["r1"].finish_reason == "error"
    assert found["r0"].ids == expected["r0"].ids
    assert_all_free(core)


def test_a_failing_forward_costs_the_newest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(f"r{i}", [*PROMPT, i], GREEDY) for i in range(3)]
    expected = run(tiny_core("llama"), requests)
    core = tiny_core("llama")
    inner = core._runner.forward

    def exhausted(batch: Any) -> ForwardResult:
        if len(batch.spans) > 2:
            raise torch.OutOfMemoryError("no memory for three")
        return inner(batch)

    monkeypatch.setattr(core._runner, "forward", exhausted)
    found = run(core, requests)
    assert [found[f"r{i}"].finish_reason for i in range(3)] == ["length", "length", "error"]
    assert found["r0"].ids == expected["r0"].ids
    assert_all_free(core)


class BrokenDrafter(ScriptedDrafter):
    method = "broken"

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        raise RuntimeError("drafting went wrong")


class OutsideDrafter(ScriptedDrafter):
    """Proposes ids that no vocabulary holds."""

    method = "outside"

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        tree = DraftTree()
        tree.add(-3, tree.add(VOCAB + 7, ROOT, 0.9, self.method), 0.8, self.method)
        return [tree for _ in contexts]


@pytest.mark.parametrize("drafter", [BrokenDrafter(), OutsideDrafter()])
def test_a_broken_drafter_costs_speed_only(drafter: ScriptedDrafter) -> None:
    expected = run(tiny_core("llama"), [request("r", PROMPT, GREEDY, OFF)])
    found = run(tiny_core("llama", [drafter]), [request("r", PROMPT, GREEDY)])
    assert found["r"].ids == expected["r"].ids
    assert found["r"].finish_reason == "length"


def test_an_abort_frees_everything_in_the_next_step() -> None:
    core = tiny_core("llama")
    core.add(request("r", PROMPT, GREEDY))
    core.step()
    assert core.scheduler.pool.usage > 0
    core.abort("r")
    (output,) = core.step().outputs
    assert output.finish_reason == "abort"
    assert_all_free(core)
    core.abort("r")
    core.abort("never seen")
    assert core.step().outputs == ()


def test_eos_inside_an_accepted_run_ends_it_there() -> None:
    """A draft that goes on behind EOS must leave nothing behind it."""
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=40, logit_bias=((EOS, 5.0),))
    expected = run(tiny_core("llama"), [request("r", PROMPT, sampling, OFF)])["r"]
    assert expected.finish_reason == "stop"
    beyond = {"r": [*expected.ids, 1, 2, 3, 4]}
    core = tiny_core("llama", [OracleDrafter(beyond, seed=0, skill=1.0)])
    answers: dict[str, Answer] = {}
    core.add(request("r", PROMPT, sampling))
    while core.has_work:
        collect(answers, core.step().outputs)
    assert answers["r"].ids == expected.ids
    assert answers["r"].outputs[-1].stop_token_id == EOS
    assert_all_free(core)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_is_never_exceeded_by_a_long_draft(max_tokens: int) -> None:
    sampling = dataclasses.replace(GREEDY, max_tokens=20)
    plain = run(tiny_core("llama"), [request("r", PROMPT, sampling, OFF)])["r"].ids
    core = tiny_core("llama", [OracleDrafter({"r": plain}, seed=1, skill=1.0)])
    answer = run(core, [request("r", PROMPT, dataclasses.replace(GREEDY, max_tokens=max_tokens))])["r"]
    assert answer.ids == plain[:max_tokens]
    assert answer.finish_reason == "length"


def test_the_context_ends_an_answer() -> None:
    prompt = [1 + i % 50 for i in range(90)]
    sampling = dataclasses.replace(GREEDY, max_tokens=50)
    plain = run(tiny_core("llama"), [request("r", prompt, sampling, OFF)])["r"]
    assert (len(plain.ids), plain.finish_reason) == (6, "length")
    core = tiny_core("llama", [OracleDrafter({"r": [*plain.ids, 3, 3, 3]}, seed=1, skill=1.0)])
    assert run(core, [request("r", prompt, sampling)])["r"].ids == plain.ids


def test_logprobs_agree_with_and_without_drafts() -> None:
    sampling = SamplingParams(temperature=0.9, seed=9, max_tokens=20, logprobs=4, ignore_eos=True)
    plain = run(tiny_core("llama"), [request("r", PROMPT, sampling, OFF)])["r"]
    core = tiny_core("llama", [OracleDrafter({"r": plain.ids}, seed=2)])
    found = run(core, [request("r", PROMPT, sampling)])["r"]
    assert found.accepted > 5
    for one, two in zip(plain.tokens, found.tokens, strict=True):
        assert one.logprob is not None
        assert two.logprob is not None
        assert one.logprob.logprob == pytest.approx(two.logprob.logprob, abs=1e-6)
        assert [token for token, _ in one.logprob.top] == [token for token, _ in two.logprob.top]
    model: Any = tiny_model("llama")
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([PROMPT + plain.ids]), use_cache=False).logits[0].log_softmax(-1)
    model.set_attn_implementation("headlong")
    for index, token in enumerate(plain.tokens):
        assert token.logprob is not None
        expected = float(logits[len(PROMPT) - 1 + index, token.token_id])
        assert token.logprob.logprob == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_are_whole_and_right_in_chunks_and_behind_a_cached_prefix(budget: int) -> None:
    core = tiny_core("llama", (), Sizes(max_num_batched_tokens=budget))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    run(core, [request("warm", prompt, GREEDY)])
    sampling = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
    answer = run(core, [request("r", prompt, sampling)])["r"]
    assert (answer.ids, answer.finish_reason) == ([], "length")
    found = answer.outputs[-1].prompt_logprobs
    assert found is not None
    assert found[0] is None
    model: Any = tiny_model("llama")
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    model.set_attn_implementation("headlong")
    assert len(found) == len(prompt)
    for index, entry in enumerate(found[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(logits[index, prompt[index + 1]]), abs=1e-6)
        assert len(entry.top) == 2


@pytest.mark.parametrize("budget", [6, 9, 40])
def test_no_running_request_waits_for_the_drafts_or_the_prompt_of_another(budget: int) -> None:
    requests = [request(f"r{i}", [*PROMPT, i], dataclasses.replace(GREEDY, max_tokens=30)) for i in range(5)]
    plain = run(tiny_core("llama"), requests)
    truth = {name: answer.ids for name, answer in plain.items()}
    core = tiny_core("llama", [OracleDrafter(truth, seed=4, skill=1.0)], Sizes(max_num_batched_tokens=budget))
    answers: dict[str, Answer] = {}
    for one in requests:
        core.add(one)
    core.add(request("long", [3] * 60, GREEDY))
    while core.has_work:
        decoding = {one.request_id for one in core.scheduler.running if one.is_decoding}
        outputs = core.step().outputs
        collect(answers, outputs)
        assert decoding <= {output.request_id for output in outputs}
    assert {name: answers[name].ids for name in truth} == truth


def test_a_shared_beginning_is_computed_once() -> None:
    core = tiny_core("llama")
    prompt = list(range(1, 20))
    first = run(core, [request("a", prompt, GREEDY)])["a"]
    second = run(core, [request("b", prompt, GREEDY)])["b"]
    salted = run(core, [dataclasses.replace(request("c", prompt, GREEDY), cache_salt="other tenant")])["c"]
    assert [answer.outputs[0].num_cached_tokens for answer in (first, second, salted)] == [0, 16, 0]
    assert first.ids == second.ids == salted.ids
    # The answer is cached with its prompt: the next turn of a chat finds both.
    third = run(core, [request("d", [*prompt, *first.ids, 7], GREEDY)])["d"]
    assert third.outputs[0].num_cached_tokens == 32
