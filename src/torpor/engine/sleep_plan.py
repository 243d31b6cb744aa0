"""What a sleep asks for, checked before anything changes: levels are names for three sets of policies."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torpor.connectors.base import KVConnector
from torpor.connectors.config import ConnectorConfig
from torpor.engine.base import LEVELS, SLEEP_MODES, EngineState, SleepMode, SleepRequest
from torpor.engine.config import SleepConfig
from torpor.engine.executor import KV_CACHE
from torpor.engine.kv_connector import refusal
from torpor.errors import ConfigurationError, ConnectorError, StateError, UnknownTagError
from torpor.memory.types import POLICIES, Content, MemoryStats, Policy, Residency

Operation = Literal["sleep", "pause", "release_kv_cache"]

LEVEL_POLICIES: dict[int, dict[str, Policy]] = {
    0: {},
    1: {"weights": "host", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},
    2: {"weights": "discard", "runtime": "host", "kv_cache": "discard", "cuda_graph": "discard"},
}


@dataclass(frozen=True, kw_only=True)
class SleepPlan:
    """Two plans that are equal ask for the same: the second caller shares the first one's result."""

    operation: Operation
    level: int | None  # None: policies were given
    mode: SleepMode
    policies: Mapping[str, Policy]  # of tags that exist; tags not named are kept
    deadline_s: float  # of the drain

    @property
    def unmaps(self) -> bool:
        return any(policy != "keep" for policy in self.policies.values())


@dataclass(frozen=True, kw_only=True)
class SleepRules:
    """What this engine allows."""

    config: SleepConfig
    unsupported_connector: str | None = None  # the name of a connector that cannot follow the KV cache's mapping (E4)
    fixed_connector: str | None = None  # the name of one that takes the weights for unchanging

    def plan(self, request: SleepRequest, known_tags: Collection[str], operation: Operation = "sleep") -> SleepPlan:
        """ConfigurationError or UnknownTagError naming what is wrong; ConnectorError when the connector forbids it (E4)."""
        if request.mode not in SLEEP_MODES:
            raise _wrong("mode", request.mode, SLEEP_MODES)
        policies = self._policies(request, known_tags)
        plan = SleepPlan(
            operation=operation,
            level=None if request.policies is not None else request.level,
            mode=request.mode,
            policies=policies,
            deadline_s=self._deadline(request.deadline_s),
        )
        self._allow(plan)
        return plan

    def check_update(self, state: EngineState, memory: MemoryStats) -> None:
        """Before other weights are taken. StateError unless the engine sleeps and no KV of the present ones is left in it;
        ConnectorError where the connector would go on taking old KV for new."""
        if self.fixed_connector is not None:
            raise ConnectorError(
                f"update_weights: connector {self.fixed_connector!r} does not declare supports_weight_updates (it would hand KV "
                "of the old weights to the new ones): start the engine anew, or use a connector that does",
                connector=self.fixed_connector,
                setting="kv_connector",
            )
        if state is not EngineState.ASLEEP:
            raise StateError(
                f"update_weights: the engine is {state.value}; put it to sleep first, with level 2: that keeps no copy of the "
                "old weights",
                state=state.value,
            )
        for tag in memory.tags:
            if tag.tag == KV_CACHE and not (tag.residency is Residency.ASLEEP and tag.content is Content.LOST):
                raise StateError(
                    f"update_weights: {KV_CACHE} is {tag.residency.value} and its content {tag.content.value}: KV of the old "
                    "weights must be gone, put it to sleep with the policy 'discard' (levels 1 and 2 do)",
                    state=state.value,
                )

    def _policies(self, request: SleepRequest, known_tags: Collection[str]) -> dict[str, Policy]:
        if request.policies is None:
            if request.level not in LEVELS:
                raise _wrong("level", request.level, LEVELS)
            return {tag: policy for tag, policy in LEVEL_POLICIES[request.level].items() if tag in known_tags}
        check_tags(request.policies, known_tags)
        for tag, policy in request.policies.items():
            if policy not in POLICIES:
                raise _wrong(f"policies[{tag!r}]", policy, POLICIES)
        return {tag: cast(Policy, policy) for tag, policy in request.policies.items()}

    def _deadline(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.config.default_deadline_s
        if not math.isfinite(deadline_s) or deadline_s < 0:
            raise ConfigurationError(
                f"deadline_s is {deadline_s}; it must be a number of seconds, 0 or more", setting="deadline_s", value=deadline_s
            )
        return deadline_s

    def _allow(self, plan: SleepPlan) -> None:
        if not plan.unmaps:
            return
        if not self.config.pools:
            raise ConfigurationError(
                f"{plan.operation} would unmap {', '.join(plan.policies)}, but this engine was started without sleep mode: "
                "start it with enable_sleep_mode=True (or enable_pools=True); sleep(level=0) and pause() always work",
                setting="enable_sleep_mode",
                value=False,
            )
        if self.unsupported_connector is not None and plan.policies.get("kv_cache", "keep") != "keep":
            raise refusal(self.unsupported_connector, f"{plan.operation} is refused, nothing was unmapped")


def sleep_rules(config: SleepConfig, connector: tuple[type[KVConnector], ConnectorConfig] | None) -> SleepRules:
    """The rules of an engine with this connector, if any."""
    if connector is None:
        return SleepRules(config=config)
    kind, name = connector[0], connector[1].connector
    return SleepRules(
        config=config,
        unsupported_connector=None if kind.supports_sleep_mode else name,
        fixed_connector=None if kind.supports_weight_updates else name,
    )


def check_tags(tags: Collection[str], known_tags: Collection[str]) -> None:
    """UnknownTagError for the first tag that names no pool."""
    for tag in tags:
        if tag not in known_tags:
            known = ", ".join(sorted(known_tags))
            raise UnknownTagError(f"unknown tag {tag!r}; the pools are: {known}", tag=tag, known=known)


def _wrong(setting: str, value: object, allowed: Collection[object]) -> ConfigurationError:
    return ConfigurationError(f"{setting} is {value!r}; use one of {', '.join(map(str, allowed))}", setting=setting, value=value)
