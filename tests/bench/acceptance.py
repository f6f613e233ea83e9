"""Acceptance length by drafter, temperature and coupling, with every drafted node verified whatever it costs.

    python tests/bench/acceptance.py --dataset mt-bench --n 40 --max-tokens 64

The engine itself answers, many prompts at a time, so the figures are of the real drafters and the real verifier; the
controller, which spares nodes that do not pay on this machine, is left out. Every row has the same seeds, so at equal
temperature all rows write the same text.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from engine import threads

threads.configure()  # before torch

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from engine.assembly import HEAD_METHODS, assemble, make_drafters  # noqa: E402
from engine.backend import choose_backend  # noqa: E402
from engine.config import DEFAULT_MODEL, EngineConfig, EngineSettings, ModelConfig, SpeculationConfig  # noqa: E402
from engine.draft_test import Acceptance, measure_acceptance  # noqa: E402
from engine.loading import load_model  # noqa: E402
from engine.sampling_params import SamplingParams  # noqa: E402
from server.bench.datasets import load_dataset  # noqa: E402
from server.training.material import make_material  # noqa: E402
from server.training.prompts import Prompt  # noqa: E402

DRAFTERS = ("suffix", "mtp", "suffix,mtp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--heads", default=None, help="a folder; default: those that come with headlong")
    parser.add_argument("--dataset", default="mt-bench")
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8, help="prompts answered side by side")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="each a list such as suffix,medusa")
    parser.add_argument("--quantization", default="auto", choices=["auto", "none", "int8"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dataset = load_dataset(options.dataset, options.n)
    loaded = load_model(ModelConfig(options.model), torch.device("cpu"), None, print)
    prompts = make_material([Prompt(text, dataset.name, "") for text in dataset.prompts], loaded.path).prompts
    base = SpeculationConfig(heads=options.heads, max_draft_tokens=options.nodes)
    rows = [
        (names, temperature, coupling)
        for temperature in options.temperatures
        for names in (tuple(text.split(",")) for text in options.drafters)
        for coupling in ((True, False) if temperature and set(names) & set(HEAD_METHODS) else (True,))
    ]
    settings = [
        dataclasses.replace(
            base, drafters=names, heads=base.heads if set(names) & set(HEAD_METHODS) else None, coupling=coupling
        )
        for names, _, coupling in rows
    ]
    made = [make_drafters(one, loaded) for one in settings]
    engine = EngineConfig(max_num_seqs=options.clients, max_num_batched_tokens=512, kv_cache_memory=1 << 30)
    backend = choose_backend(loaded, options.quantization, engine, print)
    table = Table(
        title=f"{options.dataset} ({len(prompts)} prompts, {options.max_tokens} tokens, {options.nodes} nodes)"
    )
    for column in ("drafters", "temperature", "coupling", "tau", "tokens", "forwards", "seconds"):
        table.add_column(column, justify="right")
    for (names, temperature, coupling), one, drafting in zip(rows, settings, made, strict=True):
        core = assemble(
            backend,
            EngineSettings(ModelConfig(options.model), engine, one),
            lambda _: None,
            drafting.drafters,
            measures_steps=False,
        ).core
        sampling = SamplingParams(temperature=temperature, seed=options.seed, max_tokens=options.max_tokens)
        began = time.perf_counter()
        found: Acceptance = measure_acceptance(core, prompts, sampling)
        seconds = time.perf_counter() - began
        cells = ("+".join(names), temperature, coupling if temperature else "-", f"{found.length:.3f}")
        table.add_row(*map(str, (*cells, found.tokens, found.forwards, f"{seconds:.0f}")))
        print(*cells, flush=True)
    Console().print(table)
    print("prompts sha256", dataset.digest, "model", loaded.digest, "from", Path(__file__).name)


if __name__ == "__main__":
    main()
