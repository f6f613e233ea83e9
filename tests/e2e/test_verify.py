"""``headlong verify`` against the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from running_server import RunningServer

# Answers that copy, so that there is something to draft within few tokens.
PROMPTS = [
    "Repeat this line exactly, and nothing else: one two three four five six seven eight nine ten",
    "Repeat this Python code exactly. Output only the code.\n\n```python\n"
    "def mean(numbers):\n    total = sum(numbers)\n    return total / len(numbers)\n```",
]


def test_the_default_server_is_exact(server: RunningServer, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [sys.executable, "-m", "server", "verify", "--url", server.url, "--prompts", str(prompts), "--n", "2"]
    options = ["--max-tokens", "16", "--out", str(out)]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 prompts answered both ways" in result.stdout
    assert "0 faults" in result.stdout
    report = json.loads(out.read_text())
    assert report["exact"] is True
    greedy, seeded = report["audits"]
    assert (greedy["temperature"], seeded["temperature"]) == (0.0, 0.8)
    assert greedy["drafters"]["suffix"]["accepted_tokens"] > 0
    assert greedy["on"]["acceptance_length"] > 1.0 == greedy["off"]["acceptance_length"]
    # Margins of equal tokens come from the same logits, whichever forward computed them.
    gap, bound = greedy["largest_margin_gap"], report["margin_bound"]
    assert gap < bound or gap == bound == 0.0
