"""What the process may use, read from a file tree as the kernel shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from torpor.errors import ConfigurationError
from torpor.models import dtypes
from torpor.models.dtypes import choose_dtype
from torpor.models.hardware import available_memory_bytes, has_bf16_units, usable_cores

CORES = len(os.sched_getaffinity(0))


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_limits(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    2048 kB\n", proc__self__cgroup="0::/\n")
    assert usable_cores(root) == CORES
    assert available_memory_bytes(root) == 2048 * 1024


def test_cgroup_v2_limits_of_the_group_and_of_those_above_it(tmp_path: Path) -> None:
    base = "sys__fs__cgroup__a"
    root = write(
        tmp_path,
        proc__meminfo="MemAvailable: 1000000 kB\n",
        proc__self__cgroup="0::/a/b\n",
        **{
            f"{base}__cpu_DOT_max": "100000 100000\n",
            f"{base}__b__cpu_DOT_max": "max 100000\n",
            f"{base}__memory_DOT_max": "5000\n",
            f"{base}__memory_DOT_current": "3000\n",
            f"{base}__memory_DOT_stat": "anon 10\ninactive_file 500\n",
            f"{base}__b__memory_DOT_max": "max\n",
            f"{base}__b__memory_DOT_current": "3000\n",
        },
    )
    assert usable_cores(root) == 1
    assert available_memory_bytes(root) == 2500


def test_cgroup_v1(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__"
    files = {
        "proc__meminfo": "MemAvailable: 1000000 kB\n",
        "proc__self__cgroup": "4:memory:/x\n2:cpu,cpuacct:/\n0::/\n",
        f"{group}cpu__cpu_DOT_cfs_quota_us": "150000\n",
        f"{group}cpu__cpu_DOT_cfs_period_us": "100000\n",
        f"{group}memory__x__memory_DOT_limit_in_bytes": "9000\n",
        f"{group}memory__x__memory_DOT_usage_in_bytes": "8000\n",
        f"{group}memory__memory_DOT_limit_in_bytes": f"{2**63 - 4096}\n",
        f"{group}memory__memory_DOT_usage_in_bytes": "8000\n",
    }
    root = write(tmp_path, **files)
    assert usable_cores(root) == 1
    assert available_memory_bytes(root) == 1000


def test_bf16_units(tmp_path: Path) -> None:
    assert has_bf16_units(write(tmp_path / "a", proc__cpuinfo="processor : 0\nflags\t: sse avx512_bf16 x\n"))
    assert not has_bf16_units(write(tmp_path / "b", proc__cpuinfo="processor : 0\nflags\t: sse avx2\n"))
    assert not has_bf16_units(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("setting", "stored", "on_cpu", "units", "expected"),
    [
        ("auto", torch.float32, True, True, torch.float32),
        ("auto", torch.bfloat16, True, True, torch.bfloat16),
        ("auto", torch.bfloat16, True, False, torch.float32),
        ("auto", torch.float16, True, True, torch.float32),
        ("auto", torch.float16, False, False, torch.float16),
        ("auto", torch.float64, False, True, torch.float32),
        ("bfloat16", torch.float32, True, False, torch.bfloat16),
    ],
)
def test_dtype(
    monkeypatch: pytest.MonkeyPatch, setting: str, stored: torch.dtype, on_cpu: bool, units: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(dtypes, "has_bf16_units", lambda: units)
    assert choose_dtype(setting, stored, on_cpu=on_cpu) == expected


def test_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'int8' is not known; known: auto, float32, bfloat16, float16") as caught:
        choose_dtype("int8", torch.float32, on_cpu=True)
    assert caught.value.setting == "dtype"
