"""The core in a process of its own: start-up, calls, deaths on either side. A small random model, so that starting is quick."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import engine_runs
import psutil
import pytest
import pytest_asyncio
from engine_models import save_model, tiny_engine, tiny_settings
from engine_runs import outputs_of, request, running, tokens_of

from torpor.engine.base import EngineState, SleepRequest
from torpor.engine.client import HUNG_S, AsyncEngineClient
from torpor.errors import ConfigurationError, EngineDeadError, ModelError, RequestError
from torpor.request import FinishReason

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[AsyncEngineClient]:
    """One engine for every test that leaves it as it was."""
    async with running(tiny_engine(folder)) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(folder: Path) -> AsyncIterator[AsyncEngineClient]:
    async with running(tiny_engine(folder)) as client:
        yield client


async def ask_until_dead(client: AsyncEngineClient) -> None:
    while True:
        await client.stats()


async def gone(pid: int, within_s: float = 15.0) -> bool:
    """Whether the process ends; a zombie counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_requests_sleep_and_wake_across_processes(client: AsyncEngineClient) -> None:
    assert client.pid != os.getpid()
    before = await asyncio.gather(*(tokens_of(client, request(f"a{i}", [i + 1, 2])) for i in range(4)))
    for cycle, level in enumerate((1, 2, 1)):
        stream = client.generate(request(f"kept{cycle}", [1, 2], 40))
        seen = (await anext(stream)).new_token_ids
        report = await client.sleep(SleepRequest(level=level, mode="keep"))
        assert (report["state"], client.state) == ("asleep", EngineState.ASLEEP)
        assert (await client.stats())["memory"]["mapped_bytes"] == 0
        assert (await client.wake_up())["state"] == "awake"
        rest = [t async for output in stream for t in output.new_token_ids]
        assert [*seen, *rest][:12] == before[0]
        after = await asyncio.gather(*(tokens_of(client, request(f"b{cycle}-{i}", [i + 1, 2])) for i in range(4)))
        assert after == before


async def test_sampled_text_is_the_same_frozen_or_not(client: AsyncEngineClient) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 17}
    whole = await tokens_of(client, request("whole", max_tokens=60, **sampling))
    stream = client.generate(request("frozen", max_tokens=60, **sampling))
    seen = (await anext(stream)).new_token_ids
    await client.sleep(SleepRequest(level=2, mode="keep"))
    await client.wake_up()
    assert [*seen, *[t async for output in stream for t in output.new_token_ids]] == whole


async def test_a_bad_request_and_a_bad_call_leave_everybody_else_alone(client: AsyncEngineClient) -> None:
    good = asyncio.create_task(tokens_of(client, request("good", max_tokens=40)))
    with pytest.raises(RequestError, match="KV cache"):
        await tokens_of(client, request("long", [1] * 250))
    with pytest.raises(ConfigurationError, match="level is 7"):
        await client.sleep(SleepRequest(level=7))
    assert len(await good) == 40


async def test_abort_mode_ends_running_requests_with_that_reason(client: AsyncEngineClient) -> None:
    running_request = asyncio.create_task(outputs_of(client, request("a", max_tokens=150)))
    while (await client.stats())["scheduler"]["running"] == 0:
        await asyncio.sleep(0.01)
    await client.sleep(SleepRequest(level=1, mode="abort"))
    assert (await running_request)[-1].finish_reason is FinishReason.ABORT
    await client.wake_up()
    assert len(await tokens_of(client, request("b"))) == 12


async def test_kill_9_of_the_core_is_noticed_at_once_and_named(mortal: AsyncEngineClient) -> None:
    stream = mortal.generate(request("a", max_tokens=150))
    await anext(stream)
    os.kill(mortal.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        [output async for output in stream]
    assert time.monotonic() - killed < 5
    for call in (mortal.stats(), mortal.check_health(), mortal.abort(["a"]), mortal.sleep(SleepRequest())):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await call
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await outputs_of(mortal, request("b"))
    assert mortal.state is EngineState.DEAD


async def test_a_crash_in_native_code_names_its_signal(mortal: AsyncEngineClient) -> None:
    os.kill(mortal.pid, signal.SIGSEGV)
    with pytest.raises(EngineDeadError, match="killed by SIGSEGV"):
        await ask_until_dead(mortal)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_are_the_client_s_business(mortal: AsyncEngineClient, number: signal.Signals) -> None:
    """A supervisor that stops a service sends them to every process of it at once."""
    stream = mortal.generate(request("a", max_tokens=50))
    await anext(stream)
    os.kill(mortal.pid, number)
    assert len([output async for output in stream]) == 49
    pid = mortal.pid
    await mortal.shutdown()
    assert await gone(pid)


async def test_shutdown_leaves_no_process_and_no_folder(folder: Path) -> None:
    async with running(tiny_engine(folder)) as client:
        stream = client.generate(request("a", max_tokens=150))
        await anext(stream)
        pid, sockets = client.pid, client._process._folder
        assert sockets.stat().st_mode & 0o777 == 0o700
    assert await gone(pid)
    assert not sockets.exists()
    with pytest.raises(EngineDeadError):
        [output async for output in stream]


PARENT = """
import asyncio, json, sys
from torpor.engine.client import AsyncEngineClient
from torpor.engine.settings import config_from_settings

async def main():
    source, settings = json.loads(sys.stdin.readline())
    client = await AsyncEngineClient.start(config_from_settings(source, **settings))
    print(client.pid, flush=True)
    print(client._process._folder, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_core_ends_with_its_client(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        parent.stdin.write(json.dumps([str(folder), tiny_settings()]).encode() + b"\n")
        parent.stdin.flush()
        core = int(await asyncio.to_thread(parent.stdout.readline))
        folder_of_sockets = Path((await asyncio.to_thread(parent.stdout.readline)).decode().strip())
        assert psutil.pid_exists(core)
        assert folder_of_sockets.is_dir()
        parent.kill()
        parent.wait()
        assert await gone(core)
        assert not folder_of_sockets.exists()


async def test_a_core_that_is_stopped_is_silent_and_ended_by_the_shutdown(folder: Path) -> None:
    client = await AsyncEngineClient.start(tiny_engine(folder), timeout_s=engine_runs.START_S)
    await client.check_health()
    stream = client.generate(request("a", max_tokens=150))
    await anext(stream)
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.check_health(), 0.5)
    while client.silent_s() < HUNG_S + 0.5:
        await asyncio.sleep(0.2)
    started = time.monotonic()
    await client.shutdown()
    assert time.monotonic() - started < 5
    assert await gone(client.pid)
    with pytest.raises(EngineDeadError, match="did not answer"):
        [output async for output in stream]


@pytest.mark.parametrize(
    ("source", "settings", "error", "names"),
    [
        ("/no/such/model", {}, ModelError, "/no/such/model"),
        (None, {"num_blocks": 0}, ConfigurationError, "num_blocks"),
        (None, {"dtype": "float7"}, ConfigurationError, "float7"),
    ],
)
async def test_what_keeps_a_core_from_starting_is_raised_here(
    folder: Path, source: str | None, settings: dict[str, object], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        await AsyncEngineClient.start(tiny_engine(Path(source) if source else folder, **settings), timeout_s=engine_runs.START_S)


async def test_start_up_tells_what_it_is_doing_and_can_be_given_up(folder: Path) -> None:
    told: list[str] = []
    async with running(tiny_engine(folder), progress=lambda phase, fraction: told.append(phase)) as client:
        assert "loading weights" in told
        assert {"threads", "dtype", "pools"} <= set(client.info.startup)
    with pytest.raises(EngineDeadError, match="not ready after"):
        await AsyncEngineClient.start(tiny_engine(folder), timeout_s=0.01)


async def test_the_offline_example_runs(folder: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "offline_sleep.py"
    command = [sys.executable, str(example), str(folder), "--max-tokens", "6"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the same answers, every time\n")
