"""GGUF: damage is found before anything is converted; a conversion happens once, appears whole or not at all, and heals."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny
from transformers import AutoTokenizer

from torpor.errors import ModelError
from torpor.models import ModelConfig, ResolvedModel, gguf_convert, resolve_model
from torpor.models.gguf_header import check_gguf

CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    say: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    *,
    without: str | None = None,
) -> None:
    """A Qwen2-like model (no permuted heads) in float32, with a byte-level tokenizer. ``say`` adds to it."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(33 + i) for i in range(config.vocab_size - 2)), "!!", "##"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["! !", "# #"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            name = "output.weight"
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name != without:
            writer.add_tensor(name, tensor.numpy().astype(np.float32))
    say(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    model: torch.nn.Module = save_tiny(
        tmp_path_factory.mktemp("hf"), "qwen2", num_hidden_layers=1, hidden_size=16, intermediate_size=32
    )
    return model


@pytest.fixture
def file(tmp_path: Path, reference: torch.nn.Module) -> Path:
    path = tmp_path / "Tiny Model.gguf"
    write_gguf(path, reference)
    return path


def resolve(file: Path, notes: list[str] | None = None) -> ResolvedModel:
    def progress(what: str, done: float) -> None:
        assert 0 <= done <= 1
        if notes is not None and what not in notes:
            notes.append(what)

    return resolve_model(ModelConfig(source=str(file), cache_dir=str(file.parent / "cache")), progress)


def leftovers(file: Path) -> list[str]:
    """Everything in the cache but lock files and finished conversions."""
    models = file.parent / "cache" / "models"
    return [p.name for p in models.iterdir() if p.name.startswith(".")] if models.exists() else []


def test_conversion_keeps_every_value_and_the_tokenizer(file: Path, reference: torch.nn.Module) -> None:
    notes: list[str] = []
    resolved = resolve(file, notes)
    assert "converting tensors" in notes
    assert resolved.name == "Tiny Model"
    assert resolved.eos_token_ids == (2,)
    assert resolved.max_model_len == 256
    state = load_file(resolved.path / "model.safetensors")
    for name, expected in reference.state_dict().items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], expected), name
    tokenizer = AutoTokenizer.from_pretrained(resolved.tokenizer_path, local_files_only=True)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.encode("!#") == [0, 2]


def test_models_beyond_the_limit_are_kept_in_bfloat16(
    file: Path, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_FLOAT32_LIMIT_BYTES", 1000)
    state = load_file(resolve(file).path / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert torch.equal(state[name], reference.state_dict()[name].bfloat16())


def test_a_second_start_converts_nothing(file: Path) -> None:
    first = resolve(file)
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    notes: list[str] = []
    second = resolve(file, notes)
    assert "converting tensors" not in notes
    assert (second.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert second.model_id == first.model_id


def test_a_damaged_conversion_is_made_again(file: Path) -> None:
    first = resolve(file)
    weights = first.path / "model.safetensors"
    data = weights.read_bytes()
    for damage in (data[:-1] + bytes([data[-1] ^ 1]), data[:100]):
        weights.write_bytes(damage)
        assert resolve(file).model_id == first.model_id
        assert weights.read_bytes() == data
    (first.path / "config.json").unlink()
    assert resolve(file).model_id == first.model_id


def test_a_conversion_that_fails_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert.AutoTokenizer, "from_pretrained", broken)
        with pytest.raises(ModelError, match=r"cannot be converted: RuntimeError: no such luck"):
            resolve(file)
    assert leftovers(file) == []
    assert resolve(file).path.is_dir()


def test_what_a_killed_conversion_left_is_swept(file: Path) -> None:
    folder = resolve(file).path
    stray = folder.with_name(f".{folder.name}.killed")
    stray.mkdir()
    (folder / "model.safetensors").unlink()
    resolve(file)
    assert leftovers(file) == []


def test_two_at_once_convert_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    real = gguf_convert._run_conversion

    def counted(*arguments: object) -> None:
        conversions.append(1)
        time.sleep(0.3)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gguf_convert, "_run_conversion", counted)
    notes: list[str] = []
    results: list[ResolvedModel] = []
    threads = [threading.Thread(target=lambda: results.append(resolve(file, notes))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(conversions) == 1
    assert [r.model_id for r in results] == [results[0].model_id] * 2
    assert any("waiting for another process" in note for note in notes)


def test_a_cache_that_cannot_be_written_names_the_setting(file: Path) -> None:
    (file.parent / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cache_dir"):
        resolve(file)


def test_every_truncation_is_found(file: Path) -> None:
    """At every byte of the structure, and at some within the data; nothing is converted and nothing hangs."""
    data = file.read_bytes()
    structure = data.index(b"token_embd.weight") + 600
    cut = file.with_name("cut.gguf")
    for size in [*range(0, structure, 7), *range(structure, len(data), 997), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut.gguf"):
            check_gguf(cut)
    with pytest.raises(ModelError, match="truncated"):
        resolve(cut)
    assert leftovers(cut) == []


def test_damaged_structure_never_hangs_nor_crashes(file: Path) -> None:
    """Every byte of the header and of the first keys, set to what makes lengths huge."""
    data = file.read_bytes()
    broken = file.with_name("broken.gguf")
    for position in [*range(400), *range(data.index(b"token_embd.weight"), data.index(b"token_embd.weight") + 60)]:
        broken.write_bytes(data[:position] + b"\xff" + data[position + 1 :])
        with contextlib.suppress(ModelError):
            assert check_gguf(broken).num_tensors == 15


@pytest.mark.parametrize(("content", "reason"), [(b"", "not a GGUF file"), (b"GGUF\x09\x00\x00\x00" + bytes(16), "version 9")])
def test_other_files_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        resolve(path)


def test_an_architecture_that_cannot_be_converted_is_named(file: Path) -> None:
    data = file.read_bytes().replace(b"qwen2", b"qxen9")
    file.write_bytes(data)
    with pytest.raises(ModelError, match="'qxen9'"):
        resolve(file)
    assert leftovers(file) == []


def scaled(kind: gguf.RopeScalingType, factor: float) -> Callable[[gguf.GGUFWriter], object]:
    return lambda writer: (writer.add_rope_scaling_type(kind), writer.add_rope_scaling_factor(factor))


def extra(name: str) -> Callable[[gguf.GGUFWriter], object]:
    return lambda writer: writer.add_tensor(name, np.full(2, 8.0, np.float32))


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (extra("rope_freqs.weight"), "rope_freqs"),  # Llama 3.1 and later
        (extra("rope_factors_long.weight"), "rope_factors_long"),  # Phi 3
        (scaled(gguf.RopeScalingType.LINEAR, 8.0), "linear with the factor 8"),  # Gemma 3
        (scaled(gguf.RopeScalingType.YARN, 4.0), "yarn with the factor 4"),
        (lambda writer: writer.add_sliding_window(8), "sliding window of 8"),
        (extra("blk.0.attn_output.bias"), "they hold 6482 values, the model 6480"),  # of an architecture that has none
    ],
)
def test_what_a_conversion_would_leave_out_is_refused(
    tmp_path: Path, reference: torch.nn.Module, say: Callable[[gguf.GGUFWriter], object], reason: str
) -> None:
    """transformers passes over what it does not know, and the model that it makes speaks all the same, only worse."""
    write_gguf(tmp_path / "m.gguf", reference, say)
    with pytest.raises(ModelError, match=f"leaves out .*{reason}.*Use the model's safetensors"):
        resolve(tmp_path / "m.gguf")
    assert leftovers(tmp_path / "m.gguf") == []


def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path, reference: torch.nn.Module) -> None:
    """transformers would make one up."""
    write_gguf(tmp_path / "m.gguf", reference, without="blk.0.ffn_down.weight")
    with pytest.raises(ModelError, match=r"lacks tensors of the model: model\.layers\.0\.mlp\.down_proj\.weight"):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "say",
    [
        scaled(gguf.RopeScalingType.NONE, 4.0),
        scaled(gguf.RopeScalingType.LINEAR, 1.0),
        lambda writer: writer.add_sliding_window(256),
    ],
)
def test_what_changes_nothing_is_no_reason_to_refuse(
    tmp_path: Path, reference: torch.nn.Module, say: Callable[[gguf.GGUFWriter], object]
) -> None:
    write_gguf(tmp_path / "m.gguf", reference, say)
    assert resolve(tmp_path / "m.gguf").path.is_dir()
