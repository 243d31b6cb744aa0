from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigurationError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "random")
FUSED_LAYERS = ("auto", "on", "off")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa", "flashinfer", "varlen")  # torpor's own: ``register_backend`` takes others
_WORDS = {"dtype": DTYPES, "load_format": LOAD_FORMATS, "fused_layers": FUSED_LAYERS}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """``source``: a Hugging Face folder, a ``.gguf`` file, or ``builtin:smollm2-135m``. ConfigurationError for a value that is
    wrong for every model."""

    source: str
    served_name: str | None = None  # None: the last part of source
    dtype: str = "auto"  # auto, float32, bfloat16, float16; auto is float32 on CPUs without bf16 units
    max_model_len: int | None = None  # tokens; None: the model's own limit
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    fused_layers: str = "auto"  # auto (on a GPU) | on | off; models whose layers cannot be fused compute as transformers does
    enforce_eager: bool = False  # no CUDA graphs
    deterministic: bool = False  # a request's answer does not depend on what else is in the batch; slower
    threads: int | None = None  # intra-op threads; None: the cores this process may use. Set it when engines share a machine
    cache_dir: str | None = None  # converted models, compiled Python; None: ~/.cache/torpor
    load_format: str = "auto"  # auto | random (random weights for a folder that has only a config; tests and benchmarks)

    def __post_init__(self) -> None:
        for setting, known in _WORDS.items():
            value = getattr(self, setting)
            if value not in known:
                raise ConfigurationError(
                    f"{setting} {value!r} is not known; known: {', '.join(known)}", setting=setting, value=value
                )
        for setting in ("max_model_len", "threads"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise ConfigurationError(f"{setting} is {value}, it must be 1 or more", setting=setting, value=value)

    @property
    def cache_folder(self) -> Path:
        """RuntimeError where it is in the home folder and there is none."""
        return Path.home() / ".cache" / "torpor" if self.cache_dir is None else Path(self.cache_dir).expanduser()
