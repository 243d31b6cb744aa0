"""A prefill/decode pair behind a router, and what the demo asks of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from torpor.demo.fleet import Fleet, Say, Service
from torpor.errors import BugError, PeerError
from torpor.memory.config import MemoryConfig

MODEL = "builtin:smollm2-135m"
START_S = 120.0
ROUTED_S = 30.0

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    connector: str
    model: str = MODEL
    memory_driver: str = MemoryConfig.driver
    devices: tuple[int, int] = (0, 0)  # P's and D's
    max_tokens: int = 16
    kv_cache_bytes: str = "96MiB"
    threads: int = 1
    dtype: str = "float32"
    flags: tuple[str, ...] = ()  # more of torpor serve's


class Pair:
    """Started by ``Pair.start``; the fleet owns the processes."""

    def __init__(self, fleet: Fleet, config: PairConfig, prefill: Service, decode: Service, router: Service) -> None:
        self._fleet = fleet
        self.config = config
        self.prefill = prefill
        self.decode = decode
        self.router = router

    @classmethod
    def start(cls, fleet: Fleet, config: PairConfig, say: Say) -> Pair:
        def engine(name: str, role: str, device: int) -> Service:
            flags = ["serve", config.model, "--enable-sleep-mode", "--dtype", config.dtype, "--threads", str(config.threads)]
            flags += ["--kv-cache-bytes", config.kv_cache_bytes, "--kv-connector", config.connector, "--kv-role", role]
            flags += ["--memory-driver", config.memory_driver, "--device", str(device), *config.flags]
            return fleet.start(name, flags)

        prefill, decode = engine("P", "producer", config.devices[0]), engine("D", "consumer", config.devices[1])
        for service in (prefill, decode):
            fleet.wait_ready(service, START_S, say)
        router = fleet.start("router", ["router", "--prefill", prefill.url, "--decode", decode.url])
        fleet.wait_ready(router, START_S, say)
        return cls(fleet, config, prefill, decode, router)

    def _body(self, question: str, **more: Any) -> dict[str, Any]:
        return {
            "model": served_name(self.config.model),
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.config.max_tokens,
            **more,
        }

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._fleet.http.post(f"{url}/v1/chat/completions", json=body)
        return answered(url, response)

    def ask(self, questions: Sequence[str], at_once: int = 4) -> list[str]:
        """The answers through the router, in the order of the questions."""
        with ThreadPoolExecutor(at_once) as pool:
            replies = pool.map(lambda q: self._post(self.router.url, self._body(q)), questions)
            return [str(r["choices"][0]["message"]["content"]) for r in replies]

    def prefill_only(self, question: str) -> dict[str, Any]:
        """The first half of a P/D request: what P hands over for D."""
        reply = self._post(self.prefill.url, self._body(question, max_tokens=1, kv_transfer_params=PREFILL_PARAMS))
        return dict(reply["kv_transfer_params"])

    def decode_with(self, question: str, params: dict[str, Any]) -> str:
        """The second half, at D."""
        reply = self._post(self.decode.url, self._body(question, kv_transfer_params=params))
        return str(reply["choices"][0]["message"]["content"])

    def _admin(self, service: Service, path: str, **query: Any) -> dict[str, Any]:
        response = self._fleet.http.post(f"{service.url}/{path}", params=query)
        return answered(f"{service.name} /{path}", response)

    def sleep(self, service: Service, level: int) -> dict[str, Any]:
        return self._admin(service, "sleep", level=level, mode="wait", deadline_s=30)

    def wake(self, service: Service) -> dict[str, Any]:
        return self._admin(service, "wake_up")

    def memory(self, service: Service) -> dict[str, Any]:
        return answered(f"{service.name} /memory", self._fleet.http.get(f"{service.url}/memory"))

    def pulls(self) -> int:
        """How often D has read P's KV."""
        return int(self.memory(self.decode)["connector"]["loads_done"])

    def wait_routed(self) -> None:
        """Blocks until the router believes that both engines serve: until its next look at one that slept it leaves P out, and D
        computes everything by itself. PeerError in time."""
        deadline = time.monotonic() + ROUTED_S
        while True:
            stats = answered("router /stats", self._fleet.http.get(f"{self.router.url}/stats"))
            states = {b["url"]: b["state"] for b in (*stats["prefill"], *stats["decode"])}
            if set(states.values()) == {"ready"}:
                return
            if time.monotonic() > deadline:
                raise PeerError(f"the router did not see both engines ready within {ROUTED_S:.0f} s: {states}", peer="router")
            time.sleep(0.05)

    def is_healthy(self, service: Service) -> bool:
        """Its engine's core lives and says so."""
        try:
            return service.is_alive() and self._fleet.http.get(f"{service.url}/health", timeout=3.0).status_code == 200
        except httpx.TransportError:
            return False


def served_name(source: str) -> str:
    """What an engine calls a model that was given as ``source``."""
    name = source.rpartition("builtin:")[2]
    return Path(name).stem if name.endswith(".gguf") else Path(name).name


def answered(who: str, response: httpx.Response) -> dict[str, Any]:
    """The JSON of an answer; BugError for anything but 200: the demo asks for nothing that may be refused."""
    if response.status_code != 200:
        raise BugError(f"{who} answered {response.status_code}: {response.text[:500]}")
    return dict(response.json())
