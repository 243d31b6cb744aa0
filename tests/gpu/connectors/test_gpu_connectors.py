"""What arrives, and the story of the host's processes told by engines on a GPU (P1, P2, P5)."""

from __future__ import annotations

import random
import time

import pytest
import torch
from connector_kit import HERE, SPEC, THERE, A, on, scattered, tokens_of
from kv_child import Child
from kv_meeting import Meeting
from test_connectors_processes import (  # noqa: F401
    test_an_owner_that_is_stopped_in_the_middle_costs_one_load,
    test_either_side_and_both_sleep_and_every_byte_is_right_afterwards,
    test_p1_params_from_before_a_sleep_are_not_read_after_it,
    test_p2_a_reader_that_is_killed_holds_nothing_up,
    test_p2_a_reader_that_is_stopped_is_met_by_the_deadline_by_name,
    test_p5_an_owner_that_is_killed_costs_its_readers_a_load,
)

from torpor.testing.kv_engine import expected

pytestmark = pytest.mark.gpu


def bring(p: Child, d: Child, seed: int, count: int) -> None:
    rng = random.Random(seed)
    prompt, there, here = tokens_of(count, seed), scattered(rng, count), scattered(rng, count)
    before = d.call("block_sums")
    params = p.call("prefill", f"r{seed}", prompt, there)
    assert d.call("load", f"q{seed}", prompt, params, here) == "recving"
    assert d.call("has", prompt, here)
    after = d.call("block_sums")
    untouched = set(range(SPEC.num_blocks)) - set(here)
    assert all(before[block] == after[block] for block in untouched), "blocks that nobody asked for were written"


def test_scattered_blocks_arrive_to_the_bit(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer")
    for seed, count in enumerate((1, 2, 33, 64, 17)):
        bring(p, d, seed, count)


@pytest.mark.gpu(count=2)
def test_scattered_blocks_arrive_from_another_gpu(meeting: Meeting) -> None:
    p, d = meeting.child("P", "producer"), meeting.child("D", "consumer", memory=on(1))
    for seed, count in enumerate((1, 33, 64)):
        bring(p, d, seed, count)
        for engine in (p, d):
            assert engine.call("sleep")["held_bytes"] == 0
            engine.call("wake")


def test_a_hand_off_is_published_when_its_kv_is_written(ipc: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that wrote it may still be on its way on some stream when the scheduler hands it off."""
    p, d = ipc.here("P", "producer"), ipc.child("D", "consumer")
    d.wait_until_up()
    stream, kept = torch.cuda.Stream(), []

    def write_behind(block: int, content: bytes) -> None:
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda().view(torch.bfloat16)
        kept.append(raw)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # some 50 ms
            for index, tensor in enumerate(p.kv_caches.values()):
                for half in (0, 1):
                    part = raw.view(SPEC.num_layers, 2, -1)[index, half]
                    tensor[half, block].copy_(part.view_as(tensor[half, block]))

    monkeypatch.setattr(p, "write_block", write_behind)
    begun = time.monotonic()
    params = p.prefill("r", A, THERE)
    assert time.monotonic() - begun > 0.02, "nothing was on its way"
    assert d.call("load", "q", A, params, HERE) == "recving"
    assert d.call("has", A, HERE)


def test_what_arrived_can_be_used_on_any_stream_at_once(ipc: Meeting) -> None:
    p, d = ipc.child("P", "producer"), ipc.here("D", "consumer")
    stream = torch.cuda.Stream()
    for turn in range(5):
        prompt = [turn, *A[1:]]
        params = p.call("prefill", f"r{turn}", prompt, THERE)
        assert d.load(f"q{turn}", prompt, params, HERE) == "recving"
        with torch.cuda.stream(stream):
            copies = [tensor[:, HERE].clone() for tensor in d.kv_caches.values()]
        stream.synchronize()
        for index, _ in enumerate(HERE):
            seen = b"".join(c[half, index].cpu().view(torch.uint8).numpy().tobytes() for c in copies for half in (0, 1))
            assert seen == expected(SPEC, prompt, index)
