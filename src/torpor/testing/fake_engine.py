"""An engine without a model: answers at once, or token by token when told, and moves through the real states.

Its vocabulary is 256 bytes, plus an end-of-sequence token. What it generates is ``reply``, then the end. ``FakeEngine.hold()``
stops generation until ``let_go()``, so tests of disconnects and drains need no sleeping.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from torpor.engine.base import EngineInfo, EngineState, SleepMode, SleepRequest
from torpor.errors import AsleepError, ContextLengthError, EngineDeadError, StateError, TorporError, UnknownTagError
from torpor.request import EngineOutput, FinishReason, GenerationRequest, TokenLogprobs

EOS = 256
TAG_BYTES = {"weights": 1 << 20, "kv_cache": 1 << 19, "runtime": 1 << 12}


class FakeEngine:
    """An ``EngineClient``. ``fail_next`` makes the next call of that method raise; ``requests`` and such record."""

    def __init__(
        self, reply: str = "Hello, world!", *, max_model_len: int = 256, model_name: str = "fake", connector: bool = False
    ) -> None:
        self.reply = reply
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.active: set[str] = set()
        self.fail_next: dict[str, TorporError] = {}
        self.fail_at_step: tuple[int, TorporError] | None = None  # countdown of steps over all requests
        self.holders: list[dict[str, Any]] = []  # who keeps memory of the first tag of the next sleeps
        self.sleep_requests: list[SleepRequest] = []
        self._state = EngineState.AWAKE
        self._awake_tags = set(TAG_BYTES)
        self._flow = asyncio.Event()
        self._flow.set()
        self._connector = connector
        self._hold_after: int | None = None
        self._stalled: set[str] = set()
        self._stall_over = asyncio.Event()
        self._sleeps = self._wakes = 0
        self._ended: dict[str, str] = {}  # requests that ``end_requests`` has ended, and why
        self.silent_for_s = 0.0  # what ``silent_s`` says
        self._info = EngineInfo(
            model_name=model_name,
            model_id=f"{model_name}@0",
            dtype="float32",
            max_model_len=max_model_len,
            num_blocks=64,
            block_size=16,
            eos_token_ids=(EOS,),
            tokenizer_path="",
            engine_id="fake-engine" if connector else None,
            vocab_size=EOS + 1,
            startup={"threads": "1", "dtype": "float32"},
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    def hold(self) -> None:
        self._flow.clear()

    def let_go(self) -> None:
        self._flow.set()

    def hold_after(self, steps: int) -> None:
        """``hold`` once so many more tokens have been generated, over all requests."""
        self._hold_after = steps

    def is_held(self) -> bool:
        return not self._flow.is_set()

    def stall(self, method: str) -> None:
        """Calls of ``method`` hang until ``unstall``."""
        self._stalled.add(method)

    def unstall(self) -> None:
        self._stalled.clear()
        self._stall_over.set()

    async def _stall(self, method: str) -> None:
        if method in self._stalled:
            await self._stall_over.wait()

    def die(self) -> None:
        self._state = EngineState.DEAD
        self._flow.set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        self._enter("generate")
        self._admit(request)
        self.requests.append(request)
        self.active.add(request.request_id)
        try:
            async for output in self._outputs(request):
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.request_id)
            raise
        finally:
            self.active.discard(request.request_id)

    def _admit(self, request: GenerationRequest) -> None:
        if self._state is not EngineState.AWAKE:
            raise AsleepError(f"the engine is {self._state.value}", retry_after_s=5.0, state=self._state.value)
        if len(request.prompt_token_ids) >= self._info.max_model_len:
            limit = self._info.max_model_len
            tokens = len(request.prompt_token_ids)
            raise ContextLengthError(f"the prompt has {tokens} tokens, the context {limit}", param="prompt")

    async def _outputs(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        tokens = [*self.reply.encode(), EOS]
        last = min(len(tokens), request.sampling.max_tokens) - 1
        for i, token in enumerate(tokens[: last + 1]):
            await self._flow.wait()
            await asyncio.sleep(0)
            if request.request_id in self._ended:
                raise EngineDeadError(self._ended[request.request_id])
            self._step()
            yield self._output(request, token, done=i == last)

    def _step(self) -> None:
        self._enter("step")
        if self._hold_after is not None:
            self._hold_after -= 1
            if self._hold_after == 0:
                self._hold_after = None
                self.hold()
        if self.fail_at_step is not None:
            left, error = self.fail_at_step
            self.fail_at_step = (left - 1, error) if left > 1 else None
            if left <= 1:
                raise error

    def _output(self, request: GenerationRequest, token: int, done: bool) -> EngineOutput:
        reason = None
        if done:
            reason = FinishReason.STOP if token == EOS else FinishReason.LENGTH
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            logprobs=[_logprobs(token, request.sampling.logprobs)] if request.sampling.logprobs is not None else None,
            finish_reason=reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            kv_transfer_params=self._hand_off(request) if done else None,
        )

    def _hand_off(self, request: GenerationRequest) -> dict[str, Any] | None:
        if not self._connector or not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._info.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [0, 1],
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        }

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)

    def end_requests(self, why: str) -> None:
        self.aborted.extend(self.active)
        self._ended |= dict.fromkeys(self.active, why)
        self.let_go()

    async def sleep(self, request: SleepRequest) -> dict[str, Any]:
        await self._stall("sleep")
        self._enter("sleep")
        self.sleep_requests.append(request)
        if request.level == 0 and request.policies is None:
            self._state = EngineState.PAUSED
            return self._report({})
        gone = self._awake_tags & set(request.policies if request.policies is not None else TAG_BYTES)
        self._awake_tags -= gone
        self._state = EngineState.ASLEEP
        self._sleeps += 1
        return self._report({t: TAG_BYTES[t] for t in sorted(gone)})

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        self._enter("wake_up")
        for tag in tags or ():
            if tag not in TAG_BYTES:
                raise UnknownTagError(f"unknown tag {tag!r}; known: {', '.join(TAG_BYTES)}", tag=tag, known=", ".join(TAG_BYTES))
        self._awake_tags |= set(TAG_BYTES if tags is None else tags)
        if self._awake_tags == set(TAG_BYTES):
            self._state = EngineState.AWAKE
        self._wakes += 1
        return {"state": self._state.value, "seconds": 0.001, "tags": []}

    async def pause(self, mode: SleepMode = "keep") -> dict[str, Any]:
        self._enter("pause")
        self._state = EngineState.PAUSED
        return {"state": self._state.value}

    async def resume(self) -> dict[str, Any]:
        self._enter("resume")
        self._state = EngineState.AWAKE
        return {"state": self._state.value}

    async def release_kv_cache_memory(self) -> dict[str, Any]:
        self._enter("release_kv_cache_memory")
        return await self.sleep(SleepRequest(policies={"kv_cache": "discard"}))

    async def update_weights(self, model: str) -> dict[str, Any]:
        self._enter("update_weights")
        if self._state is not EngineState.ASLEEP:
            raise StateError(f"update_weights: the engine is {self._state.value}", state=self._state.value)
        self._info = dataclasses.replace(self._info, model_id=model)
        return {"operation": "update_weights", "state": self._state.value, "model": model, "model_id": model, "seconds": 0.001}

    async def stats(self) -> dict[str, Any]:
        await self._stall("stats")
        self._enter("stats")
        return {
            "state": self._state.value,
            "model_id": self._info.model_id,
            "memory": self._memory(),
            "scheduler": {"running": len(self.active), "waiting": 0, "preemptions": 0},
            "cache": {"num_blocks": 64, "free_blocks": 64, "hit_tokens": 0},
            "connector": None,
        }

    async def check_health(self) -> None:
        await self._stall("check_health")
        self._enter("check_health")

    def silent_s(self) -> float:
        return 0.0 if self._state is EngineState.DEAD else self.silent_for_s

    async def shutdown(self) -> None:
        self._state = EngineState.DEAD
        self._flow.set()

    def _enter(self, method: str) -> None:
        if method in self.fail_next:
            raise self.fail_next.pop(method)
        if self._state is EngineState.DEAD:
            raise EngineDeadError("the engine core is gone")

    def _report(self, unmapped: dict[str, int]) -> dict[str, Any]:
        tags: list[dict[str, Any]] = [
            {"tag": t, "policy": "host", "unmapped_bytes": n, "returned_bytes": n, "holders": []} for t, n in unmapped.items()
        ]
        for tag in tags[:1]:
            tag["holders"] = self.holders
        total = sum(unmapped.values())
        return {"state": self._state.value, "seconds": 0.001, "unmapped_bytes": total, "returned_bytes": total, "tags": tags}

    def _memory(self) -> dict[str, Any]:
        tags = [self._tag(t) for t in TAG_BYTES]
        return {
            "driver": "fake",
            "device": 0,
            "tags": tags,
            "mapped_bytes": sum(t["resident_bytes"] for t in tags),
            "condemned_bytes": 0,
            "host_committed_bytes": sum(t["image_bytes"] for t in tags),
            "host_limit_bytes": None,
            "sleeps": self._sleeps,
            "wakes": self._wakes,
        }

    def _tag(self, tag: str) -> dict[str, Any]:
        awake, size = tag in self._awake_tags, TAG_BYTES[tag]
        return {
            "tag": tag,
            "residency": "resident" if awake else "asleep",
            "content": "valid" if awake else "on_host",
            "regions": 1,
            "reserved_bytes": size,
            "resident_bytes": size if awake else 0,
            "allocated_bytes": size,
            "image_bytes": 0 if awake else size,
            "exported": False,
            "hooks": 0,
        }


def _logprobs(token: int, k: int | None) -> TokenLogprobs:
    """The chosen token is the most likely, its neighbours follow; one is impossible."""
    top = [token, *(t for t in range(97, 123) if t != token)][: k or 0]
    return TokenLogprobs(
        token_id=token, logprob=-0.5, rank=1, top_ids=top, top_logprobs=[-0.5, float("-inf"), *([-3.0] * 26)][: len(top)]
    )
