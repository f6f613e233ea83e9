"""Many clients at once that leave at random: looks for leaked blocks, stuck requests and growing memory.

usage: python tests/bench/soak.py [--seconds 300] [--clients 16] [--seed 0] [--set KEY=VALUE ...]

Starts a server of its own, with a KV cache of 256 MiB unless --set says otherwise: its pages become resident as they
are first used, so a large one would look like growth for minutes, and a small one brings preemption and eviction.
Prints one JSON line every 10 seconds and a verdict; exits 1 if anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from running_server import RunningServer, running_server

WORDS = "the sky sea a blue why does code python list of days write repeat explain and or one two three".split()
GROWTH = 64 << 20  # resident bytes allowed between the middle and the end of the run


def random_body(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.choice([3, 20, 150, 600])))}],
        "max_tokens": draw.choice([1, 8, 40, 120]),
        "temperature": draw.choice([0, 0.8, 1.2]),
        "stream": draw.random() < 0.7,
        "n": draw.choice([1, 1, 1, 2]),
    }
    extras: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["the", "."]},
        {"frequency_penalty": 0.5, "min_tokens": 2},
        {"speculation": {"enabled": False}},
        {"top_p": 0.9, "seed": 4},
        {},
    ]
    if draw.random() < 0.03:
        body["temperature"] = 9  # a refusal in between
    return {**extras[draw.randrange(len(extras))], **body} if body["max_tokens"] > 2 else body


async def client(url: str, seed: int, until: float, seen: Counter[str]) -> None:
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        while time.monotonic() < until:
            patience = draw.choice([0.02, 0.2, 1.0, 3.0, 300, 300])
            try:
                async with asyncio.timeout(patience):
                    response = await http.post("/v1/chat/completions", json=random_body(draw))
                    seen[str(response.status_code)] += 1
                    if response.status_code == 200 and "error" in response.text[-300:]:
                        seen["error in stream"] += 1
            except TimeoutError:
                seen["left"] += 1


async def watch(server: RunningServer, until: float, resident: list[int], seen: Counter[str]) -> None:
    began = time.monotonic()
    while time.monotonic() < until:
        await asyncio.sleep(10)
        resident.append(server.resident_bytes())
        line = {
            "seconds": round(time.monotonic() - began),
            "resident_mib": resident[-1] >> 20,
            "running": await asyncio.to_thread(server.metric, "headlong_requests_running"),
            "seen": dict(seen),
        }
        print(json.dumps(line), flush=True)


async def soak(server: RunningServer, seconds: float, clients: int, seed: int) -> list[str]:
    """What was left behind, in words; empty when all is well."""
    until, seen, resident = time.monotonic() + seconds, Counter[str](), list[int]()
    await asyncio.gather(
        watch(server, until, resident, seen),
        *(client(server.url, seed * 1000 + i, until, seen) for i in range(clients)),
    )
    faults = []
    deadline = time.monotonic() + 60
    while await asyncio.to_thread(server.metric, "headlong_requests_running"):
        if time.monotonic() > deadline:
            faults.append("requests are still running a minute after the last client left")
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.3)
    usage = await asyncio.to_thread(server.metric, "headlong_kv_cache_usage_ratio")
    if usage:
        faults.append(f"{usage:.3%} of the KV cache is still in use")
    growth = resident[-1] - resident[len(resident) // 2]
    if growth > GROWTH:
        faults.append(f"resident memory grew by {growth >> 20} MiB in the second half")
    unexpected = set(seen) - {"200", "400", "left"}
    if unexpected or not seen["200"] or not seen["left"]:
        faults.append(f"answers were {dict(seen)}")
    print(json.dumps({"faults": faults, "seen": dict(seen), "resident_mib": [size >> 20 for size in resident]}))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    settings = [part for item in ("engine.kv_cache_memory=256MiB", *chosen.set) for part in ("--set", item)]
    with running_server(*settings) as server:
        return 1 if asyncio.run(soak(server, chosen.seconds, chosen.clients, chosen.seed)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
