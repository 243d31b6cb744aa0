from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torpor.errors import ConfigurationError

# A processor takes about as long for one token as for none, up to some dozens; a GPU up to some hundreds.
_SEQS, _TOKENS = 64, 512
_GPU_SEQS, _GPU_TOKENS = 256, 8192


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int | None = None  # sequences in one step; None: 64, on a GPU 256
    max_num_batched_tokens: int | None = None  # tokens in one step, the chunk size of long prefills; None: 512, on a GPU 8192
    max_waiting: int = 10_000  # requests beyond it are refused with CapacityError
    handoff_lease_s: float = 30.0  # how long a prefill engine keeps blocks nobody has read
    remote_kv_timeout_s: float = 10.0  # a decode engine recomputes what has not arrived by then

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{setting.name} is {value}, it must be more than 0", setting=setting.name, value=value)

    @property
    def seats(self) -> int:
        """Sequences in one step."""
        return self.max_num_seqs or _SEQS

    @property
    def token_budget(self) -> int:
        """Tokens in one step."""
        return self.max_num_batched_tokens or _TOKENS

    def on_gpu(self) -> SchedulerConfig:
        """What was left open, as a GPU wants it."""
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or _GPU_SEQS,
            max_num_batched_tokens=self.max_num_batched_tokens or _GPU_TOKENS,
        )
