"""The options of ``torpor serve``."""

from __future__ import annotations

from torpor.cli.flags import Flag
from torpor.cli.values import parse_bytes, read_secret
from torpor.connectors.config import ConnectorConfig
from torpor.engine.config import SleepConfig
from torpor.kvcache.config import CacheConfig
from torpor.memory.config import DRIVERS, MemoryConfig
from torpor.models.config import ATTENTION_BACKENDS, DTYPES, FUSED_LAYERS, LOAD_FORMATS, ModelConfig
from torpor.scheduler.config import SchedulerConfig
from torpor.server.config import ServerConfig

SERVER, MODEL, CACHE, BATCH, SLEEP, TRANSFER = "Server", "Model", "KV cache", "Batching", "Sleep and memory", "KV transfer"


def _flag(panel: str, config: type, field: str, help_text: str, flag: str | None = None, **more: object) -> Flag:
    return Flag(flag=flag or "--" + field.replace("_", "-"), config=config, field=field, help=help_text, panel=panel, **more)  # type: ignore[arg-type]


SERVE_FLAGS: tuple[Flag, ...] = (
    _flag(SERVER, ServerConfig, "host", "Address to listen on. 0.0.0.0 or :: for all; then set an API key and an admin token."),
    _flag(SERVER, ServerConfig, "port", "TCP port; 0 takes any free one and prints it."),
    _flag(
        SERVER,
        ServerConfig,
        "admin_token",
        "File whose first line is the admin routes' bearer token. Without it they answer clients on this machine only.",
        "--admin-token-file",
        parse=read_secret,
        metavar="FILE",
    ),
    _flag(
        SERVER,
        ServerConfig,
        "api_key",
        "File whose first line is the API key of /v1. Without it /v1 is open.",
        "--api-key-file",
        parse=read_secret,
        metavar="FILE",
    ),
    _flag(SERVER, ServerConfig, "max_body_bytes", "Largest request body, such as 32MiB.", parse=parse_bytes, metavar="SIZE"),
    _flag(SERVER, ServerConfig, "drain_s", "Seconds that a shutdown waits for running requests before it aborts them."),
    _flag(
        SERVER,
        ServerConfig,
        "hang_timeout_s",
        "Seconds after which an engine core that neither answers nor computes counts as dead: the server exits.",
    ),
    _flag(SERVER, ServerConfig, "access_log", "Log every request."),
    _flag(MODEL, ModelConfig, "served_name", "Name in the API. Default: the last part of MODEL.", "--served-model-name"),
    _flag(MODEL, ModelConfig, "dtype", "auto: the checkpoint's, but float32 on CPUs without bf16 units.", choices=DTYPES),
    _flag(MODEL, ModelConfig, "max_model_len", "Longest context in tokens. Default: the model's own."),
    _flag(
        MODEL,
        ModelConfig,
        "threads",
        "Threads per operation. Default: the cores this process may use; more than are free is slow.",
    ),
    _flag(MODEL, ModelConfig, "attention_backend", "How attention reads the paged KV cache.", choices=ATTENTION_BACKENDS),
    _flag(MODEL, ModelConfig, "enforce_eager", "Capture no CUDA graphs: slower steps, a faster start, less memory."),
    _flag(
        MODEL,
        ModelConfig,
        "fused_layers",
        "Layers of few kernels where the model allows it. auto: on a GPU.",
        choices=FUSED_LAYERS,
    ),
    _flag(MODEL, ModelConfig, "deterministic", "Answers that do not depend on what else is in the batch. Slower."),
    _flag(MODEL, ModelConfig, "cache_dir", "Folder of converted models and compiled Python (~/.cache/torpor).", metavar="FOLDER"),
    _flag(MODEL, ModelConfig, "load_format", "random: random weights for a folder with only a config.", choices=LOAD_FORMATS),
    _flag(MODEL, ModelConfig, "trust_remote_code", "Run code that comes with the model. Only for models you trust."),
    _flag(
        CACHE,
        CacheConfig,
        "kv_cache_bytes",
        "Size of the KV cache, such as 512MiB or 2GiB. Default: from free memory.",
        parse=parse_bytes,
        metavar="SIZE",
    ),
    _flag(
        CACHE,
        CacheConfig,
        "gpu_memory_utilization",
        "Part of a GPU's memory that this engine may take; what weights and steps leave of it is the KV cache.",
    ),
    _flag(CACHE, CacheConfig, "num_blocks", "Size of the KV cache in blocks, instead of bytes."),
    _flag(CACHE, CacheConfig, "block_size", "Tokens in a block. Peers must have the same."),
    _flag(CACHE, CacheConfig, "enable_prefix_caching", "Compute every prompt anew.", "--no-prefix-caching", negates=True),
    _flag(BATCH, SchedulerConfig, "max_num_seqs", "Sequences in one step. Default: 64, on a GPU 256."),
    _flag(
        BATCH,
        SchedulerConfig,
        "max_num_batched_tokens",
        "Tokens in one step: the chunk size of long prefills. Default: 512, on a GPU 8192.",
    ),
    _flag(BATCH, SchedulerConfig, "max_waiting", "Requests that may wait; more are refused with 503."),
    _flag(
        SLEEP,
        SleepConfig,
        "enable_sleep_mode",
        "Memory in pools that can sleep. A KV connector that cannot follow is refused at start-up.",
    ),
    _flag(
        SLEEP, SleepConfig, "enable_pools", "Pools only: such a connector is refused by the sleep that would unmap its memory."
    ),
    _flag(
        SLEEP,
        SleepConfig,
        "prepare_images",
        "Make a sleep's host images at start-up, as much memory as the weights: the first sleep is as fast as later ones. "
        "Default: with the driver cuda.",
    ),
    _flag(
        SLEEP,
        SleepConfig,
        "while_asleep",
        "What a request meets while the engine sleeps: 503, a wait for the wake, or it wakes the engine.",
    ),
    _flag(SLEEP, SleepConfig, "retry_after_s", "Retry-After of that 503, in seconds."),
    _flag(SLEEP, SleepConfig, "default_deadline_s", "Deadline in seconds of a sleep that names none.", "--sleep-deadline-s"),
    _flag(
        SLEEP,
        MemoryConfig,
        "driver",
        "Where memory is. auto: cuda where there is a GPU that torch can use, else host.",
        "--memory-driver",
        choices=DRIVERS,
    ),
    _flag(SLEEP, MemoryConfig, "device", "Device number of the driver."),
    _flag(
        SLEEP,
        MemoryConfig,
        "host_limit_bytes",
        "Most host memory for images of sleeping pools, such as 8GiB. Default: what is free.",
        parse=parse_bytes,
        metavar="SIZE",
    ),
    _flag(
        SLEEP,
        MemoryConfig,
        "share_images",
        "Engines of this host and user that have the same weights share the weights' host image: one copy for all of them. It is "
        "made at start-up.",
    ),
    _flag(SLEEP, MemoryConfig, "copy_threads", "Threads that copy to and from images. Default: the usable cores, at most 12."),
    _flag(
        TRANSFER,
        ConnectorConfig,
        "connector",
        "ipc (engines of one host), nixl (UCX), mooncake; offload (KV kept in host memory, on disk), lmcache; multi (several); "
        "or module:Class.",
        "--kv-connector",
    ),
    _flag(TRANSFER, ConnectorConfig, "role", "Whether this engine hands KV over, takes it, or both.", "--kv-role"),
    _flag(
        TRANSFER,
        ConnectorConfig,
        "host",
        "Address where peers find the control channel. Off loopback a secret is required.",
        "--kv-host",
    ),
    _flag(TRANSFER, ConnectorConfig, "port", "Its port; 0 takes any free one.", "--kv-port"),
    _flag(TRANSFER, ConnectorConfig, "secret_file", "File with the secret that peers share.", "--kv-secret-file", metavar="FILE"),
    _flag(
        TRANSFER, ConnectorConfig, "engine_id", "Name of this engine to peers. Default: a random one per start.", "--kv-engine-id"
    ),
    _flag(
        TRANSFER, ConnectorConfig, "withdraw_timeout_s", "Seconds that a sleep waits for peers to let go.", "--withdraw-timeout-s"
    ),
    _flag(TRANSFER, ConnectorConfig, "lease_heartbeat_s", "Seconds between signs of life to peers.", "--kv-heartbeat-s"),
    _flag(
        TRANSFER,
        SchedulerConfig,
        "handoff_lease_s",
        "Seconds that a prefill engine keeps blocks nobody has read.",
        "--kv-lease-s",
    ),
    _flag(
        TRANSFER,
        SchedulerConfig,
        "remote_kv_timeout_s",
        "Seconds after which a decode engine recomputes what has not arrived.",
        "--kv-load-timeout-s",
    ),
)
