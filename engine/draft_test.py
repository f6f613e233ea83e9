"""What drafters are worth on some prompts: acceptance length, measured with the engine itself while it is idle."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.core import EngineCore
from engine.errors import ModelLoadError, RequestFailedError
from engine.outputs import RequestOutput, StepOutput
from engine.sampling_params import EngineRequest, SamplingParams, SpeculationParams
from engine.spec_decode.controller import Controller
from heads.config import HELD_OUT, HeadsConfig

log = logging.getLogger("headlong.engine")

SELF_TEST_TOKENS = 16
_NEAR_ZERO = 0.05  # accepted drafts a forward pass
_FAR_BELOW = 0.4  # share of the drafts that were accepted after training
_SALT = "headlong self-test"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Output tokens and the decode forwards they took, over all requests."""

    tokens: int
    forwards: int

    @property
    def length(self) -> float:
        """tau: output tokens a forward pass."""
        return self.tokens / self.forwards if self.forwards else 1.0


def measure_acceptance(
    core: EngineCore, prompts: Sequence[Sequence[int]], sampling: SamplingParams, method: str = "auto"
) -> Acceptance:
    """Answers every prompt with every proposed node verified, whatever it costs; the core must be idle.

    sampling: of each answer; answer i gets ``sampling.seed`` + i. Raises RequestFailedError if a request fails.
    """
    tokens = forwards = 0
    for step in unsparing_steps(core, prompts, sampling, method):
        for output in step.outputs:
            tokens += len(output.tokens)
            forwards += output.is_decode_step
    return Acceptance(tokens, forwards)


def unsparing_steps(
    core: EngineCore, prompts: Sequence[Sequence[int]], sampling: SamplingParams, method: str = "auto"
) -> Iterator[StepOutput]:
    """The steps of ``measure_acceptance``; take them all. ``answer_index`` tells whose an output is."""
    controller, limits = core.scheduler.controller, core.scheduler.limits
    core.scheduler.controller = Controller(None)
    # So many that the whole tree of each fits into every step: a tree without room would count as a plain step.
    side_by_side = max(1, limits.max_num_batched_tokens // (1 + limits.max_draft_tokens))
    room = max(0, limits.max_num_batched_tokens - 1)
    requests = [
        EngineRequest(
            f"{_SALT} {index}",
            tuple(prompt),
            dataclasses.replace(sampling, seed=sampling.seed + index),
            # No more nodes than a step has room for beside the root.
            SpeculationParams(method=method, max_draft_tokens=min(limits.max_draft_tokens, room)),
            cache_salt=_SALT,
        )
        for index, prompt in enumerate(prompts)
    ]
    failure: str | None = None
    try:
        with core.drafting.unsparing():
            for first in range(0, len(requests), side_by_side):
                for step in _steps(core, requests[first : first + side_by_side]):
                    for output in step.outputs:
                        if output.finish_reason == "error":  # the others still run, so that nothing is left
                            failure = failure or output.error or "a request of the acceptance test failed"
                    yield step
    finally:
        core.scheduler.controller = controller
    if failure is not None:
        raise RequestFailedError(failure)


def answer_index(output: RequestOutput) -> int:
    """Which of the prompts of ``unsparing_steps`` the output belongs to."""
    return int(output.request_id.removeprefix(_SALT))


def _steps(core: EngineCore, requests: Sequence[EngineRequest]) -> Iterator[StepOutput]:
    for request in requests:
        core.add(request)
    while core.has_work:
        yield core.step()


def self_test(core: EngineCore, config: HeadsConfig) -> Acceptance:
    """Drafts on a few prompts at load and warns of heads that are hardly ever right, with the likely cause.

    The prompts come with the heads; heads without any are tried on made-up token ids, on which a model still writes.
    Of a prompt too long for the context that is served, the end is used. Raises ModelLoadError if the engine fails.
    """
    room = max(1, core.scheduler.limits.max_model_len - SELF_TEST_TOKENS)
    prompts = [prompt[-room:] for prompt in config.self_test or _made_up_prompts(config.vocab_size)]
    sampling = SamplingParams(temperature=0.0, max_tokens=SELF_TEST_TOKENS, ignore_eos=True)
    try:
        found = measure_acceptance(core, prompts, sampling, config.method)
    except RequestFailedError as error:
        raise ModelLoadError(f"the self-test of the {config.method} heads failed: {error}") from error
    baseline = config.baseline.get(HELD_OUT)
    accepted = found.length - 1
    if accepted < _NEAR_ZERO:
        log.warning(
            "the %s heads are hardly ever right (acceptance length %.2f in the self-test): they were probably trained "
            "on other weights, or on another hidden state than the one after the last norm. Answers stay right, "
            "but these drafts save nothing",
            config.method,
            found.length,
        )
    elif baseline is not None and accepted < _FAR_BELOW * (baseline - 1):
        log.warning(
            "the %s heads reach an acceptance length of %.2f in the self-test, %.2f after training: these are probably "
            "not quite the weights they were trained on (another quantisation or a fine-tune)",
            config.method,
            found.length,
            baseline,
        )
    else:
        log.info("self-test of the %s heads: acceptance length %.2f", config.method, found.length)
    return found


def _made_up_prompts(vocab_size: int) -> list[tuple[int, ...]]:
    return [tuple((start + 1) * (step + 1) * 7919 % vocab_size for step in range(12)) for start in range(4)]
