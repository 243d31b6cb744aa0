"""The engine core: scheduler, executor, connector and lifecycle, driven one ``step`` at a time by one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torpor.connectors.base import KVConnectorScheduler
from torpor.engine.base import EngineInfo, EngineState, SleepMode, SleepRequest
from torpor.engine.config import EngineConfig
from torpor.engine.executor import Executor
from torpor.engine.lifecycle import Lifecycle
from torpor.engine.lifecycle_parts import Background
from torpor.engine.sleep_plan import SleepRules
from torpor.engine.stats import EngineStats
from torpor.engine.tickets import Ticket
from torpor.errors import AsleepError, BugError, EngineDeadError, TorporError
from torpor.request import EngineOutput, GenerationRequest
from torpor.scheduler import Scheduler
from torpor.scheduler.output import SchedulerOutput

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row: then it is not the requests, and the core ends
TRANSFER_POLL_S = 0.002  # how often the connector is asked while KV is on its way in
HAND_OFF_POLL_S = 0.02  # and while finished prefills wait for a reader
DRAIN_POLL_S = 0.002


class EngineCore:
    """Not thread-safe: one thread calls everything. ``torpor.engine.startup.start_core`` makes one.

    No method blocks for longer than one step of the model; a sleep and a wake are tickets that complete during later steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        scheduler: Scheduler,
        executor: Executor,
        connector: KVConnectorScheduler | None,
        rules: SleepRules,
        *,
        background: Background | None = None,
        on_state: Callable[[EngineState], None] = lambda state: None,
        on_ready: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._connector = connector
        self._model_id = info.model_id
        self._threads = None if background else ThreadPoolExecutor(1, thread_name_prefix="torpor-memory")
        self._clock = clock
        self._started = clock()
        self._outbox: list[EngineOutput] = []
        self._parked: set[str] = set()  # came while the engine slept, and wait for it
        self._failed_steps = self._steps_failed = 0
        self._connector_stats = executor.connector_stats()
        self._on_state = on_state
        self._again = False  # the last step computed something or changed the state: step again at once
        self._lifecycle = Lifecycle(
            scheduler=scheduler,
            executor=executor,
            rules=rules,
            background=background or self._threads or ThreadPoolExecutor(1),
            abort_all=self._abort_all,
            reset_cache=scheduler.kv.reset,
            publish=self._publish,
            set_version=self.set_weights_version,
            on_state=self._state_changed,
            on_ready=on_ready,
            clock=clock,
        )
        self._publish()
        self._lifecycle.open()

    # ---- requests ------------------------------------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. RequestError, CapacityError; AsleepError when the engine sleeps and ``while_asleep`` says "reject"
        (E10).
        """
        if self.state is EngineState.DEAD:
            raise EngineDeadError("the engine is shut down")
        asleep = self._lifecycle.turns_requests_away
        if asleep and self.config.sleep.while_asleep == "reject":
            raise self._asleep_error()
        self._scheduler.add(request)
        if asleep:
            self._parked.add(request.request_id)

    def _asleep_error(self) -> AsleepError:
        retry = self.config.sleep.retry_after_s
        return AsleepError(
            f"the engine is {self.state.value}: retry after {retry:g} s, or wake it with wake_up(); "
            "while_asleep='wait' or 'wake' would queue the request",
            retry_after_s=retry,
            state=self.state.value,
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        """The outputs come with the next step. Unknown ids are passed over."""
        self._parked.difference_update(request_ids)
        self._outbox += self._scheduler.abort(request_ids)

    def _abort_all(self) -> bool:
        scheduler = self._scheduler
        present = [*scheduler.running_ids(), *scheduler.loading_ids(), *scheduler.waiting_ids()]
        self.abort(present)
        return bool(present)

    # ---- lifecycle -----------------------------------------------------------------------------------------------------------

    def sleep(self, request: SleepRequest) -> Ticket:
        return self._lifecycle.sleep(request)

    def wake_up(self, tags: Sequence[str] | None = None) -> Ticket:
        return self._lifecycle.wake_up(tags)

    def pause(self, mode: SleepMode = "keep") -> Ticket:
        return self._lifecycle.pause(mode)

    def resume(self) -> Ticket:
        return self._lifecycle.resume()

    def release_kv_cache_memory(self) -> Ticket:
        return self._lifecycle.release_kv_cache_memory()

    def update_weights(self, source: str) -> Ticket:
        return self._lifecycle.update_weights(source)

    def set_weights_version(self, version: str) -> None:
        """Whoever wrote other weights into the pool says so: KV computed before is served to nobody any more, neither from the
        prefix cache nor by a connector that keeps it (E6), and peers with other weights are refused. StateError while a request
        holds blocks, or while peers may read: put ``kv_cache`` to sleep before, and wake it after."""
        self._scheduler.kv.reset(version)  # first: whatever fails after it costs a prefix cache, never an answer
        self._executor.set_weights_version(version)
        if self._connector is not None:
            self._connector.set_weights_version(version)
        self._model_id = version

    # ---- the step ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """One step of the model if there is anything to run, and one look at the lifecycle. What it raises ends the core."""
        self._again = False
        if not self._lifecycle.in_transaction:
            self._outbox += self._run()
        state = self.state
        self._lifecycle.tick()
        self._wake_for_requests()
        self._again |= self.state is not state
        outputs, self._outbox = self._outbox, []
        return outputs

    def wait_s(self) -> float | None:
        """How long the loop may wait for messages before the next step, unless a transaction ends. None: until one comes."""
        if self._outbox:
            return 0.0
        if self._lifecycle.in_transaction:
            return self._lifecycle.tells_in_s
        if self._again:
            return 0.0
        scheduler = self._scheduler
        if self._lifecycle.busy:
            return DRAIN_POLL_S
        # Something that could run and did not waits for blocks, which only a transfer or an abort can free.
        if scheduler.has_loading or scheduler.has_running or (scheduler.num_waiting and scheduler.admission_open):
            return TRANSFER_POLL_S
        return HAND_OFF_POLL_S if scheduler.has_transfers else None

    def _run(self) -> list[EngineOutput]:
        output = self._scheduler.schedule()
        if output is None:
            if not self._scheduler.has_transfers:
                return []
            output = self._scheduler.empty_step()
        if output.sequences:
            self._again = True
            self._check_may_compute(output)
        try:
            result = self._executor.execute(output)
        except Exception as error:
            return self._fail_step(output, error)
        self._failed_steps = 0
        self._again |= bool(result.finished_recving or result.failed_recving or result.finished_sending)
        return self._scheduler.update(output, result)

    def _check_may_compute(self, output: SchedulerOutput) -> None:
        if self.state not in (EngineState.AWAKE, EngineState.DRAINING):
            raise BugError(f"step {output.step} computes {output.num_tokens} tokens while the engine is {self.state.value} (E7)")

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """The requests of this step end with the error, everybody else goes on; a core whose every step fails ends."""
        self._steps_failed += 1
        self._failed_steps += 1
        log.exception("step %d with %d sequences failed", output.step, len(output.sequences), exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        return self._scheduler.abort([s.request_id for s in output.sequences], error)

    def _wake_for_requests(self) -> None:
        """E10, ``while_asleep="wake"``: requests that came meanwhile wake the engine; if that fails, they are told why."""
        if not self._parked or self._lifecycle.turns_requests_away is False:
            self._parked.clear()
            return
        wake = self.config.sleep.while_asleep == "wake" and self.state is EngineState.ASLEEP and not self._lifecycle.busy
        if not wake:
            return
        parked, self._parked = list(self._parked), set()

        def told(ticket: Ticket) -> None:
            error = ticket.exception()
            if error is not None and self.state is not EngineState.DEAD:
                self._outbox += self._scheduler.abort(parked, error)

        log.info("%d requests wake the engine", len(parked))
        self._lifecycle.wake_up().add_done_callback(told)

    def _state_changed(self, state: EngineState) -> None:
        if state in (EngineState.SLEEPING, EngineState.WAKING):  # the connector is not ours to ask until the transaction ends
            self._connector_stats = self._executor.connector_stats()
        self._on_state(state)

    def _publish(self) -> None:
        if self._connector is not None:
            self._connector.set_kv_metadata(self._executor.handshake_metadata())

    # ---- how it is -----------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        memory = self._lifecycle.memory_stats()
        if not self._lifecycle.in_transaction:
            self._connector_stats = self._executor.connector_stats()
        return EngineStats(
            state=self.state,
            model_id=self._model_id,
            missing_tags=tuple(self._lifecycle.missing_tags(memory)),
            memory=memory,
            scheduler=self._scheduler.stats(),
            cache=self._scheduler.kv.stats(),
            connector=self._connector_stats,
            steps_failed=self._steps_failed,
            uptime_s=self._clock() - self._started,
        )

    def shutdown(self, error: TorporError | None = None) -> list[EngineOutput]:
        """Ends every request and every open call (with ``error``), releases connectors, memory and threads. Waits for a
        transaction under way. Idempotent; after a DeviceError it can be repeated. Returns the last outputs."""
        self._lifecycle.die(error or EngineDeadError("the engine was shut down"))
        self._abort_all()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self._executor.shutdown()
        outputs, self._outbox = self._outbox, []
        return outputs
