"""An RL trainer that shares a device between training and rollouts: whoever does not work sleeps.

Run it: ``python examples/memory_pools.py``. It needs no GPU; with one, pass ``--driver cuda``.
"""

from __future__ import annotations

import argparse

import torch

from torpor.memory import Memory, MemoryConfig, SleepReport, TagSleepReport, WakeReport

MIB = 1 << 20


def describe(what: str, report: SleepReport | WakeReport) -> None:
    for tag in report.tags:
        if isinstance(tag, TagSleepReport):
            print(
                f"{what:5} {tag.tag:9} {tag.policy}: {tag.returned_bytes // MIB} MiB returned, {tag.copied_bytes // MIB} copied"
            )
        else:
            print(f"{what:5} {tag.tag:9} {tag.mapped_bytes // MIB} MiB mapped, content {tag.content.value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", default="host", help="host or cuda (default: host)")
    options = parser.parse_args()

    with Memory(MemoryConfig(driver=options.driver)) as memory:
        # One pool per lifetime. The policy is what a plain memory.sleep() does with it.
        weights = memory.pool("weights", policy="host").empty((2048, 2048)).normal_()
        optimizer = memory.pool("optimizer", policy="host").zeros((2, 2048, 2048))
        kv_cache = memory.pool("kv_cache", policy="discard", guarded=True).zeros((64, 16, 2048))
        memory.register_tag_hooks("kv_cache", after_map=lambda: print("hook  kv_cache  is mapped again: register it anew"))
        reference, address = weights.clone(), weights.data_ptr()

        for step in range(2):
            print(f"step {step}: roll out, the optimizer sleeps")
            describe("sleep", memory.sleep({"optimizer": "host"}))
            kv_cache.fill_(step)

            print(f"step {step}: train, the KV cache sleeps")
            describe("sleep", memory.sleep({"kv_cache": "discard"}))
            describe("wake", memory.wake(["optimizer"]))
            optimizer[0, 0] += 1  # only the chunks that change are copied by the next sleep
            describe("wake", memory.wake(["kv_cache"]))
            memory.mark_valid("kv_cache")

        describe("sleep", memory.sleep())
        describe("wake", memory.wake())
        assert torch.equal(weights, reference)
        assert weights.data_ptr() == address
        print("the weights are the same, at the same address")


if __name__ == "__main__":
    main()
