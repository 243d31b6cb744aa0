"""scripts/figures: documents hold no figure that is in no measurement, and say so when one is missing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures"
SAMPLES = {"median": 0.0613, "min": 0.06, "max": 0.0704, "values": [0.06, 0.0613, 0.0704]}


@pytest.fixture
def figures(tmp_path: Path) -> dict[str, Any]:
    """The script's functions, reading a folder with one file."""
    document = {
        "command": "python benchmarks/gpu_sleep.py",
        "rows": [{"table": "by size", "what": "8 GiB", "s": SAMPLES}],
        "goals": [{"what": "wake", "measured": "0.3 s", "needed": "0.4 s", "reached": True}],
        "results": {"sleep_s": SAMPLES, "sizes": [{"bytes": 3 << 30, "rate": 55.23}], "tokens_per_s": 11230.4},
    }
    (tmp_path / "h200.json").write_text(json.dumps({"gpu_sleep": document}))
    script = runpy.run_path(str(SCRIPT))
    script["measurements"].__globals__["MEASUREMENTS"] = tmp_path
    script["measurements"].__globals__["ROOT"] = tmp_path
    return script


def filled(figures: dict[str, Any], template: str) -> str:
    text = figures["fill"](f"<!-- figures h200:gpu_sleep\n{template}\n-->\nold\n<!-- /figures -->\n")
    assert figures["fill"](text) == text
    return str(text.split("-->\n")[1].removesuffix("\n<!-- /figures "))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{sleep_s|ms} ms", "61.3 ms"),
        ("{sleep_s|ms|range}", "60-70.4"),
        ("{sleep_s}", "0.0613"),
        ("{h200:gpu_sleep.sizes.0.bytes|GiB}", "3"),
        ("{sizes.0.rate|whole}", "55"),
        ("{tokens_per_s}", "11,230"),
        ("`{command}`", "`python benchmarks/gpu_sleep.py`"),
        ("{rows h200:gpu_sleep by size}", "|  | s |\n| --- | ---: |\n| 8 GiB | 0.0613 (0.0600-0.0704) |"),
        ("{if sleep_s}{sleep_s|ms} ms\n{if h200:gpu_nap.nap_s}{h200:gpu_nap.nap_s} s\n{if nap_s}{nap_s} s\nend", "61.3 ms\nend"),
        ("{goals h200}", "|  | measured | goal | reached |\n| --- | ---: | ---: | ---: |\n| wake | 0.3 s | 0.4 s | yes |"),
    ],
)
def test_a_template_becomes_what_was_measured(figures: dict[str, Any], template: str, expected: str) -> None:
    assert filled(figures, template) == expected


@pytest.mark.parametrize(
    "template",
    ["{nap_s}", "{sizes.1.bytes}", "{sizes}", "{h100:gpu_sleep.sleep_s}", "{rows h200:gpu_sleep x}", "{sleep_s|Ms}"],
)
def test_what_was_not_measured_is_an_error(figures: dict[str, Any], template: str) -> None:
    with pytest.raises(figures["FigureError"]):
        filled(figures, template)


def test_a_loose_figure_is_noticed(figures: dict[str, Any]) -> None:
    text = (
        "5 ms\n## Measured\nin 6.3 ms\n<!-- figures\n7 ms\n-->\n7 ms\n<!-- /figures -->\nat 2 places\n9 % more\n## Next\n8 ms\n"
    )
    assert list(figures["loose_figures"](text)) == ["in 6.3 ms", "9 % more"]
