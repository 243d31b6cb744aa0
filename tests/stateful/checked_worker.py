"""A worker whose answers are a pure function of the text, and which looks at every byte that an answer rests on.

It keeps KV in real pools and computes from what lies there, so lost weights or somebody else's KV give another token. And it does
not leave the finding to chance: an entry, a weight or a pool that is not what it must be goes into ``wrong``, with its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from torpor._native import Device
from torpor.memory import Content, Memory, MemoryConfig, Residency
from torpor.request import FinishReason, SamplingParams
from torpor.scheduler.output import RunnerOutput, ScheduledSequence, SchedulerOutput
from torpor.testing.engine import MODULUS, PERIOD, VOCABULARY, FakeWorker

BLOCK = 4
KIB = 1 << 10
MARK = 1000  # a KV entry's place says which weights it was computed with: more than a text has tokens
Versions = tuple[tuple[int, int], ...]  # (from which token of the answer on, the version of the weights)
FIRST: Versions = ((0, 1),)
EOS_IDS = tuple(range(3, VOCABULARY, 31))
MEMORY = MemoryConfig(driver="host", extent_bytes=64 * KIB, chunk_bytes=4 * KIB, copy_threads=1)


@cache
def weights_of(version: int) -> list[int]:
    """Those of the model ``fake@version``."""
    return [(index * 7919 + 13 * version) % 1009 for index in range(PERIOD)]


def next_token(keys: Sequence[int], weights: Sequence[int], sampling: SamplingParams, forbidden: Sequence[int]) -> int:
    """``keys`` are the text's tokens, each plus one, as the KV cache has them."""
    state = 1
    for position, key in enumerate(keys):
        state = (state * 31 + key * weights[position % PERIOD] + position + 1) % MODULUS
    state = (state + sum(weights)) % MODULUS
    if sampling.temperature > 0:
        state = (state * 48271 + (sampling.seed or 0) + len(keys)) % MODULUS
    token = state % VOCABULARY
    while token in forbidden:
        token = (token + 1) % VOCABULARY
    return token


@lru_cache(maxsize=20_000)
def reference(
    prompt: tuple[int, ...], sampling: SamplingParams, context_len: int, versions: Versions = FIRST
) -> tuple[tuple[int, ...], FinishReason]:
    """What an engine that never slept says, and why it ends there; with weights that are updated at these tokens."""
    tokens, stops = list(prompt), (*(() if sampling.ignore_eos else EOS_IDS), *sampling.stop_token_ids)
    while True:
        said = len(tokens) - len(prompt)
        forbidden = stops if said < sampling.min_tokens else ()
        version = [version for start, version in versions if start <= said][-1]
        tokens.append(next_token([t + 1 for t in tokens], weights_of(version), sampling, forbidden))
        outputs = tuple(tokens[len(prompt) :])
        if len(outputs) >= sampling.min_tokens and tokens[-1] in stops:
            return outputs, FinishReason.STOP
        if len(outputs) >= sampling.max_tokens or len(tokens) >= context_len:
            return outputs, FinishReason.LENGTH


class CheckedWorker(FakeWorker):
    """``fail_next`` fails a step with an exception; ``fail_samples`` lets the requests of one step have no token; ``version`` is
    that of the weights it must compute with, as far as its engine's callers know."""

    def __init__(self, *, num_blocks: int, exportable: bool = False) -> None:
        self.device = Device.open("host", faults=True)
        super().__init__(Memory(MEMORY, device=self.device), num_blocks=num_blocks, block_size=BLOCK, exportable=exportable)
        self.version = 1
        self.wrong: list[str] = []
        self.broken: set[str] = set()  # requests that a failed step may have ended
        self.fail_samples = False

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        if output.sequences:
            self._check_pools(output)
        if self.fail_next is not None:
            self.broken |= {s.request_id for s in output.sequences}
        result = super().execute(output)
        if not (self.fail_samples and result.sampled):
            return result
        self.fail_samples = False
        self.broken |= result.sampled.keys()
        return dataclasses.replace(result, sampled={}, failed=dict.fromkeys(result.sampled, "told to fail"))

    def _check_pools(self, output: SchedulerOutput) -> None:
        for tag in self.memory.stats().tags:
            if (tag.residency, tag.content) != (Residency.RESIDENT, Content.VALID):
                names = [s.request_id for s in output.sequences]
                self.wrong.append(f"{names} computed while {tag.tag} is {tag.residency.value} and {tag.content.value} (E7)")

    def _run(self, sequence: ScheduledSequence) -> int | None:
        cache, end = self.kv_caches["layers.0"], sequence.start + len(sequence.token_ids)
        self.block_tables[: len(sequence.block_ids)] = torch.tensor(sequence.block_ids, dtype=torch.int64)
        positions = torch.arange(end)
        where = self.block_tables[positions // BLOCK], positions % BLOCK
        new = torch.tensor(sequence.token_ids, dtype=torch.float32)
        cache[0, where[0][sequence.start :], where[1][sequence.start :], 0, :] = (new + 1)[:, None]
        cache[1, where[0][sequence.start :], where[1][sequence.start :], 0, :] = self._places(end)[sequence.start :, None]
        keys, places = (cache[half, where[0], where[1], 0, :] for half in (0, 1))
        self._check_entries(sequence, keys, places)
        weights = [int(w) for w in self.weights.tolist()]
        if weights != weights_of(self.version):
            self.wrong.append(f"{sequence.request_id} was computed with other weights than {self.version}: {weights[:4]}...")
        if not sequence.samples:
            return None
        return next_token([int(k) for k in keys[:, 0].tolist()], weights, sequence.sampling, sequence.forbidden_token_ids)

    def _check_entries(self, sequence: ScheduledSequence, keys: torch.Tensor, places: torch.Tensor) -> None:
        text = torch.tensor([*sequence.counts.prompt, *sequence.counts.outputs][: len(keys)], dtype=torch.float32)
        right = (keys == (text + 1)[:, None]) & (places == self._places(len(keys))[:, None])
        if not bool(right.all()):
            bad = [i for i, good in enumerate(right.all(dim=1).tolist()) if not good]
            self.wrong.append(
                f"{sequence.request_id}: the KV of positions {bad} is not its own, or of other weights (from {sequence.start} on)"
            )

    def _places(self, end: int) -> torch.Tensor:
        return torch.arange(end) + 1.0 + MARK * self.version

    def shutdown(self) -> None:
        super().shutdown()
        self.device.close()
