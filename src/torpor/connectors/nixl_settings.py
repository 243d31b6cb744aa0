"""What UCX is told, and whose fault it is when it does not take that.

NIXL says of a backend that does not start that it does not start. The reason, and which transports and devices there are, UCX
prints to the process's stdout and tells no caller. So after a failure the same is tried once more by a process of its own, whose
output can be read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from torpor.errors import ConfigurationError

UCX_SETTINGS = "RCACHE_ENABLE=n"
ASK_S = 120.0  # an emulated processor takes most of a minute
_ASK = (
    "import sys; sys.path[:] = {path!r}\n"
    "from torpor.connectors.nixl_agent import load_package\n"
    "package = load_package()\n"
    "agent = package.nixl_agent('asks', package.nixl_agent_config(backends=[]))\n"
    "agent.create_backend('UCX', {{'engine_config': {config!r}}})\n"
)
_UCX_LINE = re.compile(r"^\[[^\]]*\]\s+\[[^\]]*\]\s+\S+\s+UCX\s+(?:WARN|ERROR)\s+(.*)$", re.MULTILINE)
# What UCX 1.23 says of a setting. Of memory that is short, or a device that fails, it says other things.
_WRONG = re.compile(
    r"is not available, please use one or more of|no usable transports|no active messages transport|[Ii]nvalid value for"
)

_DEVICES = ("UCX_NET_DEVICES", "UCX_SHM_DEVICES", "UCX_ACC_DEVICES")


def check_tls(tls: str | None) -> None:
    """ConfigurationError for more than one transport: NIXL ends UCX's setting at the comma, and says nothing."""
    if tls is not None and "," in tls:
        raise ConfigurationError(
            f"connector option ucx_tls is one transport, not {tls!r}: for several set UCX_TLS in the environment, and no ucx_tls",
            setting="ucx_tls",
            value=tls,
        )


def engine_config(tls: str | None) -> str:
    return UCX_SETTINGS + (f",TLS={tls}" if tls else "")


def refused(tls: str | None) -> ConfigurationError | None:
    """After an agent of UCX's did not start: the setting that keeps it from that, if one does. Takes a second or more."""
    said = _UCX_LINE.findall(_ask(tls))
    if not any(map(_WRONG.search, said)):
        return None
    setting, value = _culprit(tls, said)
    given = f"{setting} {value!r}" if value else "its settings"
    return ConfigurationError(f"UCX cannot work with {given}: {'; '.join(said)}", setting=setting, value=value)


def _ask(tls: str | None) -> str:
    """All that UCX prints; nothing when that cannot be found out."""
    environment = {**os.environ, "UCX_LOG_LEVEL": "warn"}  # UCX's own variables are half of what it is asked about
    environment.pop("UCX_LOG_FILE", None)
    code = _ASK.format(path=sys.path, config=engine_config(tls))
    try:
        asked = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout if asked.returncode else ""


def _culprit(tls: str | None, said: list[str]) -> tuple[str, str | None]:
    """Which setting to change. UCX calls a variable by its name, devices by their kind, and the transport is the rest. It reads
    its variables from the environment, so what was given is there."""
    words = " ".join(said)
    named = re.search(r"[Ii]nvalid value for (\w+)", words)
    if named:
        name = f"UCX_{named[1].removeprefix('UCX_')}"
    elif "device" in words.partition(" is not available")[0]:
        name = next((name for name in _DEVICES if name in os.environ), _DEVICES[0])
    elif tls is not None:
        return "ucx_tls", tls
    else:
        name = "UCX_TLS"
    return name, os.environ.get(name)
