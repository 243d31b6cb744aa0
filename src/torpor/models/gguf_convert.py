"""A GGUF file becomes a Hugging Face folder, once, in the user's cache folder.

Values are kept as they are dequantised: in float32 up to 2 GiB of it, in bfloat16 beyond (which rounds them to 8 bits of
mantissa). The folder's name holds the hash of the GGUF file; it appears whole, by a rename, or not at all; a lock keeps two
processes from doing the work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from torpor.errors import ModelError
from torpor.models.checkpoint import check_size, open_checkpoint
from torpor.models.checkpoint_files import hash_files, read_json
from torpor.models.gguf_header import GgufSummary, check_gguf
from torpor.models.quiet import quiet_transformers

Progress = Callable[[str, float], None]  # what is being done, and how much of it is done (0 to 1)

_FORMAT = 2  # of the cache entry: a new number converts anew
_STAMP = "torpor.json"
_FLOAT32_LIMIT_BYTES = 2 << 30
_LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.2
_patching = threading.Lock()


def convert_gguf(path: Path, cache_dir: Path, progress: Progress) -> tuple[Path, str]:
    """The folder, and its weights' hash, that holds ``path`` converted: an earlier conversion's, if its files are intact.
    ModelError, and nothing left behind, for a file that is damaged or of an architecture that transformers cannot convert."""
    summary = check_gguf(path)
    progress("reading " + path.name, 0.0)
    source_hash = hash_files([path])
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)[:64]
    folder = cache_dir / "models" / f"{stem}-{source_hash[:16]}-v{_FORMAT}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock"), progress):
            weights_hash = _intact(folder) or _convert_into(folder, path, source_hash, summary, progress)
    except OSError as error:
        raise ModelError(
            f"{cache_dir}: the converted model cannot be kept there (cache_dir): {error}",
            path=str(cache_dir),
            setting="cache_dir",
        ) from error
    return folder, weights_hash


def _intact(folder: Path) -> str | None:
    """The hash of the weights if they are byte for byte what the conversion wrote, and the small files beside them parse."""
    if not folder.exists():
        return None
    try:
        stored = read_json(folder / _STAMP).get("weights")
        found = open_checkpoint(folder).digest()
        return found if found == stored and read_json(folder / "config.json") else None
    except ModelError:
        return None


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """An exclusive file lock; it ends with its process, so a killed conversion blocks nobody."""
    with path.open("w") as stream:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"{path}: another process has held this lock for {_LOCK_TIMEOUT_S:.0f} s", path=str(path)
                    ) from None
                progress("waiting for another process that converts this model", 0.0)
                time.sleep(_LOCK_POLL_S)
        yield


def _convert_into(folder: Path, path: Path, source_hash: str, summary: GgufSummary, progress: Progress) -> str:
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of processes that were killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _run_conversion(path, work, summary, progress)
        weights_hash = open_checkpoint(work).digest()
        stamp = {"source": path.name, "source_hash": source_hash, "weights": weights_hash}
        (work / _STAMP).write_text(json.dumps(stamp | {"transformers": transformers.__version__}, indent=2))
        if folder.exists():
            shutil.rmtree(folder)
        work.chmod(0o755)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress("converted " + path.name, 1.0)
    return weights_hash


def _run_conversion(path: Path, work: Path, summary: GgufSummary, progress: Progress) -> None:
    with quiet_transformers():
        model, tokenizer = _read(path, summary, progress)
        _strip_quantization(model)
        progress("writing the converted model", 0.9)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


def _read(path: Path, summary: GgufSummary, progress: Progress) -> tuple[Any, Any]:
    """Model and tokenizer. ModelError for whatever is wrong: the file is all that is looked at."""
    dtype = torch.float32 if summary.num_parameters * 4 <= _FLOAT32_LIMIT_BYTES else torch.bfloat16
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    parent = str(path.parent)
    try:
        with _read_once(summary.num_tensors, progress):
            config = AutoConfig.from_pretrained(parent, **where)
            with torch.device("meta"):
                check_size(AutoModelForCausalLM.from_config(config), summary.num_parameters, path)
            _check_features(config, summary, path)
            model, info = AutoModelForCausalLM.from_pretrained(
                parent, config=config, dtype=dtype, output_loading_info=True, **_dequantize(), **where
            )
            _check_whole(model, info, summary, path)
            return model, AutoTokenizer.from_pretrained(parent, **where)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its parsing meets
        raise ModelError(
            f"{path}: this GGUF file ({summary.architecture!r}) cannot be converted: {type(error).__name__}: {error}",
            path=str(path),
        ) from error


def _check_features(config: Any, summary: GgufSummary, path: Path) -> None:
    """ModelError for what the file says about attention and transformers did not read: it would compute another model."""
    rope = getattr(config, "rope_parameters", None) or {}
    if summary.rope_scaling is not None and rope.get("rope_type", "default") == "default":
        raise _left_out(path, summary, f"the scaling of its rotary embeddings ({summary.rope_scaling})")
    window, limit = summary.sliding_window, getattr(config, "max_position_embeddings", None)
    if window and (limit is None or window < limit) and getattr(config, "sliding_window", None) != window:
        raise _left_out(path, summary, f"its sliding window of {window} tokens")


def _check_whole(model: Any, info: dict[str, Any], summary: GgufSummary, path: Path) -> None:
    """ModelError unless every tensor of the model came from the file, and every one of the file has a place in the model:
    transformers makes up the former and passes over the latter without an error."""
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(f"{path}: this GGUF file lacks tensors of the model: {', '.join(missing[:5])}{more}", path=str(path))
    held = sum(tensor.numel() for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())
    if held != summary.num_parameters:
        raise _left_out(path, summary, f"some of its tensors: they hold {summary.num_parameters} values, the model {held}")


def _left_out(path: Path, summary: GgufSummary, what: str) -> ModelError:
    return ModelError(
        f"{path}: transformers' conversion of this GGUF file ({summary.architecture!r}) leaves out {what}. "
        "Use the model's safetensors",
        path=str(path),
    )


def _dequantize() -> dict[str, Any]:
    """transformers from 5.19 on keeps GGUF weights packed unless told not to; before that there was no such setting."""
    gguf_config = getattr(transformers, "GgufConfig", None)
    return {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}


def _strip_quantization(model: Any) -> None:
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextlib.contextmanager
def _read_once(num_tensors: int, progress: Progress) -> Iterator[None]:
    """transformers parses the whole file three times and makes the same name table once per module: half of the time. For the
    length of one conversion the gguf package remembers both, and counts the tensors it dequantises."""
    done = 0

    def dequantize(data: Any, kind: Any) -> Any:
        nonlocal done
        done += 1
        progress("converting tensors", 0.9 * min(1.0, done / max(1, num_tensors)))
        return original["dequantize"](data, kind)

    with _patching:
        original = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map", "dequantize")}
        with contextlib.ExitStack() as stack:
            for name in ("GGUFReader", "get_tensor_name_map"):
                stack.enter_context(_replaced(gguf, name, functools.lru_cache(original[name])))
            stack.enter_context(_replaced(gguf, "dequantize", dequantize))
            stack.enter_context(_replaced(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors))
            yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
