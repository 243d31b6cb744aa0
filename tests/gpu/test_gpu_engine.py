"""The engine on a GPU: both runners answer as transformers does, everything lies in its pool (E1), sleeps change nothing."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gpu_engines import LEVELS, answers, done, gpu_core, gpu_worker, texts, worker_of
from tiny_models import GREEDY, Driven, prompts, reference_greedy, run_step, save_tiny

from torpor.connectors.base import KVConnectorWorker
from torpor.engine.base import SleepRequest
from torpor.engine.graphs import GraphRunner
from torpor.engine.runner import Runner
from torpor.engine.worker import Worker
from torpor.errors import ConfigurationError, DeviceMemoryError
from torpor.models.fused import vector
from torpor.models.fused.decoder import Linear

PROMPTS = prompts(9, 5, 14, 3)
RUNNERS = pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3")
    save_tiny(path, "qwen3")
    return path


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    """Workers that are shut down at the end, whatever happens."""
    workers: list[Worker] = []

    def start(folder: Path, **settings: Any) -> Worker:
        workers.append(gpu_worker(folder, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.shutdown()


def runner_of(worker: Worker) -> Runner:
    assert worker._runner is not None
    return worker._runner


# ---- answers ---------------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("layers", ["on", "off"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_greedy_answers_are_those_of_transformers(
    tmp_path: Path, started: Callable[..., Worker], family: str, layers: str, eager: bool
) -> None:
    model = save_tiny(tmp_path, family)
    worker = started(tmp_path, enforce_eager=eager, fused_layers=layers)
    assert isinstance(runner_of(worker), GraphRunner) == (not eager and layers == "on")
    assert texts(worker, PROMPTS, 12) == [reference_greedy(model, prompt, 12) for prompt in PROMPTS]


def test_a_model_whose_layers_are_its_own_runs_as_transformers_computes_it(
    tmp_path: Path, started: Callable[..., Worker]
) -> None:
    model = save_tiny(tmp_path, "gemma3")
    worker = started(tmp_path)
    assert worker.model.fused is None
    assert texts(worker, PROMPTS, 12) == [reference_greedy(model, prompt, 12) for prompt in PROMPTS]


def test_steps_of_single_tokens_are_replayed_at_every_size(folder: Path, started: Callable[..., Worker]) -> None:
    """Sizes between buckets are padded: their rows write nothing and change nobody's answer."""
    worker, eager = started(folder, max_num_seqs=11), started(folder, max_num_seqs=11, enforce_eager=True)
    many = prompts(*range(1, 12))
    expected = [texts(eager, [prompt], 6)[0] for prompt in many]
    for count in (1, 2, 3, 5, 9, 11):
        assert texts(worker, many[:count], 6) == expected[:count]
    captures, calls = runner_of(worker).captures, 0
    forward = worker.model.forward

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*arguments, **keywords)

    worker.model.forward = counted
    assert texts(worker, [[7]], 9) == texts(eager, [[7]], 9)
    assert calls == 0
    assert runner_of(worker).captures == captures


@RUNNERS
def test_logits_that_are_not_finite_fail_one_request_only(folder: Path, started: Callable[..., Worker], eager: bool) -> None:
    worker = started(folder, enforce_eager=eager)
    good, bad = Driven("good", prompts(9)[0]), Driven("bad", prompts(6, seed=5)[0])
    free = list(range(20))
    first = run_step(worker, [good.take(9, free), bad.take(6, free)])
    for cache in worker.kv_caches.values():
        cache[:, bad.blocks] = float("nan")
    for sequence in (good, bad):
        sequence.tokens.append(first.sampled[sequence.name])
    second = run_step(worker, [bad.take(1, free), good.take(1, free)])
    assert second.failed.keys() == {"bad"}
    assert second.sampled.keys() == {"good"}


@RUNNERS
def test_sampling_and_logprobs_do_not_depend_on_the_runner(folder: Path, started: Callable[..., Worker], eager: bool) -> None:
    sampling = msgspec.structs.replace(GREEDY, temperature=0.8, top_p=0.9, top_k=20, seed=7, logprobs=3)
    worker, reference = started(folder, enforce_eager=eager), started(folder, enforce_eager=True)

    def sampled(worker: Worker) -> list[Any]:
        sequence, found = Driven("a", prompts(9)[0], sampling), []
        free = list(range(20))
        for count in (9, 1, 1, 1):
            result = run_step(worker, [sequence.take(count, free)])
            sequence.tokens.append(result.sampled["a"])
            found.append(result.logprobs["a"])
        return found

    ours, theirs = sampled(worker), sampled(reference)
    assert [p.token_id for p in ours] == [p.token_id for p in theirs]
    assert [p.top_ids for p in ours] == [p.top_ids for p in theirs]
    assert [p.logprob for p in ours] == pytest.approx([p.logprob for p in theirs], abs=1e-4)


@pytest.mark.parametrize(
    ("depth", "columns", "normed", "gated", "biased", "dtype"),
    [
        (4096, 6144, True, False, False, torch.bfloat16),  # Qwen3-8B
        (4096, 4096, False, False, False, torch.bfloat16),
        (4096, 12288, True, True, False, torch.bfloat16),
        (12288, 4096, False, False, False, torch.bfloat16),
        (3584, 4608, True, False, True, torch.float16),  # Qwen2-7B
        (28672, 8192, False, False, False, torch.bfloat16),  # Llama-70B: deeper than any tile
        (576, 961, True, True, True, torch.float32),  # columns and depth that no tile fits
    ],
)
def test_products_of_one_token_agree_with_float32(
    depth: int, columns: int, normed: bool, gated: bool, biased: bool, dtype: torch.dtype
) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    torch.manual_seed(depth)
    rows = columns * (2 if gated else 1)
    x, norm, residual = drawn(1, depth), drawn(depth), None if gated else drawn(1, columns)
    linear = Linear(drawn(rows, depth) / depth**0.5, drawn(rows) if biased else None)
    wide = torch.nn.functional.rms_norm(x.float(), (depth,), norm.float(), 1e-6) if normed else x.float()
    expected = torch.nn.functional.linear(wide, linear.weight.float(), None if linear.bias is None else linear.bias.float())
    if residual is None:
        expected = torch.nn.functional.silu(expected[:, :columns]) * expected[:, columns:]
    else:
        expected = expected + residual.float()
    got = vector.product(x, linear, norm=norm if normed else None, eps=1e-6, residual=residual, gated=gated)
    most = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]
    assert (got.float() - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_answers_do_not_depend_on_the_batch(tmp_path: Path, started: Callable[..., Worker], dtype: str) -> None:
    """Byte for byte: the log-probabilities of a request alone, and among 63 others that come and go."""
    save_tiny(tmp_path, "qwen3", hidden_size=512, intermediate_size=1024, vocab_size=2048)
    worker = started(tmp_path, dtype=dtype, deterministic=True, max_num_seqs=64, max_tokens=1024, num_blocks=1024)
    sampling = msgspec.structs.replace(GREEDY, logprobs=5)

    def run(others: int, chunk: int) -> list[Any]:
        free = list(range(1024))
        mine = Driven("mine", prompts(23)[0], sampling)
        company = [Driven(str(i), p) for i, p in enumerate(prompts(*(1 + i % 17 for i in range(others)), seed=3))]
        found = []
        while len(mine.output) < 12:
            left = len(mine.tokens) - mine.done
            batch = [mine.take(min(left, chunk), free)]
            active = company[len(found) :] if found else company
            batch += [s.take(len(s.tokens) - s.done, free) for s in active]
            result = run_step(worker, batch)
            for sequence in (mine, *active):
                if sequence.name in result.sampled:
                    sequence.tokens.append(result.sampled[sequence.name])
            found += [result.logprobs["mine"]] if "mine" in result.logprobs else []
        return found

    alone = run(0, 23)
    assert run(63, 23) == alone
    assert run(20, 5) == alone


def test_deterministic_is_refused_where_it_cannot_be_promised(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3")
    with pytest.raises(ConfigurationError, match="deterministic"):
        gpu_worker(tmp_path, deterministic=True)


# ---- weights ---------------------------------------------------------------------------------------------------------------


def test_weights_arrive_as_the_files_have_them(tmp_path: Path, started: Callable[..., Worker]) -> None:
    model = save_tiny(tmp_path, "qwen3", vocab_size=40_000, hidden_size=256)  # the embedding is read in several pieces
    worker = started(tmp_path)
    state = model.state_dict()
    for name, parameter in worker.model.module.named_parameters():
        assert torch.equal(parameter.cpu(), state[name].float()), name


def test_random_weights_are_the_same_every_time(folder: Path, started: Callable[..., Worker]) -> None:
    first = started(folder, load_format="random", dtype="bfloat16")
    second = started(folder, load_format="random", dtype="bfloat16")
    ours, theirs = (dict(w.model.module.named_parameters()) for w in (first, second))
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    assert ours["model.layers.0.mlp.up_proj.weight"].float().std() > 0


# ---- E1: what lies where ---------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("layers", ["on", "off"])
def test_e1_everything_the_engine_allocates_lies_in_its_pool(
    folder: Path, started: Callable[..., Worker], layers: str, eager: bool
) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    worker = started(folder, enforce_eager=eager, fused_layers=layers)
    memory, runner = worker.memory, runner_of(worker)
    texts(worker, PROMPTS, 4)
    assert {memory.tag_of(p) for p in worker.model.module.parameters()} == {"weights"}
    assert {memory.tag_of(b) for b in worker.model.module.buffers()} <= {"weights", "runtime"}
    assert {memory.tag_of(t) for t in runner.kv_caches} == {"kv_cache"}
    assert {tag: {memory.tag_of(t) for t in tensors} for tag, tensors in runner.tensors.items()} == {
        tag: {tag} for tag in runner.tensors
    }
    assert ("cuda_graph" in runner.tensors) == isinstance(runner, GraphRunner)
    gc.collect()
    if not isinstance(runner, GraphRunner):
        assert torch.cuda.memory_allocated() - before < 16 << 20, "only libraries' workspaces are torch's own"


def test_a_connector_that_follows_layer_by_layer_sees_every_layer_of_every_step(
    folder: Path, started: Callable[..., Worker]
) -> None:
    worker = started(folder)

    class Events:
        saved = 0

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
            self.saved += 1

    events = runner_of(worker).events = Events()
    assert texts(worker, [[5]], 4) == texts(worker, [[5]], 4)
    assert events.saved == 2 * 4 * 3
    assert not issubclass(Events, KVConnectorWorker)


# ---- sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_the_kv_cache_takes_what_is_left_and_the_largest_step_still_fits(folder: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    wanted = (total - free) / total + 0.04
    core = gpu_core(
        folder, num_blocks=None, gpu_memory_utilization=wanted, max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=256
    )
    try:
        assert core.info.num_blocks * 16 >= 64 * 256
        many = prompts(*(60 + i for i in range(64)))
        answers(core, many, 8)
        free, total = torch.cuda.mem_get_info()
        assert total - free <= wanted * total
    finally:
        core.shutdown()


def test_no_room_for_a_kv_cache_says_how_much_is_needed_and_free(folder: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="gpu_memory_utilization") as caught:
        gpu_core(folder, num_blocks=None, gpu_memory_utilization=0.001)
    assert caught.value.bytes_needed > caught.value.bytes_free > 0


# ---- sleep and wake --------------------------------------------------------------------------------------------------------


@RUNNERS
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_changes_no_answer_no_address_and_no_graph(folder: Path, level: int, eager: bool) -> None:
    core = gpu_core(folder, enforce_eager=eager)
    try:
        worker, runner = worker_of(core), runner_of(worker_of(core))
        before = answers(core, PROMPTS, 12, "before")
        weights = {name: p.clone() for name, p in worker.model.module.named_parameters()}
        addresses = [t.data_ptr() for tensors in runner.tensors.values() for t in tensors]
        captures = getattr(runner, "captures", 0)
        for turn in range(3):
            done(core, core.sleep(SleepRequest(level=level)))
            assert worker.memory.stats().mapped_bytes == 0
            report = done(core, core.wake_up())
            assert report["state"] == "awake"
            assert all(torch.equal(p, weights[name]) for name, p in worker.model.module.named_parameters())
            assert answers(core, PROMPTS, 12, f"after {turn}") == before
        assert [t.data_ptr() for tensors in runner.tensors.values() for t in tensors] == addresses
        assert getattr(runner, "captures", 0) == captures
        worker.memory.check_integrity()
    finally:
        core.shutdown()


def test_runtime_that_was_discarded_is_made_again(folder: Path) -> None:
    core = gpu_core(folder)
    try:
        before = answers(core, PROMPTS, 12, "before")
        done(core, core.sleep(SleepRequest(policies=dict.fromkeys(LEVELS[1], "discard"))))
        assert set(done(core, core.wake_up())["refilled_tags"]) >= {"weights", "runtime"}
        assert answers(core, PROMPTS, 12, "after") == before
    finally:
        core.shutdown()


def test_two_engines_on_one_gpu_take_turns(folder: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    first, second = gpu_core(folder), gpu_core(tmp_path)
    try:
        expected = [answers(core, PROMPTS, 8, "first") for core in (first, second)]
        done(second, second.sleep(SleepRequest(level=1)))
        for turn in range(20):
            awake, asleep, want = (first, second, expected[0]) if turn % 2 == 0 else (second, first, expected[1])
            assert worker_of(asleep).memory.stats().mapped_bytes == 0
            assert answers(awake, PROMPTS, 8, f"turn {turn}") == want
            done(awake, awake.sleep(SleepRequest(level=1)))
            done(asleep, asleep.wake_up())
    finally:
        first.shutdown()
        second.shutdown()


def test_a_hundred_cycles_keep_answers_and_bytes_of_device_and_host(folder: Path, device_bytes: Callable[..., int]) -> None:
    core = gpu_core(folder)
    try:
        memory = worker_of(core).memory
        expected = answers(core, PROMPTS[:2], 4, "before")
        seen: list[tuple[int, int, int]] = []
        for turn in range(100):
            done(core, core.sleep(SleepRequest(level=1)))
            asleep = device_bytes()
            done(core, core.wake_up())
            assert answers(core, PROMPTS[:2], 4, f"turn {turn}") == expected
            seen.append((asleep, device_bytes(), memory.stats().host_committed_bytes))
            if turn == 9:
                resident = resident_bytes()
        for kind in zip(*seen[5:], strict=True):
            assert max(kind) - min(kind) <= 4 << 20, "device bytes, asleep and awake, and those of host images are flat"
        assert resident_bytes() - resident <= 16 << 20, "and so is the process"
    finally:
        core.shutdown()


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
