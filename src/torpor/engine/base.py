"""The contract between whoever serves requests (server, LLM, tests) and the engine, in this process or in another."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from torpor.request import EngineOutput, GenerationRequest

SleepMode = Literal["abort", "wait", "keep"]
SLEEP_MODES: tuple[SleepMode, ...] = ("abort", "wait", "keep")
LEVELS: tuple[int, ...] = (0, 1, 2)


class EngineState(enum.Enum):
    STARTING = "starting"  # loading; serves nothing yet
    AWAKE = "awake"  # every pool resident and valid, admission open
    PAUSED = "paused"  # everything resident; admission closed by pause or by a level-0 sleep
    DRAINING = "draining"  # a sleep was accepted; running requests end or freeze; a wake cancels it (E8)
    SLEEPING = "sleeping"  # connectors release, images are made, memory is unmapped
    ASLEEP = "asleep"  # some pool is not resident or not valid; also after a failed sleep or a partial wake (E7, E9)
    WAKING = "waking"  # memory is mapped, content restored; a sleep waits for it (E8)
    DEAD = "dead"  # the core is gone or shut down


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``policies`` (tag to keep|host|discard), when given, is used instead of ``level``."""

    level: int = 1
    mode: SleepMode = "wait"
    deadline_s: float | None = None
    policies: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that hold from start-up on."""

    model_name: str
    model_id: str  # the one that changes: with ``update_weights``
    dtype: str
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_path: str
    engine_id: str | None
    vocab_size: int | None = None  # of the model; None: the tokenizer's
    startup: dict[str, str]  # the start-up table: threads, dtype, connector path, pool sizes, seconds per phase


class EngineClient(Protocol):
    """Methods raise torpor.errors; a dead core raises EngineDeadError from all of them. Where they return a ``dict``, it is
    plain data (msgpack types)."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> EngineState:
        """The last state the core reported; never blocks."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yields until an output carries a finish_reason. Closing the iterator early aborts the request and frees its blocks.

        AsleepError at once when the engine sleeps and the configuration says so (E10); RequestError for a request that can never
        run; CapacityError when too many wait.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    def end_requests(self, why: str) -> None:
        """Every open request raises EngineDeadError with ``why`` and is aborted, asleep or not; every later one is refused with
        it. Calls go on. For the time between a server's last request and ``shutdown``; never blocks."""
        ...

    async def sleep(self, request: SleepRequest) -> dict[str, Any]:
        """The sleep report as a dict (see engine.reports). SleepAborted when a deadline, a wake or a hook stopped it: then the
        engine is awake."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]: ...

    async def pause(self, mode: SleepMode = "keep") -> dict[str, Any]: ...

    async def resume(self) -> dict[str, Any]: ...

    async def release_kv_cache_memory(self) -> dict[str, Any]: ...

    async def update_weights(self, model: str) -> dict[str, Any]:
        """While the engine sleeps with its KV cache discarded (level 1 or 2): the next wake fills the weights from the checkpoint
        ``model``, a folder or file as at start-up and of the same configuration. KV of the old weights is served to nobody any
        more, and peers with other weights are refused. Blocks while files are hashed. ModelError, ConfigurationError, StateError:
        nothing has changed."""
        ...

    async def stats(self) -> dict[str, Any]:
        """{"state", "memory": MemoryStats, "scheduler": ..., "cache": ..., "connector": ... | None} as plain data."""
        ...

    async def check_health(self) -> None:
        """Returns when the core has answered: give it a time-out. EngineDeadError when the core is gone."""
        ...

    def silent_s(self) -> float:
        """How long the core has neither answered nor computed; looks at it, never blocks. Look about once a second."""
        ...

    async def shutdown(self) -> None: ...
