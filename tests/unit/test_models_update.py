"""Which checkpoint may take the place of the one a model was loaded from, and that a reload then reads it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from torpor.errors import ConfigurationError, ModelError
from torpor.memory import Memory, MemoryConfig
from torpor.models import ModelConfig, load_model, resolve_model, resolve_update


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory(MemoryConfig()) as made:
        yield made


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(source=str(folder), dtype="float32", served_name="mine", max_model_len=100)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_a_reload_reads_the_new_checkpoint_into_the_same_tensors(tmp_path: Path, memory: Memory, family: str) -> None:
    save_tiny(tmp_path / "old", family, seed=1)
    reference = save_tiny(tmp_path / "new", family, seed=2).state_dict()
    config = config_of(tmp_path / "old")
    model = load_model(resolve_model(config), config, memory)
    addresses = {name: tensor.data_ptr() for name, tensor in model.module.state_dict().items()}
    resolved = resolve_update(model.resolved, config, str(tmp_path / "new"))
    model.use_weights(resolved)
    model.reload_weights()
    found = model.module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.items())
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == addresses
    assert model.kv_spec(4, 16).model_id == resolved.model_id == resolve_model(config_of(tmp_path / "new")).model_id


def test_nothing_but_the_weights_changes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "old", seed=1, eos_token_id=5)
    save_tiny(tmp_path / "new", seed=2, eos_token_id=5)
    (tmp_path / "new" / "generation_config.json").write_text('{"eos_token_id": 9}')
    config = config_of(tmp_path / "old")
    old = resolve_model(config)
    new = resolve_update(old, config, str(tmp_path / "new"))
    for name in ("name", "tokenizer_path", "eos_token_ids", "max_model_len"):
        assert getattr(new, name) == getattr(old, name), name
    assert (new.path, new.weights_hash != old.weights_hash) == (tmp_path / "new", True)


def test_a_trainer_may_write_the_tokens_of_its_tokenizer_into_the_configuration(tmp_path: Path, memory: Memory) -> None:
    """transformers' Trainer aligns them (``align_special_tokens``) with a tokenizer that was given a padding token."""
    save_tiny(tmp_path / "old", seed=1, pad_token_id=None, bos_token_id=None)
    reference = save_tiny(tmp_path / "new", seed=2, pad_token_id=3, bos_token_id=4).state_dict()
    config = config_of(tmp_path / "old")
    model = load_model(resolve_model(config), config, memory)
    model.use_weights(resolve_update(model.resolved, config, str(tmp_path / "new")))
    model.reload_weights()
    assert all(torch.equal(model.module.state_dict()[name], tensor) for name, tensor in reference.items())


def test_a_trainer_may_write_over_the_folder_that_the_engine_began_with(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path, seed=1)
    config = config_of(tmp_path)
    model = load_model(resolve_model(config), config, memory)
    reference = save_tiny(tmp_path, seed=2).state_dict()
    with pytest.raises(ModelError, match="changed"):
        model.reload_weights()
    model.use_weights(resolve_update(model.resolved, config, str(tmp_path)))
    model.reload_weights()
    assert all(torch.equal(model.module.state_dict()[name], tensor) for name, tensor in reference.items())


def test_another_configuration_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    save_tiny(tmp_path / "old", rms_norm_eps=1e-5)
    save_tiny(tmp_path / "new", rms_norm_eps=1e-3)
    save_tiny(tmp_path / "else", "qwen3")
    config = config_of(tmp_path / "old")
    old = resolve_model(config)
    with pytest.raises(ModelError, match=r"rms_norm_eps.*only weights") as caught:
        resolve_update(old, config, str(tmp_path / "new"))
    assert caught.value.path == str(tmp_path / "new")
    with pytest.raises(ModelError, match="only weights"):
        resolve_update(old, config, str(tmp_path / "else"))


def test_damaged_and_missing_files_are_found_before_anything_is_given_up(tmp_path: Path) -> None:
    save_tiny(tmp_path / "old")
    save_tiny(tmp_path / "new", seed=2)
    config = config_of(tmp_path / "old")
    old = resolve_model(config)
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_update(old, config, str(tmp_path / "nowhere"))
    file = tmp_path / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        resolve_update(old, config, str(tmp_path / "new"))


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_checkpoint_with_something_left_out_is_found_before_anything_is_given_up(
    tmp_path: Path, memory: Memory, damage: str
) -> None:
    """A trainer's rank that saved its own part: the headers are whole, the configuration is right."""
    save_tiny(tmp_path / "old")
    save_tiny(tmp_path / "new", seed=2)
    config = config_of(tmp_path / "old")
    model = load_model(resolve_model(config), config, memory)
    file = tmp_path / "new" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name][:1].clone()
    if damage == "missing":
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=name) as caught:
        model.check_weights(resolve_update(model.resolved, config, str(tmp_path / "new")))
    assert caught.value.path == str(tmp_path / "new")


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_a_tied_tensor_may_be_stored_under_one_name_or_two(tmp_path: Path, memory: Memory, family: str) -> None:
    save_tiny(tmp_path / "one", family, seed=1, tie_word_embeddings=True)
    save_tiny(tmp_path / "two", family, seed=2, tie_word_embeddings=True)
    file = tmp_path / "two" / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if "embed_tokens" in name)
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    for old, new in (("one", "two"), ("two", "one")):
        config = config_of(tmp_path / old)
        model = load_model(resolve_model(config), config, memory)
        resolved = resolve_update(model.resolved, config, str(tmp_path / new))
        model.check_weights(resolved)
        model.use_weights(resolved)
        model.reload_weights()


def test_a_disk_that_fails_is_told_by_the_file_s_name(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that went away while it was read: no fault of ours, and whoever reads the log needs to know which."""
    save_tiny(tmp_path / "old")
    config = config_of(tmp_path / "old")
    model = load_model(resolve_model(config), config, memory)

    def fail(*args: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for call, work in (
        ("pread", lambda: resolve_update(model.resolved, config, str(tmp_path / "old"))),
        ("preadv", model.reload_weights),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(ModelError, match=r"model\.safetensors: Stale") as caught:
                work()
        assert caught.value.path == str(tmp_path / "old" / "model.safetensors")
    model.reload_weights()


@pytest.mark.parametrize("method", ["stat", "iterdir"])
def test_a_folder_that_is_closed_to_the_engine_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A trainer's, of another user: these tests may run as one for whom nothing is closed, so the system's answer is made up."""
    save_tiny(tmp_path / "old")
    config = config_of(tmp_path / "old")
    old = resolve_model(config)
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "config.json").write_text((tmp_path / "old" / "config.json").read_text())
    plain = getattr(Path, method)

    def look(path: Path, *args: Any, **more: Any) -> Any:
        if path == (closed / "config.json" if method == "stat" else closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path, *args, **more)

    monkeypatch.setattr(Path, method, look)
    with pytest.raises(ModelError, match="Permission denied") as caught:
        resolve_update(old, config, str(closed))
    assert str(closed) in str(caught.value)


@pytest.mark.parametrize("source", ["x" * 5000, "../" * 3000, "~nobody-of-this-name/a", "a\x00b"])
def test_names_that_no_file_can_have_are_the_models_error(source: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelConfig(source=source))
    assert caught.value.path == source
    assert len(str(caught.value)) < 20_000


def test_random_weights_have_no_checkpoint(tmp_path: Path) -> None:
    save_tiny(tmp_path / "old")
    config = ModelConfig(source=str(tmp_path / "old"), load_format="random")
    with pytest.raises(ConfigurationError) as caught:
        resolve_update(resolve_model(config), config, str(tmp_path / "old"))
    assert caught.value.setting == "load_format"
