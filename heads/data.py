"""Training data: answers that the served model wrote itself, with the hidden state behind each of their tokens.

An answer's state i is what lm_head read when it chose token i, so that the model's own distribution at every position
(the soft target) can be recomputed from the states and never needs to be stored. Answers lie in shards, each written
beside and renamed: a killed run loses the shard under way and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from heads.errors import HeadsError
from heads.files import replace_file

MANIFEST = "answers.json"
HELD_OUT_SHARE = 1 / 16  # of the prompts, chosen by their hash


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to generate. prompt: token ids, chat template included. temperature 0 is greedy."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Context:
    """What the model knew of an answer's text at every position, for heads that attend to it.

    keys, values: [entries, kv_heads, head_dim] of its last layer as they lie in the cache (keys are rotated), one entry
    a token but for the last, whose own was never needed. prompt_tokens: [prompt]. prompt_states: [prompt - 1, hidden],
    final states before the one that chose the first token.
    """

    keys: torch.Tensor
    values: torch.Tensor
    prompt_tokens: torch.Tensor
    prompt_states: torch.Tensor

    def to(self, device: torch.device) -> Context:
        return Context(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class TopLayers:
    """What the model's uppermost layers knew of an answer's text, for streams.

    keys, values: [entries, layers, kv_heads, head_dim], else as in ``Context``. states: [len(tokens), hidden], what the
    lowest of these layers read at the rows that chose the answer's tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    states: torch.Tensor

    def to(self, device: torch.device) -> TopLayers:
        return TopLayers(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: what the model wrote. states: [len(tokens), hidden], ``states[i]`` chose ``tokens[i]``. context: where
    the heads to be trained attend to one. was_cut: a loop that it ended in is left out.
    read_top: reads from disk what streams are trained on."""

    ask: Ask
    tokens: tuple[int, ...]
    states: torch.Tensor
    context: Context | None = None
    was_cut: bool = False
    read_top: Callable[[], TopLayers] | None = None

    @property
    def is_held_out(self) -> bool:
        return held_out(self.ask.prompt)


Generate = Callable[[Sequence[Ask]], list[Answer]]


def held_out(prompt: Sequence[int]) -> bool:
    """Whether a prompt's answers are kept for evaluation: decided by its hash, so no later run trains on it."""
    digest = hashlib.sha256(",".join(map(str, prompt)).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


class AnswerStore:
    """A folder of shards that belong to one plan (model, prompts, sampling); another plan needs another folder."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        """Raises HeadsError if the folder holds answers of another plan, or cannot be written."""
        self.folder = folder
        manifest = folder / MANIFEST
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if manifest.exists():
                _require_same(json.loads(manifest.read_text()), plan, folder)
            else:
                replace_file(manifest, json.dumps(plan, indent=1, sort_keys=True) + "\n")
        except (OSError, ValueError) as error:
            raise HeadsError(f"{folder} cannot be used for training answers: {error}") from error

    def _shard(self, index: int) -> Path:
        return self.folder / f"answers-{index:05d}.safetensors"

    def has(self, index: int) -> bool:
        return self._shard(index).exists()

    def count_tokens(self, index: int) -> int:
        """Answer tokens in a shard, without reading them. Raises HeadsError for a damaged one."""
        with opened(self._shard(index)) as shard:
            return int(shard.get_slice("tokens").get_shape()[0])

    def write(self, index: int, answers: Sequence[Answer]) -> None:
        """States are kept in half precision: they are normalised, and their rounding is far below the heads' errors."""
        states = [answer.states.to(torch.float16) for answer in answers]
        tensors = {
            "tokens": torch.tensor([token for a in answers for token in a.tokens], dtype=torch.int32),
            "states": torch.cat(states) if states else torch.empty(0, 0, dtype=torch.float16),
            "lengths": torch.tensor([len(a.tokens) for a in answers], dtype=torch.int32),
            "prompts": torch.tensor([token for a in answers for token in a.ask.prompt], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(a.ask.prompt) for a in answers], dtype=torch.int32),
            "temperatures": torch.tensor([a.ask.temperature for a in answers], dtype=torch.float64),
            "seeds": torch.tensor([a.ask.seed for a in answers], dtype=torch.int64),
            "was_cut": torch.tensor([a.was_cut for a in answers], dtype=torch.bool),
        }
        partial = self._shard(index).with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, self._shard(index))

    def read(self, index: int) -> list[Answer]:
        """Raises HeadsError for a damaged shard."""
        with opened(self._shard(index)) as shard:
            data = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a dict
        tokens = data["tokens"].split(data["lengths"].tolist())
        states = data["states"].split(data["lengths"].tolist())
        prompts = data["prompts"].split(data["prompt_lengths"].tolist())
        asks = zip(prompts, data["temperatures"].tolist(), data["seeds"].tolist(), strict=True)
        return [
            Answer(Ask(tuple(prompt.tolist()), temperature, seed), tuple(ids.tolist()), rows, was_cut=was_cut)
            for (prompt, temperature, seed), ids, rows, was_cut in zip(
                asks, tokens, states, data["was_cut"].tolist(), strict=True
            )
        ]

    def has_contexts(self, index: int) -> bool:
        return self._contexts(index).exists()

    def write_contexts(self, index: int, contexts: Sequence[Context]) -> None:
        """Of every answer of a shard, in order; in half precision, like the states."""
        tensors = {
            name: torch.cat([getattr(context, name) for context in contexts]).to(torch.float16).contiguous()
            for name in ("keys", "values", "prompt_states")
        }
        partial = self._contexts(index).with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, self._contexts(index))

    def read_with_contexts(self, index: int) -> list[Answer]:
        """Raises HeadsError for damaged files."""
        answers = self.read(index)
        with opened(self._contexts(index)) as file:
            data = {name: file.get_tensor(name) for name in ("keys", "values", "prompt_states")}
        prompts = [len(answer.ask.prompt) for answer in answers]
        entries = [prompt + len(answer.tokens) - 1 for prompt, answer in zip(prompts, answers, strict=True)]
        if sum(entries) != len(data["keys"]):
            raise HeadsError(f"{self._contexts(index)} does not belong to its answers; remove it to have it made again")
        parts = zip(
            data["keys"].split(entries),
            data["values"].split(entries),
            [torch.tensor(answer.ask.prompt) for answer in answers],
            data["prompt_states"].split([prompt - 1 for prompt in prompts]),
            strict=True,
        )
        return [
            dataclasses.replace(answer, context=Context(*part)) for answer, part in zip(answers, parts, strict=True)
        ]

    def _contexts(self, index: int) -> Path:
        return self.folder / f"contexts-{index:05d}.safetensors"

    def read_all(self) -> list[Answer]:
        """Every answer of the leading shards, in order, without contexts."""
        return [answer for index in range(len(self)) for answer in self.read(index)]

    def __len__(self) -> int:
        """Leading shards that are there."""
        return next(index for index in itertools.count() if not self.has(index))


@contextmanager
def opened(shard: Path) -> Iterator[Any]:
    """A file of tensors. Raises HeadsError for a damaged one."""
    try:
        with safe_open(shard, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{shard} is damaged ({error}); remove it to have its answers written again") from error


@dataclass(frozen=True, slots=True)
class Collected:
    """How far the collection is: answers and tokens that are safely stored."""

    answers: int
    tokens: int


def collect(
    store: AnswerStore,
    asks: Sequence[Ask],
    generate: Generate,
    *,
    shard_size: int,
    target_tokens: int,
    progress: Callable[[Collected], None],
) -> Collected:
    """Generates answers shard by shard until there are ``target_tokens``, or one for every ask.

    Shards that are there are kept, so a killed run goes on where it stood; each shard is generated by itself, so it
    does not depend on where the run was killed.
    """
    done = Collected(0, 0)
    for index, first in enumerate(range(0, len(asks), shard_size)):
        if done.tokens >= target_tokens:
            break
        part = asks[first : first + shard_size]
        if not store.has(index):
            store.write(index, generate(part))
        done = Collected(done.answers + len(part), done.tokens + store.count_tokens(index))
        progress(done)
    return done


def first_of_each(answers: Iterable[Answer]) -> list[Answer]:
    """Without answers that were given before word for word, whatever they were asked: on both sides of the split they
    would be trained on and tested on."""
    first: dict[tuple[int, ...], Answer] = {}
    for answer in answers:
        first.setdefault(answer.tokens, answer)
    return list(first.values())


def prompts_digest(answers: Sequence[Answer]) -> str:
    """Hex SHA-256 over the prompts, in order."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(f"{answer.ask.prompt}\n".encode())
    return digest.hexdigest()


def dataset_digest(answers: Sequence[Answer]) -> str:
    """Hex SHA-256 over prompts and answers, to tell what heads were trained on."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(f"{answer.ask.prompt}{answer.tokens}\n".encode())
    return digest.hexdigest()


LOOP_SIZE, LOOP_REPEATS = 8, 3


class LoopDetector:
    """Tells, token by token, when an n-gram of ``size`` tokens has occurred ``repeats`` times.

    A small greedy model falls into loops, which any drafter predicts: training on them would flatter the figures.
    """

    def __init__(self, size: int = LOOP_SIZE, repeats: int = LOOP_REPEATS) -> None:
        self.size = size
        self._recent: deque[int] = deque(maxlen=size)
        self._repeats = repeats
        self._seen: Counter[tuple[int, ...]] = Counter()

    def add(self, token: int) -> bool:
        """Whether the n-gram that ``token`` completes has now occurred often enough to be a loop."""
        self._recent.append(token)
        if len(self._recent) < self.size:
            return False
        gram = tuple(self._recent)
        self._seen[gram] += 1
        return self._seen[gram] >= self._repeats


def first_loop(tokens: Sequence[int], size: int = LOOP_SIZE, repeats: int = LOOP_REPEATS) -> int | None:
    """Length of the part before a ``LoopDetector`` speaks up: without the n-gram that did; None if it never does."""
    detector = LoopDetector(size, repeats)
    return next((end - size for end, token in enumerate(tokens, start=1) if detector.add(token)), None)


def _require_same(found: Mapping[str, Any], plan: Mapping[str, Any], folder: Path) -> None:
    wanted = json.loads(json.dumps(plan))
    for key in sorted(set(found) | set(wanted)):
        if found.get(key) != wanted.get(key):
            raise HeadsError(
                f"{folder} holds answers of another run ({key} was {found.get(key)!r}, is {wanted.get(key)!r}); "
                f"give another folder, or remove it"
            )
