"""The base model with a LoRA (arXiv 2106.09685), as ``heads.joint`` trains it. The adapters are the ``peft`` library's.

Every linear layer but lm_head gets one, so that embedding and lm_head stay the original's, which the heads share.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from engine.errors import HeadTrainingError
from heads.data import Answer, Context
from heads.joint import Closeness, Reading, closeness
from heads.lm_head import DraftLmHead
from heads.settings import LoraSettings


def require_peft() -> None:
    """Raises HeadTrainingError where the adapters' library is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise HeadTrainingError(
            "training the base model needs the package peft, which is not installed; run "
            "`pip install 'headlong[lora]'`, or train the heads alone"
        )


class LoraBase:
    """``heads.joint.TrainableBase`` over transformers' modules."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
        """model: with its plain weights; they are frozen, and adapters without effect are put beside them. seed: of the
        adapters. Raises HeadTrainingError for a model without linear layers to adapt."""
        import peft

        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules="all-linear",
        )
        self._device = next(model.parameters()).device
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            try:
                self._tuner: Any = peft.LoraModel(model, config, "default")  # changes the model in place
            except ValueError as error:
                raise HeadTrainingError(f"{type(model).__name__} cannot be trained with the heads: {error}") from error
        self._model: Any = model
        self._adapters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def read(self, answers: Sequence[Answer]) -> Reading:
        """One pass over all answers side by side. They are filled up on the right, where causal attention does not
        look from the tokens that count."""
        texts = [torch.tensor((*answer.ask.prompt, *answer.tokens[:-1])) for answer in answers]
        # Only where somebody attends to it: the cache keeps every layer's keys and values.
        cache = DynamicCache() if any(answer.context is not None for answer in answers) else None
        cached: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, "cache": cache}
        padded = pad_sequence(texts, batch_first=True).to(self._device)
        final: torch.Tensor = self._model.get_decoder()(input_ids=padded, **cached).last_hidden_state.float()
        firsts = [len(answer.ask.prompt) - 1 for answer in answers]
        lengths = [len(text) for text in texts]
        rows = [states[first:length] for states, first, length in zip(final, firsts, lengths, strict=True)]
        if cache is None:
            return Reading(torch.cat(rows), ())
        last: Any = cache.layers[-1]
        contexts = (
            Context(
                last.keys[index, :, :length].transpose(0, 1).detach(),
                last.values[index, :, :length].transpose(0, 1).detach(),
                torch.tensor(answers[index].ask.prompt, device=self._device),
                final[index, :first].detach(),
            )
            for index, (first, length) in enumerate(zip(firsts, lengths, strict=True))
        )
        return Reading(torch.cat(rows), tuple(contexts))

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._adapters.values()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self._adapters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, weight in self._adapters.items():
            weight.copy_(state[name])

    @torch.no_grad()
    def closeness(self, lm_head: DraftLmHead, answers: Sequence[Answer]) -> Closeness:
        """How close the adapted model is to the original one, both computed here. lm_head: of the whole vocabulary."""
        return closeness(lm_head, (self._twice(answer) for answer in answers))

    def _twice(self, answer: Answer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._tuner.disable_adapter_layers()
        original = self.read([answer]).states
        self._tuner.enable_adapter_layers()
        return original, self.read([answer]).states, torch.tensor(answer.tokens, device=self._device)

    def merge(self) -> PreTrainedModel:
        """The model with the adapters' change in its weights; this object is of no use afterwards."""
        merged: PreTrainedModel = self._tuner.merge_and_unload()
        return merged
