"""Loads damaged model files in a process of its own, so that a crash, a hang or a memory bomb is seen and named.

usage: hostile_files.py SEED SCALE CRAFTED_SHARE FOLDER KIND...     Two JSON lines a case: that it begins, and how it ended.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_kit

COUNTS = {"safetensors": 25, "index": 5, "config": 15, "generation": 5, "tokenizer": 8, "gguf": 12}  # random cases at scale 1
FILES = {
    "safetensors": "model.safetensors",
    "index": "model.safetensors.index.json",
    "config": "config.json",
    "generation": "generation_config.json",
    "tokenizer": "tokenizer.json",
    "gguf": "tiny.gguf",
}
ABSURD_GGUF = (
    ("block_count", 10**6),
    ("block_count", 2**31),
    ("embedding_length", 2**20),
    ("context_length", 2**32 - 1),
    ("feed_forward_length", 2**30),
    ("attention.head_count", 0),
    ("attention.head_count_kv", 2**31),
)
CASE_S = 60  # a case that takes longer hangs
ADDRESS_SPACE = 12 << 30
Case = tuple[str, bytes]


def header(entries: Any, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def crafted_safetensors() -> Iterator[Case]:
    tensor = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    yield "header nested deep", header(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}")
    yield "shape infinite", header(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,64]}}')
    yield "shape NaN", header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}}')
    yield "shape of many large numbers", header({"a": tensor | {"shape": [2**63 - 1] * 200_000}})
    yield "offsets infinite", header(b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,Infinity]}}')
    yield "dtype a list", header({"a": tensor | {"dtype": ["F32"]}})
    yield "entry a number", header({"a": 5})
    yield "no object", header([1, 2])
    yield "header length absurd", header({"a": tensor}, length=2**63)
    yield "header length negative", header({"a": tensor}, length=2**64 - 1)
    yield "not UTF-8", header(b'{"\xff\xfe":' + json.dumps(tensor).encode() + b"}")
    yield "overlap", header({"a": tensor, "b": tensor})
    yield "empty", b""
    yield "no tensors", header({}, b"")


def crafted_json() -> Iterator[Case]:
    yield "nested deep", b"[" * 100_000
    yield "an object nested deep", b'{"a":' * 100_000
    yield "empty", b""
    yield "a list", b"[]"
    yield "an empty object", b"{}"
    yield "UTF-16", '{"model_type":"llama"}'.encode("utf-16")
    yield "a number of 5000 digits", b'{"model_type":"llama","vocab_size":' + b"9" * 5000 + b"}"


def crafted_config(good: dict[str, Any]) -> Iterator[Case]:
    absurd = (0, -1, 2**31, 2**40, 2**70, 1.5, "many", None, [1], {}, True)
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name in (*names, "max_position_embeddings", "head_dim", "rope_parameters", "eos_token_id", "rms_norm_eps", "dtype"):
        for value in absurd:
            yield f"{name} {value!r}", json.dumps(good | {name: value}).encode()
    for value in ("llama4", "bert", "", "../llama", 5):
        yield f"model_type {value!r}", json.dumps(good | {"model_type": value}).encode()


def crafted_generation() -> Iterator[Case]:
    for value in ("x", [[1]], {"a": 1}, -1, 2**70, 1.5, [None], ["1", "x"], True, 1e999):
        yield f"eos_token_id {value!r}", json.dumps({"eos_token_id": value}).encode()


def crafted_index() -> Iterator[Case]:
    for value in (
        {},
        [],
        5,
        {"a": 5},
        {"a": "../other"},
        {"a": "/etc/passwd"},
        {"a": ""},
        {"a": "x" * 5000},
        {"a": "\0"},
        {"a": None},
    ):
        yield f"weight_map {str(value)[:40]}", json.dumps({"weight_map": value}).encode()
    yield "weight_map names itself", json.dumps({"weight_map": {"a": FILES["index"]}}).encode()


def crafted_gguf(good: bytes) -> Iterator[Case]:
    for at, what in ((8, "tensors"), (16, "pairs")):
        for count in (0, 1, 2**31, 2**63, 2**64 - 1):
            yield f"{count} {what}", good[:at] + struct.pack("<Q", count) + good[at + 8 :]
    for key, value in ABSURD_GGUF:
        name = f"qwen2.{key}".encode()
        at = good.index(name) + len(name) + 4
        yield f"{key} {value}", good[:at] + struct.pack("<I", value) + good[at + 4 :]
    for length in (0, 4, 5, 24, 30, len(good) // 2, len(good) - 1):
        yield f"cut at {length}", good[:length]
    key = b"general.architecture"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 2**60)
    yield "an array of 2**60 strings", good[:16] + struct.pack("<Q", 1) + pair
    yield "the same bytes as a thousand tensors", many_tensors_of_the_same_bytes(good)


def many_tensors_of_the_same_bytes(good: bytes) -> bytes:
    """Small in the file, large once dequantised."""
    count, mib = 1000, 4 << 20
    infos = b"".join(
        struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, mib // 4, 0, 0)
        for name in (f"blk.{i}.x".encode() for i in range(count))
    )
    start = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + infos
    return start + b"\0" * (-len(start) % 32 + mib)


def random_cases(kind: str, good: bytes, rand: random.Random, count: int) -> Iterator[Case]:
    for i in range(count):
        data = good
        if kind in ("config", "generation", "index") and rand.random() < 0.5:
            data = json.dumps(hostile_kit.mutated_object(rand, json.loads(good))).encode()
        elif kind in ("safetensors", "gguf") and rand.random() < 0.7:  # the header, not the weights
            size = min(len(good), 6000 if kind == "gguf" else 2500)
            data = hostile_kit.mutated_bytes(rand, good[:size]) + good[size:]
        else:
            data = hostile_kit.mutated_bytes(rand, good)
        yield f"random {i}", data


def cases(kind: str, good: bytes) -> Iterator[Case]:
    if kind == "safetensors":
        yield from crafted_safetensors()
    elif kind == "gguf":
        yield from crafted_gguf(good)
    else:
        yield from crafted_json()
    if kind == "config":
        yield from crafted_config(json.loads(good))
    elif kind == "generation":
        yield from crafted_generation()
    elif kind == "index":
        yield from crafted_index()


def load(folder: Path, kind: str) -> None:
    """Everything an engine does with a model's files."""
    from torpor.engine.config import EngineConfig
    from torpor.engine.tokenizer import Tokenizer
    from torpor.engine.worker import Worker
    from torpor.kvcache.config import CacheConfig
    from torpor.models import ModelConfig, resolve_model

    source = folder / FILES["gguf"] if kind == "gguf" else folder
    model = ModelConfig(source=str(source), dtype="float32", threads=1, cache_dir=str(folder / "cache"))
    resolved = resolve_model(model)
    Tokenizer.load(resolved.tokenizer_path)
    if kind == "tokenizer":
        return
    worker = Worker(EngineConfig(model=model, cache=CacheConfig(num_blocks=8, block_size=4)), resolved)
    try:
        worker.load()
        worker.initialize_kv_cache(worker.determine_num_blocks())
    finally:
        worker.shutdown()


def outcome(folder: Path, kind: str) -> dict[str, Any]:
    from torpor.errors import ConfigurationError

    try:
        load(folder, kind)
    except ConfigurationError as error:
        return {"result": type(error).__name__, "text": str(error)}
    except BaseException as error:
        return {"result": "fault", "text": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
    return {"result": "loaded", "text": ""}


def main(seed: str, scale: float, crafted_share: float, model: Path, kinds: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for kind in kinds:
        good = (model / FILES[kind]).read_bytes()
        rand = random.Random(f"{seed}:{kind}")
        chosen = [case for case in cases(kind, good) if rand.random() < crafted_share]
        outcome(model, kind)  # imports, and the first allocations
        for name, data in (*chosen, *random_cases(kind, good, rand, max(1, round(COUNTS[kind] * scale)))):
            try_case(model, kind, name, data)


def try_case(model: Path, kind: str, name: str, data: bytes) -> None:
    folder = case_folder(model, kind)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    if kind != "index":
        (folder / FILES["index"]).unlink()
    (folder / FILES[kind]).write_bytes(data)
    before, begun = peak_mib(), time.monotonic()
    print(json.dumps({"begins": f"{kind}: {name}"}), flush=True)
    signal.alarm(CASE_S)
    found = outcome(folder, kind)
    signal.alarm(0)
    left = [p.name for p in folder.rglob("cache/models/.*")]
    found |= {"kind": kind, "case": name, "seconds": time.monotonic() - begun, "mib": peak_mib() - before, "left": left}
    print(json.dumps(found), flush=True)
    shutil.rmtree(folder)


def case_folder(model: Path, kind: str) -> Path:
    return model.parent / f"case-{kind}"


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
