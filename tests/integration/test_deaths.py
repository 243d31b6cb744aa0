"""Somebody of a P/D pair is killed or stopped in the middle of things: the others answer, and hold nothing of the dead.
``scripts/deaths`` is the long run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "deaths"))

from rounds import Death, Rounds
from town import Town

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

DEATHS = [
    Death("P core", "stop and go on", "transfer", 0.03, 8.0),  # D recomputes; P's server says that it does not answer
    Death("D core", "stop and go on", "sleep P", 0.02, 4.0),  # longer than withdraw_timeout_s: P names D and stays awake
    Death("router", "kill", "request", 0.05, 0.0),
    Death("D", "kill", "wake P", 0.01, 0.0),  # its orphaned core ends, and P gets its memory back
    Death("P core", "kill", "transfer", 0.05, 0.0),  # its server ends, and D recomputes
]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rounds]:
    from engine_models import save_model

    model = save_model(tmp_path_factory.mktemp("model"))
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    with Town(tmp_path_factory.mktemp("town"), model, "ipc") as town:
        rounds = Rounds(town, random.Random(seed), print)
        rounds.prepare()
        yield rounds


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_the_others_answer_and_hold_nothing_of_the_dead(rounds: Rounds, death: Death) -> None:
    rounds.run(death)
