"""A tiny random model as a folder to serve and to train heads for: weights, a tokenizer, no chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tokenizers
import torch
from tiny_engine import EOS, tiny_model
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def write_tiny_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Token i is the word ``w<i>``; the model is ``tiny_engine``'s llama in float32, unless another is given."""
    model = model or tiny_model("llama", torch.float32)
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(model.config.vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token=f"w{EOS}").save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int, seed: int = 1) -> Path:
    """JSON lines of random words, all different."""
    draw = random.Random(seed)
    texts = {" ".join(f"w{draw.randrange(1, EOS)}" for _ in range(draw.randint(3, 8))) for _ in range(count)}
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in sorted(texts)))
    return path
