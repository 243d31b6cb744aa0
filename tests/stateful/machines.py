from __future__ import annotations

from engine_machine import EngineMachine
from pair_machine import IpcPair, NixlPair

MACHINES = {"engine": EngineMachine, "ipc": IpcPair, "nixl": NixlPair}
