"""From the command line to configurations: defaults, units, vLLM's JSON, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from torpor import cli
from torpor import server as server_module
from torpor.cli import app as cli_app
from torpor.cli import demo as demo_command
from torpor.cli import router as router_command
from torpor.cli import serve as serve_command
from torpor.cli.app import COMMANDS, build_app, known_commands, main, spread
from torpor.cli.kv_transfer import parse_kv_transfer_config
from torpor.cli.reference import cli_reference
from torpor.cli.router import ROUTER_FLAGS
from torpor.cli.serve import engine_config, server_config_of
from torpor.cli.serve_flags import SERVE_FLAGS
from torpor.cli.values import parse_bytes, read_secret
from torpor.connectors.config import ConnectorConfig
from torpor.engine.config import EngineConfig
from torpor.engine.settings import config_from_settings
from torpor.errors import ConfigurationError
from torpor.models import config as models_config
from torpor.models.attention import backends
from torpor.models.config import ModelConfig
from torpor.models.dtypes import DTYPES
from torpor.router import RouterConfig
from torpor.server import ServerConfig

Values = Mapping[str, Any]


def run(argv: list[str]) -> int:
    """The exit status of ``torpor ARGV``."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def serve_values(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Values]:
    """The parsed values of ``torpor serve ...``, which then does not serve."""
    seen: list[Values] = []
    monkeypatch.setattr(serve_command, "serve", seen.append)

    def parse(*argv: str) -> Values:
        assert run(["serve", *argv]) == 0
        return seen.pop()

    return parse


def test_defaults_are_the_libraries_own(serve_values: Callable[..., Values]) -> None:
    values = serve_values("model-folder")
    assert engine_config(values) == EngineConfig(model=ModelConfig(source="model-folder"))
    assert server_config_of(values) == ServerConfig()


def test_every_option_reaches_its_field(serve_values: Callable[..., Values], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-token\n")
    argv = " ".join(
        [
            "m --host 0.0.0.0 --port 9 --admin-token-file TOKEN --api-key-file TOKEN --max-body-bytes 1MiB --drain-s 2",
            "--access-log --served-model-name s --dtype float32 --max-model-len 100 --threads 2 --cache-dir /c",
            "--load-format random",
            "--trust-remote-code --attention-backend sdpa --kv-cache-bytes 512MiB --block-size 32 --no-prefix-caching",
            "--max-num-seqs 3 --max-num-batched-tokens 64 --max-waiting 5 --enable-sleep-mode --enable-pools --while-asleep wake",
            "--retry-after-s 1.5 --sleep-deadline-s 9 --memory-driver cuda --device 1 --host-limit-bytes 2GiB --copy-threads 2",
            "--kv-connector nixl --kv-role consumer --kv-host 127.0.0.2 --kv-port 7 --kv-secret-file TOKEN --kv-engine-id e",
            "--withdraw-timeout-s 3 --kv-heartbeat-s 0.5 --kv-lease-s 4 --kv-load-timeout-s 5 --kv-option a=b",
        ]
    )
    values = serve_values(*argv.replace("TOKEN", str(token)).split())
    server, engine = server_config_of(values), engine_config(values)
    assert (server.host, server.port, server.admin_token, server.api_key) == ("0.0.0.0", 9, "a-long-token", "a-long-token")
    assert (server.max_body_bytes, server.drain_s, server.access_log) == (1 << 20, 2, True)
    m, c, s, z, d, k = engine.model, engine.cache, engine.scheduler, engine.sleep, engine.memory, engine.connector
    assert (m.served_name, m.dtype, m.max_model_len, m.threads, m.cache_dir) == ("s", "float32", 100, 2, "/c")
    assert (m.load_format, m.trust_remote_code, m.attention_backend) == ("random", True, "sdpa")
    assert (c.kv_cache_bytes, c.num_blocks, c.block_size, c.enable_prefix_caching) == (512 << 20, None, 32, False)
    assert (s.max_num_seqs, s.max_num_batched_tokens, s.max_waiting, s.handoff_lease_s, s.remote_kv_timeout_s) == (3, 64, 5, 4, 5)
    assert (z.enable_sleep_mode, z.enable_pools, z.while_asleep, z.retry_after_s, z.default_deadline_s) == (
        True,
        True,
        "wake",
        1.5,
        9,
    )
    assert (d.driver, d.device, d.host_limit_bytes, d.copy_threads) == ("cuda", 1, 2 << 30, 2)
    assert k == ConnectorConfig(
        connector="nixl",
        role="consumer",
        engine_id="e",
        host="127.0.0.2",
        port=7,
        secret_file=str(token),
        withdraw_timeout_s=3,
        lease_heartbeat_s=0.5,
        extra={"a": "b"},
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["m", "--no-such-option"],
        ["m", "extra"],
        [],
        ["m", "--port", "http"],
        ["m", "--while-asleep", "dream"],
        ["m", "--kv-role", "boss", "--kv-connector", "ipc"],
        ["m", "--kv-cache-bytes", "lots"],
        ["m", "--kv-cache-bytes", "0"],
        ["m", "--admin-token-file", "/no/such/file"],
        ["m", "--kv-cache-bytes", "1MiB", "--num-blocks", "3"],
        ["m", "--block-size", "0"],
        ["m", "--drain-s", "inf"],
        ["m", "--drain-s", "-1"],
        ["m", "--hang-timeout-s", "0"],
        ["m", "--retry-after-s", "inf"],
        ["m", "--sleep-deadline-s", "nan"],
        ["m", "--dtype", "int8"],
        ["m", "--load-format", "npz"],
        ["m", "--fused-layers", "maybe"],
        ["m", "--attention-backend", "flash"],
        ["m", "--memory-driver", "rocm"],
        ["m", "--threads", "0"],
        ["m", "--max-model-len", "0"],
        ["m", "--kv-connector", "carrier-pigeon"],
        ["m", "--kv-option", "nope=1", "--kv-connector", "ipc"],
        ["m", "--kv-option", "nope=1", "--kv-connector", "mooncake"],
        ["m", "--kv-host", "0.0.0.0", "--kv-connector", "nixl"],
        ["m", "--kv-host", "0.0.0.0", "--kv-connector", "mooncake"],
        ["m", "--withdraw-timeout-s", "-1", "--kv-connector", "ipc"],
        ["m", "--kv-heartbeat-s", "nan", "--kv-connector", "ipc"],
        ["m", "--kv-heartbeat-s", "0", "--kv-connector", "ipc"],
        ["m", "--kv-secret-file", "/no/such/file", "--kv-connector", "ipc"],
        ["m", "--kv-option", "socket_dir=/proc/nope", "--kv-connector", "ipc"],
        ["m", "--kv-option", "socket_dir=/dev/null/x", "--kv-connector", "ipc"],
        ["m", "--kv-option", "socket_dir=/etc", "--kv-connector", "ipc"],
        ["m", "--kv-host", "192.0.2.1", "--kv-connector", "nixl", "--kv-secret-file", __file__],
        ["/no/such/model"],
        ["/dev/null"],
        ["m", "--kv-role", "producer"],
        ["m", "--kv-option", "a=b"],
        ["m", "--kv-option", "ab", "--kv-connector", "ipc"],
        ["m", "--kv-transfer-config", "{nope"],
        ["m", "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "--kv-connector", "ipc"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_ends_with_2_and_names_it(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "run_server", lambda *args: pytest.fail("it was not refused before a core would begin"))
    assert run(["serve", *argv]) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    if argv:
        assert argv[min(1, len(argv) - 1)].split("=")[0] in shown.err + shown.out


def test_the_words_of_options_are_those_that_the_engine_knows() -> None:
    assert set(models_config.ATTENTION_BACKENDS) == {"auto", *backends("cpu"), *backends("cuda")}
    assert set(models_config.DTYPES) == {"auto", *DTYPES}


@pytest.mark.parametrize(
    ("setting", "flag"), [("threads", "--threads"), ("driver", "--memory-driver"), ("kv_host", "--kv-host"), ("nbytes", None)]
)
def test_what_the_core_finds_wrong_names_the_flag_too(
    setting: str, flag: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*args: object) -> None:
        raise ConfigurationError("it cannot be that", setting=setting)

    monkeypatch.setattr(server_module, "run_server", fail, raising=False)
    (tmp_path / "config.json").touch()
    assert run(["serve", str(tmp_path)]) == 2
    assert capsys.readouterr().err.split() == ["error:", "it", "cannot", "be", "that", *([f"({flag})"] if flag else [])]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        ("1 kib", 1024),
        ("3B", 3),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e3", "1PiB", "1.2.3", "0.1B", "ten"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


@pytest.mark.parametrize("content", ["", "short", "   \nsecond-line", "has\x00zero-byte", "ümlaut-token"])
def test_secrets_that_are_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(typer.BadParameter):
        read_secret(str(path))


# ---- vLLM's --kv-transfer-config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, ConnectorConfig(connector="nixl", role="both")),
        (
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_producer",
                "engine_id": "p0",
                "kv_ip": "127.0.0.3",
                "kv_port": 14579,
                "kv_buffer_device": "cpu",
                "kv_buffer_size": 1e9,
                "kv_rank": 0,
                "kv_parallel_size": 2,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"backends": ["UCX"]},
            },
            ConnectorConfig(
                connector="nixl", role="producer", engine_id="p0", host="127.0.0.3", port=14579, extra={"backends": ["UCX"]}
            ),
        ),
        ({"kv_connector": "ipc", "kv_role": "kv_consumer"}, ConnectorConfig(connector="ipc", role="consumer")),
        (
            {"kv_connector": "Mine", "kv_connector_module_path": "my.module", "kv_role": "kv_both"},
            ConnectorConfig(connector="my.module:Mine", role="both"),
        ),
    ],
)
def test_vllms_json(given: dict[str, Any], expected: ConnectorConfig, serve_values: Callable[..., Values]) -> None:
    values = serve_values("m", "--kv-transfer-config", json.dumps(given))
    assert engine_config(values).connector == expected


def test_vllms_json_goes_with_the_options_it_has_not(serve_values: Callable[..., Values], tmp_path: Path) -> None:
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    values = serve_values("m", "--kv-transfer-config", config, "--withdraw-timeout-s", "2", "--kv-host", "127.0.0.9")
    connector = engine_config(values).connector
    assert connector == ConnectorConfig(connector="nixl", withdraw_timeout_s=2, host="127.0.0.9")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ("{}", "kv_connector"),
        ('{"kv_connector": 3}', "kv_connector"),
        ('{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}', "NixlConnector"),
        ('{"kv_connector": "NixlConnector"}', "kv_role"),
        ('{"kv_connector": "NixlConnector", "kv_role": "both"}', "kv_both"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_roll": 1}', "kv_roll"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": "1"}', "kv_port"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": true}', "kv_port"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": []}', "kv_connector_extra_config"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}', "kv_load_failure_policy"),
    ],
)
def test_vllms_json_that_is_wrong_names_the_key(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        parse_kv_transfer_config(text)
    assert caught.value.setting == "--kv-transfer-config"


# ---- the router's options -----------------------------------------------------------------------------------------------------


def test_the_routers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Values] = []
    monkeypatch.setattr(router_command, "route", seen.append)
    argv = ["--prefill", "http://a", "http://b", "--decode", "http://c", "--decode", "http://d", "--port", "1"]
    assert run(["router", *argv, "--policy", "round_robin"]) == 0
    config = RouterConfig(**router_command.collect(RouterConfig, ROUTER_FLAGS, seen[0]))
    assert config == RouterConfig(prefill=("http://a", "http://b"), decode=("http://c", "http://d"), port=1, policy="round_robin")
    assert run(["router", "--decode", "http://c"]) == 0
    assert RouterConfig(**router_command.collect(RouterConfig, ROUTER_FLAGS, seen[1])) == RouterConfig(decode=("http://c",))


@pytest.mark.parametrize(
    "argv",
    [[], ["--prefill", "http://a"], ["--decode", "nonsense"], ["--decode", "http://a", "--policy", "x"], ["http://a"]],
    ids=str,
)
def test_the_routers_options_that_make_no_sense(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["router", *argv]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--health-interval-s", "0"),
        ("--max-connections", "0"),
        ("--drain-s", "inf"),
        ("--backoff-s", "-1"),
        ("--read-timeout-s", "nan"),
    ],
)
def test_the_routers_numbers_are_checked_before_it_listens(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["router", "--decode", "http://a", flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_what_requests_meet_while_asleep_is_one_of_three_words() -> None:
    with pytest.raises(ConfigurationError, match="reject, wait, wake") as caught:
        config_from_settings("m", while_asleep="rejct")
    assert caught.value.setting == "while_asleep"


@pytest.mark.parametrize("more", [["--json", "/no/such/folder/file"], ["--json", "here", "--unfollowed"]], ids=str)
def test_a_demo_whose_results_have_no_place_does_not_begin(
    more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_command, "run_demo", pytest.fail)
    monkeypatch.setattr(demo_command, "run_unfollowed", pytest.fail)
    assert run(["demo", *more]) == 2
    assert "--json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_several_values_after_one_flag() -> None:
    flags = ("--prefill", "--decode")
    given = ["router", "--prefill", "a", "b", "--port", "1", "--decode", "c", "d"]
    assert spread(given, flags) == ["router", "--prefill", "a", "--prefill", "b", "--port", "1", "--decode", "c", "--decode", "d"]
    assert spread(["router", "--prefill=a", "--decode", "b"], flags) == ["router", "--prefill=a", "--decode", "b"]


# ---- the whole ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"), [([], 2), (["--help"], 0), (["nonsense"], 2), (["--nonsense"], 2), (["version"], 0), (["--version"], 0)]
)
def test_the_command_itself(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == code
    shown = capsys.readouterr()
    if "--help" in argv:
        assert all(c.name in shown.out for c in known_commands())


@pytest.mark.parametrize("name", [c.name for c in known_commands()])
def test_help_teaches_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "Usage: torpor" in capsys.readouterr().out


def test_the_list_of_commands_says_what_their_help_says() -> None:
    commands = {c.name: c for c in build_app().registered_commands}
    for command in COMMANDS:
        found = commands[command.name]
        first = (found.help or found.callback.__doc__ or "").strip().splitlines()[0]  # type: ignore[union-attr]
        assert command.summary == first or command.module == "torpor.cli.demo"


def test_an_interrupt_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_app.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "m"])
    assert ended.value.code == 130


def test_only_the_command_that_is_used_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    real = cli_app.importlib.import_module
    monkeypatch.setattr(cli_app.importlib, "import_module", lambda name: imported.append(name) or real(name))
    assert run(["version"]) == 0
    assert run(["--help"]) == 0
    assert imported == []
    assert run(["sleep", "--help"]) == 0
    assert imported == ["torpor.cli.admin"]


def test_every_flag_has_help_and_a_spelling_of_its_own() -> None:
    for flags in (SERVE_FLAGS, ROUTER_FLAGS):
        assert len({f.flag for f in flags}) == len(flags)
        assert all(f.help.endswith(".") for f in flags)


def test_the_reference_is_up_to_date() -> None:
    path = Path(__file__).parent.parent.parent / "docs" / "cli.md"
    assert path.read_text(encoding="utf-8") == cli_reference(), "run scripts/gen-cli-docs"


@pytest.mark.parametrize("name", [c.name for c in known_commands()])
def test_the_reference_names_the_options_that_the_command_takes(name: str) -> None:
    taken = {f for p in click_command(name).params if p.param_type_name == "option" for f in (*p.opts, *p.secondary_opts)}
    section = cli_reference().split(f"\n## {name}\n")[1].split("\n## ")[0]
    spelled = [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")]
    assert {flag for row in spelled for flag in re.findall(r"--[a-z-]+", row.split(" ")[0])} == taken - {"--help"}


def click_command(name: str) -> Any:
    group: Any = typer.main.get_command(build_app())
    return group.commands[name]


def test_a_connector_s_options_are_numbers_where_they_read_as_numbers(serve_values: Callable[..., Values]) -> None:
    given = {"a": "8", "b": "0.5", "c": "4GiB", "d": "mlx5_0", "e": "-1", "f": "/var/kv", "g": "tcp"}
    flags = [part for name, text in given.items() for part in ("--kv-option", f"{name}={text}")]
    connector = engine_config(serve_values("m", "--kv-connector", "offload", *flags)).connector
    assert connector is not None
    assert connector.extra == {"a": 8, "b": 0.5, "c": 4 << 30, "d": "mlx5_0", "e": -1, "f": "/var/kv", "g": "tcp"}
