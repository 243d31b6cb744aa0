"""Tables of pools and of sleep and wake reports, from the server's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from torpor.cli.console import size

COLOURS = {"resident": "green", "asleep": "blue", "partial": "red", "valid": "green", "on_host": "blue", "lost": "yellow"}


def pools_view(stats: Mapping[str, Any]) -> RenderableType:
    """The whole of ``GET /memory`` for a person."""
    memory = stats.get("memory") or {}
    title = f"{stats.get('state', '?')}{' (as last known: the engine does not answer)' if stats.get('stale') else ''}"
    # Seven columns, whole in a terminal of 80.
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tag", "residency", "content"):
        table.add_column(name, no_wrap=True)
    for name in ("resident", "allocated", "reserved", "image"):
        table.add_column(name, justify="right", no_wrap=True)
    for tag in memory.get("tags", ()):
        table.add_row(*_tag_row(tag))
    return Group(table, *_lines(memory, stats))


def _tag_row(tag: Mapping[str, Any]) -> list[str]:
    sizes = [size(tag[k]) for k in ("resident_bytes", "allocated_bytes", "reserved_bytes", "image_bytes")]
    return [escape(tag["tag"]), _coloured(tag["residency"]), _coloured(tag["content"]), *sizes]


def _coloured(word: str) -> str:
    return f"[{COLOURS.get(word, 'white')}]{escape(word)}[/]"


def _lines(memory: Mapping[str, Any], stats: Mapping[str, Any]) -> list[str]:
    lines = []
    if memory:
        limit = memory.get("host_limit_bytes")
        host = f"{size(memory['host_committed_bytes'])} of {size(limit)}" if limit else size(memory["host_committed_bytes"])
        lines.append(f"mapped {size(memory['mapped_bytes'])}; images {host}; sleeps {memory['sleeps']}, wakes {memory['wakes']}")
    scheduler = stats.get("scheduler") or {}
    if scheduler:
        lines.append(f"requests: {scheduler.get('running', 0)} running, {scheduler.get('waiting', 0)} waiting")
    connector = stats.get("connector")
    if connector:
        done, failed, flying = (connector.get(k, 0) for k in ("loads_done", "loads_failed", "loads_in_flight"))
        lines.append(
            f"{escape(str(connector.get('connector')))} over {escape(str(connector.get('path')))}: "
            f"{done} loads done, {failed} failed, {flying} in flight; {connector.get('pending_hand_offs', 0)} hand-offs wait"
        )
    return lines


def report_view(report: Mapping[str, Any]) -> RenderableType:
    """A sleep's or a wake's report: one row per tag, the holders of what did not come back by name."""
    head = f"{report.get('state', '?')} after {1000 * float(report.get('seconds') or 0):.1f} ms"
    if report.get("noop"):
        head += ": nothing to do"
    if report.get("reason"):
        head += f" ({escape(str(report['reason']))})"
    tags = report.get("tags") or ()
    if not tags:
        return head
    columns = [c for c in tags[0] if c.endswith("_bytes")]
    table = Table(title=head, title_justify="left", title_style="bold")
    table.add_column("tag")
    for column in columns:
        table.add_column(column.removesuffix("_bytes").replace("_", " "), justify="right")
    read_again = report.get("refilled_tags") or ()
    for tag in tags:
        again = {"restored_bytes": "read again"} if tag["tag"] in read_again else {}  # from the checkpoint, not from an image
        table.add_row(escape(tag["tag"]), *(again.get(c) or size(tag[c]) for c in columns))
    holders = [
        f"[red]{escape(h['who'])} still holds {size(h['bytes'])} of {escape(t['tag'])}[/]"
        for t in tags
        for h in t.get("holders", ())
    ]
    return Group(table, *holders)
