"""The data card of trained heads, from the facts in their run.yaml: what they were trained on, for whoever is to judge
or to repeat it. What run.yaml does not say is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

DATA_CARD = "data_card.md"
"""Beside heads.safetensors."""

Facts = Mapping[str, Any]


def data_card(run: Facts) -> str:
    """Markdown. run: the content of run.yaml."""
    data = run.get("data", {})
    table, chosen = _sources(run, data), [*_selection(run, data), *_languages(run)]
    sections = {
        "Prompts": [*table, *([""] if table and chosen else []), *chosen],
        "Answers": _answers(run, data),
        "Split": _split(data),
        "Made with": _versions(run),
        "Known limits": _limits(run, data),
    }
    opening = (
        "# Training data",
        "",
        f"What the {run['method']} heads in this folder were trained on: answers that the model itself wrote. All "
        "figures are of that run (`run.yaml`).",
    )
    lines = [*opening]
    for title, body in sections.items():
        if body:
            lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def _sources(run: Facts, data: Facts) -> list[str]:
    """A table; answers and tokens where the run counted them by source."""
    answered = {row["source"]: row for row in data.get("sources", ())}
    columns = {"source": "source", "from": "from", "licence": "licence (SPDX)", "prompts": "prompts"}
    counted = {"answers": "answers", "tokens": "answer tokens", "held_out_answers": "answers held out"}
    if answered:
        columns |= counted
    rows = [{**dict.fromkeys(counted, 0), **row, **answered.get(row["source"], {})} for row in run.get("prompts", ())]
    shown = [key for key in columns if any(row.get(key) not in (None, "") for row in rows)]
    if not shown:
        return []
    table = [_row([columns[key] for key in shown]), _row(["---"] * len(shown))]
    table += [_row([_cell(row.get(key)) for key in shown]) for row in sorted(rows, key=lambda row: str(row["source"]))]
    return table


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value).replace("|", "\\|")


def _selection(run: Facts, data: Facts) -> list[str]:
    lines = []
    if given := run.get("given"):
        lines.append(
            f"- A user's own: {given['kind']} `{given['name']}`, SHA-256 `{given['sha256']}`. Not repeated here."
        )
    if chosen := run.get("selection"):
        lines += [
            f"- Read: {chosen['read']}. Left out: {chosen['repeated']} repeated (but for case and punctuation), "
            f"{chosen['nearly_repeated']} nearly repeated (Jaccard similarity of {chosen['shingle_words']}-word "
            f"shingles at least {chosen['jaccard']}), {chosen['of_benchmarks']} that share eight words in a row with a "
            f"benchmark's prompt or all words of one. Kept: {chosen['kept']}, of which {chosen['conversations']} are "
            "conversations of several turns.",
        ]
    if benchmarks := run.get("benchmarks"):
        compared = [f"{name} ({count} prompts)" for name, count in benchmarks.items() if count is not None]
        absent = [name for name, count in benchmarks.items() if count is None]
        lines.append(f"- Benchmarks compared with: {', '.join(compared) or 'none'}.")
        if absent:
            lines.append(f"- Not installed, so not compared with: {', '.join(absent)}.")
    if "prompts_answered" in data:
        lines.append(
            f"- Answered: {data['prompts_answered']} of {data['prompts_given']}; {data['prompts_too_long']} left no "
            "room for an answer."
        )
    return lines


def _languages(run: Facts) -> list[str]:
    if "selection" not in run:
        return []
    known = run.get("languages")
    if not known:
        return ["- Languages: those of the prompts; not looked into."]
    if "passages" in known:
        counts = ", ".join(f"{name} {count}" for name, count in known["passages"].items())
        return [f"- Languages: English questions about code; passages by language: {counts}."]
    return [f"- Languages: {known['text']}; code: {known['code']}."]


def _answers(run: Facts, data: Facts) -> list[str]:
    model, settings, computed = run["model"], run["answers"], run["computed"]
    temperatures = ", ".join(f"{one:g}" for one in settings["temperatures"])
    lines = [
        f"- Written by {model['name']} (digest `{model['digest']}`), runner {computed['runner']}, quantization "
        f"{computed['quantization']}, in its chat template where it has one.",
        f"- Every other prompt greedily, the others at temperatures {temperatures} in turn; at most "
        f"{settings['max_tokens']} tokens each, {settings['tokens']} wanted in all.",
    ]
    if "greedy_answers" in data:
        loop = data["loop"]
        lines += [
            f"- Used: {data['answers']}, of which {data['greedy_answers']} greedy.",
            f"- Cut before a loop ({loop['tokens']} tokens that occur {loop['times']} times): "
            f"{data['answers_cut_at_a_loop']} answers. Left out: {data['answers_too_short']} shorter than two tokens, "
            f"{data['answers_repeated']} that repeat another answer word for word.",
        ]
    elif "answers" in data:
        lines.append(f"- Used: {data['answers']}.")
    if run.get("start_from"):
        lines.append(_further(run))
    return lines


def _further(run: Facts) -> str:
    line = f"- Trained further from the heads `{PurePath(run['start_from']).name}`"
    if trained := run.get("start_trained"):
        line += f" ({trained['tokens']} tokens, dataset digest `{trained['dataset_digest']}`)"
    return line + "; what those were trained on, their own card says."


def _split(data: Facts) -> list[str]:
    lines = []
    if "held_out_share" in data:
        share = round(1 / data["held_out_share"])
        lines.append(f"- By the SHA-256 of a prompt's token ids: one in {share} is held out, in every run.")
    for name, title in (("training", "Trained on"), ("held_out", "Held out")):
        if f"{name}_tokens" in data:
            answers = f"{data[f'{name}_answers']} answers, " if f"{name}_answers" in data else ""
            lines.append(f"- {title}: {answers}{data[f'{name}_tokens']} answer tokens.")
    digests = {
        "prompts_digest": "the prompts",
        "dataset_digest": "prompts and answers trained on",
        "held_out_digest": "prompts and answers held out",
    }
    lines += [f"- SHA-256 of {title}: `{data[name]}`." for name, title in digests.items() if name in data]
    return lines


def _versions(run: Facts) -> list[str]:
    versions = {"headlong": run.get("headlong"), **run.get("versions", {}), **run.get("packages", {})}
    lines = ["- " + ", ".join(f"{name} {version}" for name, version in versions.items() if version) + "."]
    if run.get("git_commit"):
        lines.append(f"- Commit `{run['git_commit']}`.")
    return lines


def _limits(run: Facts, data: Facts) -> list[str]:
    lines = [
        "- Answers are the model's own, unchecked: heads learn its errors and manners, since they are to guess what it "
        "writes. The model's own licence is not recorded here.",
        f"- No answer is longer than {run['answers']['max_tokens']} tokens: nothing was learnt from further on.",
        "- Prompts made from one template or about one piece of code may stand on both sides of the split.",
    ]
    if "selection" in run:
        lines.append(
            "- Likeness is one of words: paraphrases pass, and in scripts without spaces between words hardly more "
            "than equal text is found."
        )
    else:
        lines.append("- Near-duplicates among the prompts were not counted or left out.")
    if run.get("start_from"):
        lines.append("- Prompts were not compared with those of the heads it started from.")
    return lines
