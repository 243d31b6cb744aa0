"""``torpor check-connector``: the conformance suite, as a table."""

from __future__ import annotations

import dataclasses
import json as as_json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from torpor.cli.console import err, guarded, options, out
from torpor.cli.values import typed_option

if TYPE_CHECKING:
    from torpor.testing.connectors import Outcome, Report

CUDA_EXTENT_BYTES = 2 << 20  # the driver's own granularity: the KV caches are small
STYLES = {"passed": "green", "failed": "bold red", "not applicable": "yellow"}


def register(app: typer.Typer) -> None:
    app.command("check-connector")(guarded(check_connector))


def check_connector(
    connector: Annotated[str, typer.Argument(help="A registered name, memory or pinned (both for tests), or module:Class.")],
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the connector's own; a value may be JSON. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Another field of the engines' ConnectorConfig, such as host or secret_file. Repeatable.", metavar="KEY=VALUE"
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this item, by its name; repeatable.", metavar="ITEM")] = None,
    memory_driver: Annotated[Literal["host", "cuda"], typer.Option(help="Where the KV caches are.")] = "host",
    seed: Annotated[int, typer.Option(help="Of the random layouts and prompts.")] = 0,
    patience: Annotated[
        float, typer.Option(help="How many times longer than usual everything may take: for an emulated machine.")
    ] = 1.0,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each item looks at, and check nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The outcomes as JSON instead of a table.")] = False,
) -> None:
    """Check a KV connector: does it follow a sleep, whatever goes wrong.

    One row per item: passed, failed with the reason, or not applicable with the reason. A connector that does not declare to
    support sleep mode must be refused instead. Ends with exit status 1 when an item failed. No GPU is needed.

        torpor check-connector ipc
        torpor check-connector my_package.my_module:MyConnector --option port=4711
    """
    from torpor.memory import MemoryConfig
    from torpor.testing.connectors import Report, Subject, chosen, run_items

    items = chosen(only)
    if explain:
        out.print(_explained([(item.name, item.proves, item.says) for item in items]))
        return
    memory = MemoryConfig(driver="cuda", extent_bytes=CUDA_EXTENT_BYTES) if memory_driver == "cuda" else None
    extra = dict(typed_option("--option", o) for o in option or ())
    settings = dict(typed_option("--setting", s) for s in setting or ())
    subject = Subject.of(connector, extra=extra, settings=settings, memory=memory, patience=patience)
    if not options.debug:
        logging.disable(logging.ERROR)  # connectors log what goes wrong, and here everything is made to
    outcomes = []
    with err.status("starting") as status:
        for outcome in run_items(subject, items, seed=seed):
            outcomes.append(outcome)
            status.update(f"{escape(outcome.item)}: {outcome.status.value}")
    report = Report(connector=subject.name, outcomes=tuple(outcomes))
    if json:
        out.print_json(as_json.dumps([_plain(outcome) for outcome in report.outcomes]))
    else:
        out.print(_table(report))
    if not report.passed:
        raise typer.Exit(1)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "status": outcome.status.value}


def _table(report: Report) -> Table:
    verdict = "[green]conforms[/]" if report.passed else f"[bold red]{len(report.failed)} failed[/]"
    table = Table(
        title=f"{escape(report.connector)}: {verdict}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in ("item", "proves", "outcome"):
        table.add_column(name, no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for outcome in report.outcomes:
        status = outcome.status.value
        coloured = f"[{STYLES[status]}]{status}[/]"
        table.add_row(outcome.item, outcome.proves, coloured, f"{outcome.seconds:.1f}", escape(outcome.reason))
    return table


def _explained(items: list[tuple[str, str, str]]) -> Table:
    table = Table()
    table.add_column("item", no_wrap=True)
    table.add_column("proves", no_wrap=True)
    table.add_column("what it looks at", overflow="fold")
    for item in items:
        table.add_row(*item)
    return table
