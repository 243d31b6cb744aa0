from __future__ import annotations

from engine_machine import EngineMachine
from pair_machine import PAIRS

MACHINES = {"engine": EngineMachine, **PAIRS}
