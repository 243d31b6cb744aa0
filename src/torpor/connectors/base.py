"""The contract of a KV connector. Names follow vLLM's V1 connectors, so a connector written for them reads alike.

A connector has two sides in the engine process: the scheduler side decides (no torch, no transport), the worker side moves bytes.
Scheduler-side methods are called by the scheduler between steps, worker-side ones by the worker inside a step, all on the
engine's loop thread; both must return quickly. Work in the background belongs to threads of the connector's own.

A registration lives exactly as long as the mapping it covers: the memory layer calls ``release_kv_caches`` before it unmaps the
``kv_cache`` tag and ``restore_kv_caches`` after it mapped it again, for a connector whose class declares ``supports_sleep_mode``.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from torpor.connectors.config import ConnectorConfig
from torpor.kvcache.types import BlockId, Epoch, KVCacheSpec

if TYPE_CHECKING:
    import torch

    from torpor.connectors.params import RemoteParams
    from torpor.memory import Memory
    from torpor.request import GenerationRequest


def token_digest(token_ids: Sequence[int]) -> bytes:
    """Over msgpack, which has one way to write a number and is three times as fast as an array of numbers."""
    return hashlib.sha256(msgspec.msgpack.encode(token_ids)).digest()


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pull the KV of one request: remote block ``first_block + i`` goes to ``local_block_ids[i]``.

    Without local blocks nothing is read and nothing reported: the owner only hears that it may let go.
    """

    request_id: str
    local_block_ids: list[BlockId]
    params: dict[str, Any]  # the producer's kv_transfer_params, untrusted
    first_block: int = 0  # blocks before it are in the prefix cache here
    parsed: RemoteParams | None = None  # ``params``, where they have been parsed already
    prompt: Sequence[int] = ()  # the tokens whose KV this is meant to be; they do not change

    @property
    def digest(self) -> bytes:
        """Of the prompt. Computed here and now: some 100 us for 8192 tokens, so a read is begun before it is asked for."""
        return token_digest(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """A finished prefill whose blocks wait for a reader until ``lease_s`` has passed."""

    request_id: str
    block_ids: list[BlockId]
    num_tokens: int
    lease_s: float
    epoch: str  # of the mapping that the blocks are of: under any other one they are somebody else's
    lease: int = 0  # its number, counted up by the scheduler side; params name it
    digest: bytes = b""  # of the tokens whose KV this is


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMetadata:
    """What the scheduler side tells the worker side for one step."""

    loads: list[LoadRequest] = field(default_factory=list)
    hand_offs: list[HandOff] = field(default_factory=list)
    cancelled: list[str] = field(
        default_factory=list
    )  # loads whose request was aborted or timed out: their blocks are not touched after the ack

    def __bool__(self) -> bool:
        return bool(self.loads or self.hand_offs or self.cancelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the worker side finished since it was last asked. A request id appears in one of them, once."""

    sending: frozenset[str] = frozenset()  # hand-offs read by a peer, expired, or withdrawn by a release: free the blocks
    recving: frozenset[str] = frozenset()  # loads complete, and the owner's epoch was checked after the read (P3)
    failed: frozenset[str] = frozenset()  # loads that will not complete; nothing writes to their blocks any more


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    peer: str
    direction: str  # "reads from us", "we read from it"
    epoch: str
    leases: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Of a connector that keeps KV itself. A block on disk may also be in host memory. None: it does not say."""

    host_blocks: int | None = None
    host_bytes: int | None = None
    host_limit_bytes: int
    disk_blocks: int | None = None
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    saved_blocks: int  # this and the following count from the start
    loaded_blocks: int
    evicted_blocks: int | None = None  # given up for newer ones, in either place
    skipped_blocks: int  # not kept: everything in host memory was in use
    disk_errors: int | None = None  # files that could not be written, read or removed: disk full, permission lost
    bad_files: int | None = None  # found corrupt, short or of something else: misses, and removed
    leftover_files: int | None = None  # of an engine that was killed, and of other weights or layouts: removed


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What the transport itself tells of its reads, since the start."""

    reads: int
    descriptors: int  # after the transport has merged neighbours
    bytes: int
    post_s: float  # in the calls that post reads
    transfer_s: float  # from the post to the last byte
    notices: int  # of peers' reads, seen at the owner


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorStats:
    connector: str
    engine_id: str
    path: str  # which way the bytes go, in words: "shared memory of one host", "UCX tcp"
    epoch: str | None  # None while released
    registered_bytes: int
    pending_hand_offs: int
    loads_in_flight: int
    loads_done: int
    loads_failed: int
    bytes_received: int
    peers: tuple[PeerStats, ...] = ()
    store: StoreStats | None = None  # of a connector that keeps KV itself
    transfers: TransferStats | None = None  # None: the transport tells nothing
    release_s: float = 0.0  # the last release and the last restore of the KV cache, failed ones too
    restore_s: float = 0.0
    children: tuple[ConnectorStats, ...] = ()  # of a connector that is made of others


class KVConnectorScheduler(abc.ABC):
    """The scheduler side. One per engine; no torch."""

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: GenerationRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond ``num_computed_tokens`` a peer holds, and whether they arrive asynchronously. (0, False): none.

        Changes nothing. Never raises for bad ``kv_transfer_params``: those were checked by ``check_params`` at admission.
        """

    @abc.abstractmethod
    def update_state_after_alloc(self, request: GenerationRequest, block_ids: list[BlockId], num_external_tokens: int) -> None:
        """Blocks for the external tokens were allocated (none when it is 0): the next metadata will carry the load."""

    @abc.abstractmethod
    def request_finished(
        self, request: GenerationRequest, block_ids: list[BlockId], num_computed_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended with its KV intact. (True, params): the connector keeps the blocks until ``Finished.sending`` names the
        request, and ``params`` goes to the client as ``kv_transfer_params``. (False, None): free them now."""

    @abc.abstractmethod
    def cancel_load(self, request_id: str) -> None:
        """Stop a load; the scheduler keeps the blocks until ``Finished.recving`` or ``.failed`` names the request."""

    @abc.abstractmethod
    def build_connector_meta(self) -> ConnectorMetadata:
        """What came up since the last call. Clears it."""

    @abc.abstractmethod
    def check_params(self, params: dict[str, Any], num_prompt_tokens: int) -> None:
        """RequestError when a client's ``kv_transfer_params`` are malformed (types, ranges, counts). Called at admission."""

    def set_kv_metadata(self, metadata: dict[str, Any] | None) -> None:  # noqa: B027
        """The worker side's handshake metadata, anew after every restore (None while released): goes into ``request_finished``'s
        params."""

    def set_weights_version(self, version: str) -> None:  # noqa: B027
        """KV is computed with other weights from now on. A connector that keeps KV serves none of the old any more. Called while
        no request holds blocks."""


class KVConnectorWorker(abc.ABC):
    """The worker side: registers the KV cache and moves bytes."""

    @abc.abstractmethod
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], spec: KVCacheSpec, memory: Memory) -> None:
        """Make the KV cache known to the transport. Called once, outside every pool (E1); the tensors are the runner's own and
        keep their addresses for life. Starts listening for peers. Raises TransportError or ConnectorError."""

    @abc.abstractmethod
    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Begin what ``metadata`` asks for. Does not raise for one bad load: that one comes back in ``failed``. Does not block,
        but on a GPU for what the device was asked to do before: a hand-off counts when its KV is written."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """For connectors that load inside the forward pass. Asynchronous ones need not do anything."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor) -> None:  # noqa: B027
        """For connectors that push layer by layer."""

    def wait_for_save(self) -> None:  # noqa: B027
        """Blocks until what ``save_kv_layer`` began no longer reads the cache."""

    def set_weights_version(self, version: str) -> None:  # noqa: B027
        """KV is computed with other weights from now on. A connector whose peers compare ``KVCacheSpec.model_id`` tells them the
        new one, in handshakes to come; StateError while it serves the KV cache under the old one."""

    def tell_when_finished(self, tell: Callable[[], None]) -> None:  # noqa: B027
        """``tell`` is called, from any thread, when ``get_finished`` has a load that it had not before; it does not block. Called
        before ``register_kv_caches``. A connector that passes over it is asked every few milliseconds anyhow."""

    @abc.abstractmethod
    def get_finished(self) -> Finished:
        """What finished since the last call; also ends leases that are due. Does not block."""

    @abc.abstractmethod
    def release_kv_caches(self) -> None:
        """Before the unmap: stop reads of our own, withdraw from every peer and wait for their acknowledgement (P2), end all
        hand-offs, deregister, and check that nothing is pinned (P4a). Blocks at most ``withdraw_timeout_s``. PeerError names who
        did not let go; then everything is registered and served again as before. Idempotent."""

    @abc.abstractmethod
    def restore_kv_caches(self) -> None:
        """After the map: register anew under a new epoch. Idempotent; a failed one is retried by the next wake. Raises
        TransportError."""

    @abc.abstractmethod
    def get_handshake_metadata(self) -> dict[str, Any] | None:
        """What a peer needs to find us: plain msgpack types, epoch included. None while released."""

    @abc.abstractmethod
    def epoch(self) -> Epoch | None: ...

    @abc.abstractmethod
    def stats(self) -> ConnectorStats: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Withdraw from peers, close sockets, threads and imports. Idempotent, never raises."""


def works_by_layer(worker: KVConnectorWorker) -> bool:
    """Whether it loads or saves inside the forward pass."""
    names = ("wait_for_layer_load", "save_kv_layer", "wait_for_save")
    return any(getattr(type(worker), name) is not getattr(KVConnectorWorker, name) for name in names)


Reach = Literal["engine", "process", "processes"]
"""Who can read what an engine handed over: that engine alone, engines of its process, or engines of other processes too."""

FindsBy = Literal["params", "tokens"]
"""How a reader knows what there is: from the ``kv_transfer_params`` of its request, or from the prompt's tokens."""


class KVConnector(abc.ABC):
    """What the registry holds: a factory of the two sides, and static facts about the class."""

    supports_sleep_mode: ClassVar[bool] = False
    supports_weight_updates: ClassVar[bool] = False  # both sides' ``set_weights_version`` keep KV of other weights apart
    guarded: ClassVar[bool] = True  # P4: the KV cache's pool keeps zero pages in its range while it sleeps
    reach: ClassVar[Reach] = "processes"
    finds_by: ClassVar[FindsBy] = "params"
    children: ClassVar[tuple[type[KVConnector], ...]] = ()  # of one that is made of others

    @classmethod
    def configured(cls, config: ConnectorConfig) -> type[KVConnector]:
        """The class for this configuration. One whose facts depend on its options gives back a subclass that knows them;
        ConfigurationError for options that cannot be right."""
        return cls

    @classmethod
    @abc.abstractmethod
    def create_scheduler(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorScheduler: ...

    @classmethod
    @abc.abstractmethod
    def create_worker(cls, config: ConnectorConfig, spec: KVCacheSpec) -> KVConnectorWorker: ...
