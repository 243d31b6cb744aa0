from __future__ import annotations

from dataclasses import dataclass, fields

from torpor.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step: the chunk size of long prefills
    max_waiting: int = 10_000  # requests beyond it are refused with CapacityError
    handoff_lease_s: float = 30.0  # how long a prefill engine keeps blocks nobody has read
    remote_kv_timeout_s: float = 10.0  # a decode engine recomputes what has not arrived by then

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not value > 0:
                raise ConfigurationError(f"{setting.name} is {value}, it must be more than 0", setting=setting.name, value=value)
