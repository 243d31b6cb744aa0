"""``torpor serve``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from torpor.cli.console import Progress, err, guarded, warn
from torpor.cli.early import import_early
from torpor.cli.flags import collect, command, keyword, naming_flags
from torpor.cli.kv_transfer import parse_kv_transfer_config
from torpor.cli.open_doors import open_doors_of_connector, open_doors_of_server
from torpor.cli.serve_flags import SERVE_FLAGS, TRANSFER
from torpor.cli.values import typed_option
from torpor.connectors.config import ConnectorConfig
from torpor.connectors.doors import TcpDoor
from torpor.engine import collector
from torpor.engine.base import EngineInfo
from torpor.engine.config import EngineConfig, SleepConfig
from torpor.engine.kv_connector import choose_connector
from torpor.errors import ConfigurationError
from torpor.kvcache.config import CacheConfig
from torpor.memory.config import MemoryConfig
from torpor.models.config import ModelConfig
from torpor.models.places import find_model
from torpor.scheduler.config import SchedulerConfig
from torpor.server.config import ServerConfig

DOC = """Serve MODEL with an OpenAI-compatible API.

MODEL is a Hugging Face folder (safetensors), a .gguf file, or builtin:smollm2-135m.

    torpor serve builtin:smollm2-135m --enable-sleep-mode
    curl -X POST 'localhost:8000/sleep?level=1'      # gives device memory back
    curl -X POST 'localhost:8000/wake_up'            # the same addresses, the same answers

A prefill/decode pair is two of these with --kv-connector, and a router:

    torpor serve MODEL --port 8001 --enable-sleep-mode --kv-connector ipc --kv-role producer
    torpor serve MODEL --port 8002 --enable-sleep-mode --kv-connector ipc --kv-role consumer
    torpor router --prefill http://localhost:8001 --decode http://localhost:8002
"""

LISTENING_CONNECTORS = ("nixl", "mooncake")  # on --kv-host and --kv-port
LIGHT_CONNECTORS = ("ipc", "offload", *LISTENING_CONNECTORS)
LogLevel = Literal["debug", "info", "warning", "error"]

EXTRA = (
    keyword(
        "model", Annotated[str, typer.Argument(metavar="MODEL", help="Folder, .gguf file, or builtin:NAME.", show_default=False)]
    ),
    keyword(
        "kv_transfer_config",
        Annotated[
            str | None,
            typer.Option(
                help="vLLM's JSON instead of --kv-connector, --kv-role, --kv-host, --kv-port and --kv-engine-id.",
                metavar="JSON",
                rich_help_panel=TRANSFER,
            ),
        ],
        None,
    ),
    keyword(
        "kv_option",
        Annotated[
            list[str] | None,
            typer.Option(
                help="An option of the connector's own, such as host_bytes=4GiB; repeatable.",
                metavar="KEY=VALUE",
                rich_help_panel=TRANSFER,
            ),
        ],
        None,
    ),
    keyword(
        "log_level", Annotated[LogLevel, typer.Option(help="What is logged to standard error.", rich_help_panel="Server")], "info"
    ),
)


def register(app: typer.Typer) -> None:
    app.command("serve", help=DOC)(command(guarded(serve), SERVE_FLAGS, EXTRA, doc=DOC))


def serve(values: Mapping[str, Any]) -> None:
    options = {o.partition("=")[0]: "--kv-option" for o in values["kv_option"] or ()}
    with naming_flags(SERVE_FLAGS, options):
        config, server_config = engine_config(values), server_config_of(values)
        check_at_the_door(config)

    from torpor.engine.client import AsyncEngineClient
    from torpor.engine.frontend import Frontend
    from torpor.server import run_server

    configure_logging(values["log_level"])
    progress = Progress(f"starting {config.model.source}")

    async def start() -> Frontend:
        with progress:
            starting = asyncio.ensure_future(AsyncEngineClient.start(config, progress=progress))
            await asyncio.sleep(0)  # the core's process is on its way: now there is time
            import_early(without_torch=not config.model.trust_remote_code)
            client = await starting
            progress("loading the tokenizer", 0.0)
            try:
                return await asyncio.to_thread(Frontend.for_client, client, trust_remote_code=config.model.trust_remote_code)
            except BaseException:
                await client.shutdown()
                raise

    def on_started(frontend: Any, url: str) -> None:
        collector.settle()
        err.print(startup_table(frontend.info, url))
        for open_to_others in (open_doors_of_server(server_config, url), open_doors_of_connector(config.connector)):
            if open_to_others is not None:
                warn(open_to_others)

    with naming_flags(SERVE_FLAGS, options):  # what the core says of its configuration
        stopped_by = run_server(server_config, start, on_started)
    if stopped_by is not None:  # before it served: a shell says so of any program
        raise typer.Exit(128 + stopped_by)


def server_config_of(values: Mapping[str, Any]) -> ServerConfig:
    return ServerConfig(**collect(ServerConfig, SERVE_FLAGS, values))


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """ConfigurationError for what does not go together; the engine checks the rest."""
    return EngineConfig(
        model=ModelConfig(source=values["model"], **collect(ModelConfig, SERVE_FLAGS, values)),
        memory=MemoryConfig(**collect(MemoryConfig, SERVE_FLAGS, values)),
        cache=CacheConfig(**collect(CacheConfig, SERVE_FLAGS, values)),
        scheduler=SchedulerConfig(**collect(SchedulerConfig, SERVE_FLAGS, values)),
        connector=connector_config(values),
        sleep=SleepConfig(**collect(SleepConfig, SERVE_FLAGS, values)),
    )


def check_at_the_door(config: EngineConfig) -> None:
    """Raises what the core would raise, seconds or minutes later: of the model's name, and of a connector whose module does not
    bring in torch."""
    connector = config.connector
    if connector is not None and connector.connector in LIGHT_CONNECTORS:
        choose_connector(connector, config.sleep)
        if connector.connector in LISTENING_CONNECTORS:
            TcpDoor(connector.host, connector.port).close()
    find_model(config.model.source)


def connector_config(values: Mapping[str, Any]) -> ConnectorConfig | None:
    flags = [f for f in SERVE_FLAGS if f.config is ConnectorConfig]
    chosen = collect(ConnectorConfig, flags, values)
    changed = [f.flag for f in flags if values[f.name] != f.default]
    given = values["kv_transfer_config"]
    options = dict(typed_option("--kv-option", o) for o in values["kv_option"] or ())
    if given is not None:
        vllm = parse_kv_transfer_config(given)
        twice = [f.flag for f in flags if f.flag in changed and f.field in vllm]
        if twice:
            raise ConfigurationError(
                f"--kv-transfer-config says it as well: leave out {', '.join(twice)}", setting=twice[0], value=given
            )
        chosen.update(vllm)
    if chosen["connector"] is None:
        unused = [*changed, *(["--kv-option"] if options else [])]
        if unused:
            raise ConfigurationError(f"{', '.join(unused)} needs a --kv-connector", setting="--kv-connector", value=None)
        return None
    chosen["extra"] = {**chosen.get("extra", {}), **options}
    return ConnectorConfig(**chosen)


def configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


def startup_table(info: EngineInfo, url: str) -> Table:
    """What was chosen, once, for a person."""
    table = Table(
        title=f"torpor serves {escape(info.model_name)} at {url}", show_header=False, title_justify="left", title_style="bold"
    )
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    rows = {"model": info.model_id, "context": f"{info.max_model_len} tokens", **info.startup}
    if info.engine_id is not None:
        rows["engine id"] = info.engine_id
    for name, value in rows.items():
        table.add_row(escape(name), escape(value))
    return table
