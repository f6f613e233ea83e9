"""``headlong verify``: does speculation change what a running server answers? An audit of its exactness."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from server.bench.audit import Audit, audited, margin_bound_of
from server.bench.client import Measured, Sampling, ServerInfo, connect, server_info
from server.bench.compare import Difference, Pair, Plan
from server.bench.datasets import DATASETS, Dataset, load_dataset
from server.bench.report import check_report_path, report_head, write_report
from server.cli.failure import fail
from server.cli.measuring import failures_in_one_line, measuring_bar

DEFAULT_PROMPTS = 80
DEFAULT_TEMPERATURES = (0.0, 0.8)
_SHOWN_DEPTHS = 5
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Verified:
    """Everything that was found out about a server."""

    server: ServerInfo
    dataset: Dataset
    audits: list[Audit]

    @property
    def faults(self) -> int:
        return sum(len(audit.faults) for audit in self.audits)

    @property
    def undrafted(self) -> list[str]:
        """The choices of drafters that never drafted, at any temperature: their answers audit nothing."""
        steps: Counter[str] = Counter()
        for audit in self.audits:
            steps[audit.sampling.method] += audit.drafted_steps
        return [method for method, count in steps.items() if not count]


# One parameter an option: that is how typer is told of them.
def verify(
    url: Annotated[str, typer.Option(help="The server to audit.")] = "http://127.0.0.1:8000",
    prompts: Annotated[
        str, typer.Option(help=f"{', '.join(DATASETS)}, a file or a folder of code.", metavar="NAME|FILE")
    ] = "mt-bench",
    n: Annotated[int | None, typer.Option(help=f"Prompts at most.  \\[default: {DEFAULT_PROMPTS}]", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=1)] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Sampling temperature; may be given several times.  \\[default: 0, 0.8]", min=0.0, max=2.0),
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A drafter to audit alone; may be given several times.  \\[default: auto, all together]"),
    ] = None,
    clients: Annotated[int, typer.Option(help="Requests in flight at once.", min=1)] = 1,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", envvar="HEADLONG_API_KEY")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.", metavar="FILE")] = None,
) -> None:
    """Audit exactness: every prompt with speculation and without must give the same tokens.

    Ends with status 1 if an answer differs by more than a near-tie, or if nothing could be audited.
    """
    samplings = [
        Sampling(max_tokens, degree, seed, method=name)
        for degree in dict.fromkeys(temperature or DEFAULT_TEMPERATURES)
        for name in dict.fromkeys(method or ["auto"])
    ]
    with failures_in_one_line(url):
        check_report_path(out)
        dataset = load_dataset(prompts, n or DEFAULT_PROMPTS)
        _tell_fewer(dataset, n)
        verified = asyncio.run(_verified(url, api_key, dataset, samplings, Plan(clients=clients)))
        console = Console(highlight=False)
        _print(console, verified)
        if out is not None:
            write_report(out, _report(verified, clients))
            console.print(f"report written to {out}", markup=False, soft_wrap=True)
    _judge(verified)


def _tell_fewer(dataset: Dataset, wanted: int | None) -> None:
    if wanted is not None and wanted > dataset.available:
        typer.echo(f"headlong: {dataset.name} holds {dataset.available} prompts, fewer than {wanted}", err=True)


async def _verified(
    url: str, api_key: str | None, dataset: Dataset, samplings: Sequence[Sampling], plan: Plan
) -> Verified:
    audits = []
    async with connect(url, api_key) as client:
        server = await server_info(client)
        temperatures, methods = [s.temperature for s in samplings], [s.method for s in samplings]
        bound = margin_bound_of(server, temperatures, methods)
        for sampling in (replace(sampling, chat=server.has_chat) for sampling in samplings):
            label = f"temperature {sampling.temperature:g}, drafters {sampling.method}"
            with measuring_bar(label, len(dataset.prompts)) as advance:
                comparison = await audited(client, dataset.prompts, sampling, plan, advance)
            audits.append(Audit(sampling, bound, comparison))
    return Verified(server, dataset, audits)


def _print(console: Console, verified: Verified) -> None:
    audits, server, dataset = verified.audits, verified.server, verified.dataset
    first = audits[0].sampling
    taken = f"{len(dataset.prompts)} of {dataset.available} prompts of {dataset.name}"
    console.print(
        f"{server.model['id']} on {server.url}: {taken}, seed {first.seed}, up to {first.max_tokens} tokens; "
        "tau is the acceptance length, output tokens over decode forwards",
        markup=False,
        soft_wrap=True,
    )
    console.print("", _results_table(audits), "", _drafters_table(audits, server.methods), "", sep="\n")
    for audit in audits:
        if not audit.drafted_steps:
            console.print(f"{_name(audit)}: nothing was drafted, so equal answers say nothing", markup=False)
        for pair, found in audit.comparison.differences():
            console.print(_difference_line(audit, pair, found), markup=False, soft_wrap=True)
    console.print(_conclusion(audits), markup=False, soft_wrap=True)


def _results_table(audits: Sequence[Audit]) -> Table:
    table = _new_table("temp.", "drafters", "prompts", "identical", "near-ties", "faults", "tau", "time off/on", left=2)
    for audit in audits:
        summary = audit.comparison.summary()
        table.add_row(
            f"{audit.sampling.temperature:g}",
            audit.sampling.method,
            str(summary["pairs"]),
            str(summary["identical"]),
            str(len(audit.near_ties)),
            str(len(audit.faults)),
            f"{summary['on']['acceptance_length'] or 0:.2f}",
            f"{summary['time_ratio_off_over_on']['median']:.2f}x",
        )
    return table


def _drafters_table(audits: Sequence[Audit], loaded: Sequence[str]) -> Table:
    table = _new_table("temp.", "drafters", "drafter", "accepted", "/forward", "of which at depth 1, 2, ...", left=3)
    for audit in audits:
        asked = audit.sampling.method
        for share in audit.shares(loaded if asked == "auto" else [asked]):
            rates = share.rate_by_depth
            deeper = len(rates) - _SHOWN_DEPTHS
            table.add_row(
                f"{audit.sampling.temperature:g}",
                asked,
                share.drafter,
                str(share.accepted_tokens),
                f"{share.tokens_per_forward:.2f}",
                " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN_DEPTHS]) + (f" +{deeper}" if deeper > 0 else ""),
            )
    return table


def _new_table(*columns: str, left: int) -> Table:
    """Fits 80 columns. left: the first columns, which name the row."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _difference_line(audit: Audit, pair: Pair, found: Difference) -> str:
    """One difference with what each side says from there on."""
    verdict = "near-tie" if found.is_near_tie(audit.margin_bound) else "FAULT"
    shown = slice(pair.num_common_characters, pair.num_common_characters + _SHOWN_CHARACTERS)
    sides = (f"{name} {_token(side, found)}{side.text[shown]!r}" for name, side in (("on", pair.on), ("off", pair.off)))
    return f"{verdict}: {_name(audit)}, prompt {pair.prompt}, token {found.token} ({found.kind}): " + ", ".join(sides)


def _name(audit: Audit) -> str:
    return f"temperature {audit.sampling.temperature:g}, drafters {audit.sampling.method}"


def _token(side: Measured, found: Difference) -> str:
    if found.kind == "finish_reason":
        return f"{side.finish_reason} "
    if found.token >= len(side.token_ids):
        return "no token " if found.kind == "length" else ""
    margin = side.margins[found.token] if found.token < len(side.margins) else None
    return f"{side.token_ids[found.token]} (margin {'unknown' if margin is None else f'{margin:.2g}'}) "


def _conclusion(audits: Sequence[Audit]) -> str:
    pairs = sum(len(audit.comparison.pairs) for audit in audits)
    near_ties = sum(len(audit.near_ties) for audit in audits)
    faults = sum(len(audit.faults) for audit in audits)
    gap = max((audit.margin_gap for audit in audits if audit.margin_gap is not None), default=0.0)
    return (
        f"{pairs} prompts answered both ways: {pairs - near_ties - faults} identical, {near_ties} near-ties (margin "
        f"below {audits[0].margin_bound:g}), {faults} faults; margins of the tokens in common agree to {gap:.1g}"
    )


def _report(verified: Verified, clients: int) -> dict[str, Any]:
    first = verified.audits[0]
    return report_head(verified.server, [verified.dataset]) | {
        "sampling": {"max_tokens": first.sampling.max_tokens, "seed": first.sampling.seed, "clients": clients},
        "margin_bound": first.margin_bound,
        "exact": not verified.faults and not verified.undrafted,
        "audits": [audit.as_dict(verified.server.methods) for audit in verified.audits],
    }


def _judge(verified: Verified) -> None:
    """Status 1 where the audit failed, or was none."""
    if verified.faults:
        fail(f"not exact: {verified.faults} answers change with speculation by more than a near-tie")
    if verified.undrafted:
        fail(
            f"nothing was drafted ({', '.join(verified.undrafted)}), so nothing was audited; "
            "ask for more tokens, or for prompts whose answers copy: --prompts edits"
        )
