"""Paged attention against attention written out, for every kind of step a batch can hold."""

from __future__ import annotations

import random

import pytest
import torch

from torpor.errors import ConfigurationError
from torpor.models.attention import AttentionLayer, PagedBatch, backends, get_backend, register_backend
from torpor.models.attention.base import write_kv
from torpor.models.attention.sdpa import SdpaBackend
from torpor.models.attention.triton_backend import TritonBackend

BLOCK, HEADS, KV_HEADS, DIM, BLOCKS = 4, 6, 2, 8, 80
SHAPES = {
    "one token": [(1, 1)],
    "decodes of unlike lengths": [(1, 1), (1, 3), (1, 4), (1, 5), (1, 9), (1, 14), (1, 17), (1, 32), (1, 40)],
    "a prompt": [(13, 13)],
    "a chunk behind a prefix": [(5, 22)],
    "all at once": [(1, 9), (1, 31), (8, 8), (3, 20), (17, 33)],
}


def make_batch(shapes: list[tuple[int, int]], rng: random.Random) -> PagedBatch:
    """``shapes``: tokens in this step, and tokens in the cache with them; single ones first."""
    ids = list(range(BLOCKS - 1))
    rng.shuffle(ids)
    tables = torch.full((len(shapes), 16), BLOCKS - 1)  # beyond a sequence's length: a block of nobody's
    slots, starts, fresh = [], [0], []
    for row, (count, length) in enumerate(shapes):
        own = [ids.pop() for _ in range(-(-length // BLOCK))]
        tables[row, : len(own)] = torch.tensor(own)
        starts.append(starts[-1] + count)
        for position in range(length - count, length):
            slots.append(own[position // BLOCK] * BLOCK + position % BLOCK)
            if position % BLOCK == 0:
                fresh.append(own[position // BLOCK])
    lens = tuple(length for _, length in shapes)
    return PagedBatch(
        block_size=BLOCK,
        query_starts=tuple(starts),
        seq_lens=lens,
        max_seq_len=max(lens),
        num_single=sum(count == 1 for count, _ in shapes),
        slots=torch.tensor(slots),
        fresh_blocks=torch.tensor(fresh, dtype=torch.int64),
        block_tables=tables,
        seq_lens_tensor=torch.tensor(lens),
    )


def written_out(layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
    """One sequence, one head at a time, one query at a time. query [Q, heads, D]; key, value [L, kv heads, D]."""
    out = torch.empty_like(query)
    for q in range(query.shape[0]):
        position = start + q
        low = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = key[low : position + 1, kv_head] @ query[q, head] * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            out[q, head] = torch.softmax(scores, 0) @ value[low : position + 1, kv_head]
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_equals_attention_written_out(shapes: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(shapes, random.Random(3))
    layer = AttentionLayer(scaling=0.4, sliding_window=window, softcap=softcap)
    # What no sequence of the batch wrote is NaN: it must never matter.
    cache = torch.full((2, BLOCKS, BLOCK, KV_HEADS, DIM), float("nan"))
    tokens = batch.query_starts[-1]
    query = torch.randn(tokens, HEADS, DIM, generator=generator)
    key = torch.randn(tokens, KV_HEADS, DIM, generator=generator)
    value = torch.randn(tokens, KV_HEADS, DIM, generator=generator)
    contexts = fill_prefixes(batch, cache, generator)
    write_kv(cache, key, value, batch)
    attended = get_backend("sdpa", "cpu").begin(batch, torch.float32).attend(layer, query, key, value, cache)
    for row, (old_key, old_value) in enumerate(contexts):
        own = slice(batch.query_starts[row], batch.query_starts[row + 1])
        expected = written_out(
            layer, query[own], torch.cat([old_key, key[own]]), torch.cat([old_value, value[own]]), len(old_key)
        )
        torch.testing.assert_close(attended[own], expected, atol=2e-6, rtol=2e-5)


def fill_prefixes(batch: PagedBatch, cache: torch.Tensor, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random K and V for what was computed in earlier steps, put where the block tables say, in blocks that were cleared then."""
    contexts = []
    for row, length in enumerate(batch.seq_lens):
        count = length - (batch.query_starts[row + 1] - batch.query_starts[row])
        old = torch.randn(2, count, KV_HEADS, DIM, generator=generator)
        for position in range(count):
            block = int(batch.block_tables[row, position // BLOCK])
            if position % BLOCK == 0:
                cache[:, block] = 0
            cache[:, block, position % BLOCK] = old[:, position]
        contexts.append((old[0], old[1]))
    return contexts


def test_decoding_rows_do_not_depend_on_their_batch() -> None:
    shapes = [(1, 9), (1, 10), (1, 30), (1, 33)]
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM, generator=generator)
    query = torch.randn(len(shapes), HEADS, DIM, generator=generator)
    kv = torch.zeros(len(shapes), KV_HEADS, DIM)
    layer = AttentionLayer(scaling=0.3)
    batch = make_batch(shapes, random.Random(1))
    together = SdpaBackend().begin(batch, torch.float32).attend(layer, query, kv, kv, cache)
    for row, (_, length) in enumerate(shapes):
        alone = PagedBatch(
            block_size=BLOCK,
            query_starts=(0, 1),
            seq_lens=(length,),
            max_seq_len=length,
            num_single=1,
            slots=batch.slots[row : row + 1],
            fresh_blocks=batch.fresh_blocks[:0],
            block_tables=batch.block_tables[row : row + 1],
            seq_lens_tensor=batch.seq_lens_tensor[row : row + 1],
        )
        one = slice(row, row + 1)
        single = SdpaBackend().begin(alone, torch.float32).attend(layer, query[one], kv[one], kv[one], cache)
        torch.testing.assert_close(single, together[one], atol=1e-6, rtol=1e-5)


def test_a_blocks_first_token_clears_what_an_earlier_owner_left() -> None:
    cache = torch.full((2, BLOCKS, BLOCK, KV_HEADS, DIM), float("nan"))
    batch = make_batch([(2, 2)], random.Random(0))
    one = torch.ones(2, KV_HEADS, DIM)
    write_kv(cache, one, one, batch)
    block = int(batch.block_tables[0, 0])
    assert cache[:, block, :2].eq(1).all()
    assert cache[:, block, 2:].eq(0).all()
    assert cache[:, [b for b in range(BLOCKS) if b != block]].isnan().all()


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'flash' is not known; on cpu there are auto, sdpa") as caught:
        get_backend("flash", "cpu")
    assert caught.value.setting == "attention_backend"
    assert get_backend("auto", "cpu").name in backends("cpu")


def test_a_backends_name_is_taken_once() -> None:
    register_backend(SdpaBackend)

    class Impostor(SdpaBackend):
        pass

    with pytest.raises(ConfigurationError, match="registered already"):
        register_backend(Impostor)


def test_a_backend_that_cannot_run_says_what_it_needs() -> None:
    class Absent(SdpaBackend):
        name = "absent"
        device_types = ("nowhere",)

        @classmethod
        def missing(cls) -> str | None:
            return "install absent"

    register_backend(Absent)
    with pytest.raises(ConfigurationError, match=r"'absent' cannot run here: install absent") as caught:
        get_backend("absent", "nowhere")
    assert caught.value.setting == "attention_backend"
    assert get_backend("auto", "nowhere").name == "sdpa"


def test_sdpa_refuses_to_promise_independence_of_the_batch() -> None:
    with pytest.raises(ConfigurationError, match="cannot be deterministic"):
        get_backend("sdpa", "cpu", deterministic=True)


def test_a_gpu_prefers_the_triton_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "missing", classmethod(lambda cls: None))
    assert get_backend("auto", "cuda").name == "triton"
    monkeypatch.setattr(TritonBackend, "missing", classmethod(lambda cls: "install triton"))
    assert get_backend("auto", "cuda").name == "sdpa"
    with pytest.raises(ConfigurationError, match="'triton' cannot run here: install triton"):
        get_backend("triton", "cuda")


def test_a_backend_of_gpus_says_so_without_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'triton' needs cuda; on cpu there are auto, sdpa"):
        get_backend("triton", "cpu")
