"""``torpor bench``: a simple load on any OpenAI-compatible server, and what it felt like for its clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress as Bar
from rich.table import Table

from torpor.cli.client import MAX_TIMEOUT_S, NO_PROXY, with_scheme
from torpor.cli.console import err, guarded, out
from torpor.cli.load import LoadConfig, Sample, run_load
from torpor.cli.values import warn_if_exposed
from torpor.errors import ConfigurationError, PeerError

PERCENTILES = (50, 90, 99)


def register(app: typer.Typer) -> None:
    app.command("bench")(guarded(bench))


def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="An engine, a router, or any OpenAI-compatible server.", show_default=False)
    ],
    requests: Annotated[int, typer.Option(help="Requests in all.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    input_words: Annotated[int, typer.Option(help="Words in a generated prompt; every prompt differs.", min=1)] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help="File with one prompt per line instead, used in turn.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.", min=1)] = 32,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate max-tokens (a vLLM extra).")] = False,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    seed: Annotated[int, typer.Option(help="Of the generated prompts.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one request.", min=0.1, max=MAX_TIMEOUT_S)] = 300.0,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure as JSON on standard output.")] = False,
) -> None:
    """Measure time to first token, time per token and throughput of a server.

    torpor bench http://localhost:8000 --requests 64 --concurrency 8
    """
    config = LoadConfig(
        url=with_scheme(url),
        requests=requests,
        concurrency=concurrency,
        prompts=tuple(read_prompts(prompts)) if prompts else (),
        input_words=input_words,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        model=model,
        seed=seed,
        timeout_s=timeout_s,
        api_key=read_api_key(api_key_file) if api_key_file else None,
    )
    figures = summary(*asyncio.run(measured(config)))
    if as_json:
        out.print_json(json.dumps(figures))
    elif figures["requests_done"]:
        out.print(figures_table(figures))
    if figures["requests_done"] == 0:
        raise PeerError(f"no request succeeded; the first error: {figures['errors'][0]}", peer=config.url)


def read_prompts(path: Path) -> Sequence[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigurationError(f"cannot read --prompts {path}: {e}", setting="--prompts", value=str(path)) from e
    if not lines:
        raise ConfigurationError(f"--prompts {path} has no lines", setting="--prompts", value=str(path))
    return lines


def read_api_key(path: Path) -> str:
    """The first line, of any length: it is another server's key, not ours to judge."""
    try:
        key = path.read_text(encoding="utf-8").strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigurationError(f"cannot read --api-key-file {path}: {e}", setting="--api-key-file", value=str(path)) from e
    if not key or not key.isascii() or not key.isprintable():
        message = f"--api-key-file {path} must begin with a line of printable ASCII characters"
        raise ConfigurationError(message, setting="--api-key-file", value=str(path))
    warn_if_exposed(str(path))
    return key


async def measured(config: LoadConfig) -> tuple[list[Sample], float]:
    with Bar(console=err, transient=True) as bar:
        task = bar.add_task("requests", total=config.requests)
        started = time.perf_counter()
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        async with httpx.AsyncClient(timeout=config.timeout_s, limits=limits, mounts=NO_PROXY) as client:
            samples = await run_load(client, config, lambda: bar.advance(task))
        return samples, time.perf_counter() - started


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    done = [s for s in samples if s.error is None]
    tokens = sum(s.tokens for s in done)
    return {
        "requests_done": len(done),
        "requests_failed": len(samples) - len(done),
        "seconds": seconds,
        "prompt_tokens": sum(s.prompt_tokens for s in done),
        "generated_tokens": tokens,
        "generated_tokens_per_s": tokens / seconds,
        "requests_per_s": len(done) / seconds,
        "time_to_first_token_s": percentiles([s.first_token_s for s in done]),
        "time_per_token_s": percentiles([s.per_token_s for s in done if s.tokens > 1]),
        "request_s": percentiles([s.total_s for s in done]),
        "errors": sorted({s.error for s in samples if s.error is not None}),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest rank, so that every figure is one that was measured. None without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def figures_table(figures: dict[str, Any]) -> Table:
    done, failed = figures["requests_done"], figures["requests_failed"]
    title = (
        f"{done} requests done, {failed} failed in {figures['seconds']:.2f} s: "
        f"{figures['generated_tokens_per_s']:.1f} tokens/s, {figures['requests_per_s']:.2f} requests/s"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    table.add_column("milliseconds")
    for column in columns:
        table.add_column(column, justify="right")
    for name in ("time_to_first_token_s", "time_per_token_s", "request_s"):
        if figures[name] is not None:
            table.add_row(name.removesuffix("_s").replace("_", " "), *(f"{1000 * figures[name][c]:.1f}" for c in columns))
    return table
