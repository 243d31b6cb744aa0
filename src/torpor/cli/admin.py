"""``torpor memory | sleep | wake | pause | resume``: a running server, from a shell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.live import Live
from rich.markup import escape

from torpor.cli.client import MAX_TIMEOUT_S, AdminClient, AnswerTimeout, Token, Url
from torpor.cli.console import err, guarded, out
from torpor.cli.pools import pools_view, report_view
from torpor.cli.values import split_option

Mode = Literal["abort", "wait", "keep"]
AsJson = Annotated[bool, typer.Option("--json", help="The server's JSON instead of a table.")]
ModeOption = Annotated[Mode | None, typer.Option(help="Running requests: ended, waited for, or frozen to go on later.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds to wait for the server's answer.", min=0.1, max=MAX_TIMEOUT_S)]

READ_S = 10.0
OPERATION_S = 600.0
UNDONE_BY = {"/sleep": "wake", "/pause": "resume"}


def register(app: typer.Typer) -> None:
    for name, run in (("memory", memory), ("sleep", sleep), ("wake", wake), ("pause", pause), ("resume", resume)):
        app.command(name)(guarded(run))


def memory(
    url: Url,
    once: Annotated[bool, typer.Option("--once", help="Print the table and end.")] = False,
    as_json: AsJson = False,
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=MAX_TIMEOUT_S)] = 1.0,
    token: Token = None,
) -> None:
    """Show a server's pools: what is resident, what is in host images, who waits.

    A live table until Ctrl-C; with --once or --json one look.
    """
    with AdminClient(url, token, READ_S) as client:
        if as_json or once or not out.is_terminal:
            stats = client.call("GET", "/memory")
            show(stats, as_json, pools_view)
            return
        with Live(console=out, auto_refresh=False) as live:
            while True:
                live.update(pools_view(client.call("GET", "/memory")), refresh=True)
                time.sleep(interval_s)


def sleep(
    url: Url,
    level: Annotated[
        int | None, typer.Option(help="0: pause; 1: weights to host; 2: weights dropped. Default: 1.", min=0, max=2)
    ] = None,
    mode: ModeOption = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Undo the sleep when running requests have not ended after so many seconds.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="keep, host or discard for one tag, instead of a level; repeatable.", metavar="TAG=POLICY"),
    ] = None,
    as_json: AsJson = False,
    timeout_s: TimeoutOption = OPERATION_S,
    token: Token = None,
) -> None:
    """Give a server's device memory back.

    torpor sleep http://localhost:8000 --level 1 --mode wait
    """
    body = {"policies": dict(split_option("--policy", p, "TAG=POLICY") for p in policy)} if policy else None
    query = {"level": level, "mode": mode, "deadline_s": deadline_s}
    operate(url, token, timeout_s, "/sleep", as_json, query, body)


def wake(
    url: Url,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="Only this tag; repeatable. The engine serves once all are back.")
    ] = None,
    as_json: AsJson = False,
    timeout_s: TimeoutOption = OPERATION_S,
    token: Token = None,
) -> None:
    """Bring a sleeping server back to the same addresses."""
    operate(url, token, timeout_s, "/wake_up", as_json, {"tags": tag or None})


def pause(
    url: Url, mode: ModeOption = None, as_json: AsJson = False, timeout_s: TimeoutOption = OPERATION_S, token: Token = None
) -> None:
    """Stop serving without giving memory back."""
    operate(url, token, timeout_s, "/pause", as_json, {"mode": mode})


def resume(url: Url, as_json: AsJson = False, timeout_s: TimeoutOption = OPERATION_S, token: Token = None) -> None:
    """Serve again after a pause."""
    operate(url, token, timeout_s, "/resume", as_json)


def operate(
    url: str, token: str | None, timeout_s: float, path: str, as_json: bool, query: dict[str, Any] | None = None, body: Any = None
) -> None:
    with (
        AdminClient(url, token, timeout_s) as client,
        err.status(f"{path.lstrip('/')} at {url}"),
        telling_what_goes_on(url, path),
    ):
        report = client.call("POST", path, query, body)
    show(report, as_json, report_view)


@contextmanager
def telling_what_goes_on(url: str, path: str) -> Iterator[None]:
    """Ctrl-C and --timeout-s end the wait for an answer, not what the server was asked to do."""
    goes_on = ""
    if path in UNDONE_BY:
        goes_on = f"the server goes on with the {path.lstrip('/')}; `torpor {UNDONE_BY[path]} {url}` cancels it"
    try:
        yield
    except KeyboardInterrupt:
        if goes_on:
            err.print(escape(goes_on), soft_wrap=True)
        raise
    except AnswerTimeout as error:
        raise AnswerTimeout(f"{error.message} (--timeout-s){f': {goes_on}' if goes_on else ''}", **error.fields) from error


def show(found: dict[str, Any], as_json: bool, view: Any) -> None:
    if as_json:
        out.print_json(json.dumps(found))
    else:
        out.print(view(found))
