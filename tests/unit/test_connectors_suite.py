"""The conformance suite: sound connectors pass it, and every fault is caught by the item that it belongs to."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import MagicMock

import pytest
from faulty_connectors import MUTANTS, SOCKETS, Mutant

from torpor.cli import main
from torpor.connectors import nixl_agent as agents
from torpor.errors import ConfigurationError, ConnectorError
from torpor.testing.connectors import (
    ITEMS,
    Item,
    PinnedConnector,
    Report,
    Status,
    Subject,
    UnfollowedPinned,
    check_connector,
    items_peers,
    run_items,
)
from torpor.testing.connectors.outcomes import Failure
from torpor.testing.connectors.stage import EngineHere, Stage
from torpor.testing.kv_engine import missing_package

HERE = [item.name for item in ITEMS if not item.processes]
MULTI = {"connectors": ["torpor.testing.connectors:MemoryConnector", "torpor.testing.connectors:PinnedConnector"]}


def shown(report: Report) -> str:
    return "\n".join(f"{o.item}: {o.status.value}: {o.reason}" for o in report.outcomes)


def caught_by(mutant: Mutant, items: list[str] | None) -> list[str]:
    failed = check_connector(Subject.of(mutant.kind, extra=mutant.extra), items=items).failed
    assert all(mutant.says in outcome.reason for outcome in failed if outcome.item == mutant.item), failed
    return [outcome.item for outcome in failed]


class TestSound:
    @pytest.mark.parametrize("name", ["memory", "pinned"])
    def test_a_sound_connector_passes(self, name: str) -> None:
        report = check_connector(Subject.of(name))
        assert report.passed, shown(report)
        unsaid = {outcome.item for outcome in report.outcomes if outcome.status is Status.NOT_APPLICABLE}
        assert unsaid <= {"peer crash", "silent peer", *(["in-flight read"] if name == "memory" else [])}

    def test_one_that_keeps_kv_passes(self) -> None:
        report = check_connector(Subject.of("offload"))
        assert report.passed, shown(report)
        unsaid = {outcome.item for outcome in report.outcomes if outcome.status is Status.NOT_APPLICABLE}
        peers = {"other layout", "late read", "old epoch", "peer crash", "silent peer"}
        assert unsaid <= {"wrong requests", "in-flight read", *peers}

    def test_a_pair_and_a_store_in_one_pass_too(self) -> None:
        children = ["torpor.testing.connectors:PinnedConnector", "offload"]
        report = check_connector(Subject.of("multi", extra={"connectors": children}), items=HERE)
        assert report.passed, shown(report)

    def test_several_in_one_pass_too(self) -> None:
        report = check_connector(Subject.of("multi", extra=MULTI), items=HERE)
        assert report.passed, shown(report)

    @pytest.mark.long
    @pytest.mark.integration
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("name", ["ipc", "nixl", "mooncake", "multi"])
    def test_between_processes(self, name: str) -> None:
        if missing := missing_package(name):
            pytest.skip(missing)
        extra = {"connectors": ["ipc", "torpor.testing.connectors:PinnedConnector"]} if name == "multi" else None
        report = check_connector(Subject.of(name, extra=extra))
        assert report.passed, shown(report)
        assert all(outcome.status is Status.PASSED for outcome in report.outcomes), shown(report)

    def test_e4_one_that_does_not_declare_support_is_refused_and_not_asked_further(self) -> None:
        report = check_connector(Subject.of("torpor.testing.connectors:UnsupportedConnector"))
        assert report.passed, shown(report)
        by_name = {outcome.item: outcome for outcome in report.outcomes}
        assert "refused" in by_name["refusal"].reason
        assert by_name["follow"].status is Status.NOT_APPLICABLE
        assert "supports_sleep_mode" in by_name["follow"].reason


class TestFaults:
    def test_there_is_a_fault_for_every_item(self) -> None:
        assert {mutant.item for mutant in MUTANTS} == {item.name for item in ITEMS}

    @pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.item in HERE], ids=lambda m: m.name)
    def test_it_is_caught(self, mutant: Mutant) -> None:
        assert caught_by(mutant, [mutant.item]) == [mutant.item]

    @pytest.mark.integration
    @pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.item not in HERE], ids=lambda m: m.name)
    def test_it_is_caught_between_processes(self, mutant: Mutant) -> None:
        assert caught_by(mutant, [mutant.item]) == [mutant.item]

    @pytest.mark.long
    @pytest.mark.integration
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
    def test_by_that_item_and_no_other(self, mutant: Mutant) -> None:
        assert caught_by(mutant, None) == [mutant.item]

    def test_a_registration_that_does_not_follow_is_caught_wherever_a_sleep_is(self) -> None:
        report = check_connector(Subject.of(UnfollowedPinned, extra=SOCKETS), items=["follow", "late read", "bytes flat"])
        assert [outcome.status for outcome in report.outcomes] == [Status.FAILED] * 3
        assert all("pinned by this process" in outcome.reason for outcome in report.outcomes), shown(report)


class TestLimits:
    @pytest.mark.usefixtures("interruptible")
    def test_an_interrupt_waits_for_the_item_to_end(self) -> None:
        """An interpreter that ends while a thread of it is in native code may abort."""
        ended = threading.Event()

        def interrupted(stage: Stage) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            ended.set()
            return ""

        with pytest.raises(KeyboardInterrupt):
            next(run_items(Subject.of("memory"), [Item("interrupted", "P2", interrupted)]))
        assert ended.is_set()

    def test_an_item_that_hangs_has_failed(self) -> None:
        ended = threading.Event()

        def hangs(stage: Stage) -> str:
            ended.wait()
            return ""

        begun = time.monotonic()
        (outcome,) = run_items(Subject.of("memory"), [Item("hangs", "P2", hangs, limit_s=0.2)])
        assert time.monotonic() - begun < 5
        assert outcome.status is Status.FAILED
        assert "has not ended after" in outcome.reason
        ended.set()

    def test_what_an_item_raises_is_its_failure_with_its_place(self) -> None:
        def raises(stage: Stage) -> str:
            raise ZeroDivisionError("of the suite itself")

        (outcome,) = run_items(Subject.of("memory"), [Item("raises", "P2", raises)])
        assert outcome.status is Status.FAILED
        assert "ZeroDivisionError: of the suite itself" in outcome.reason
        assert "test_connectors_suite.py" in outcome.reason

    def test_nothing_shown_is_not_conforming(self) -> None:
        report = check_connector(Subject.of("memory"), items=["peer crash"])
        assert not report.passed
        assert not report.failed


class TestPatience:
    def test_limits_are_so_many_times_longer(self) -> None:
        item = Item("dawdles", "P2", lambda stage: time.sleep(0.5) or "", limit_s=0.2)
        outcomes = [next(run_items(Subject.of("memory", patience=patience), [item])) for patience in (1, 20)]
        assert [outcome.status for outcome in outcomes] == [Status.FAILED, Status.PASSED]
        assert outcomes[0].reason.startswith("it has not ended after 0 s")

    def test_the_engines_deadlines_are_longer_too_and_those_that_were_given_stay(self) -> None:
        usual, slow = (Subject.of("ipc", patience=patience).config("both", "E", "/nonexistent") for patience in (1, 3))
        assert slow.withdraw_timeout_s == 3 * usual.withdraw_timeout_s
        assert slow.lease_heartbeat_s == 3 * usual.lease_heartbeat_s
        given = Subject.of("ipc", patience=3, settings={"withdraw_timeout_s": 0.5}).config("both", "E", "/nonexistent")
        assert given.withdraw_timeout_s == 0.5

    def test_engines_of_other_processes_have_it_too(self) -> None:
        assert Subject.from_wire(json.loads(json.dumps(Subject.of("ipc", patience=2.5).to_wire()))).patience == 2.5

    @pytest.mark.parametrize("patience", [0, 0.5, -1, float("inf"), float("nan")])
    def test_less_than_usual_is_refused(self, patience: float) -> None:
        with pytest.raises(ConfigurationError, match="patience") as caught:
            Subject.of("memory", patience=patience)
        assert caught.value.fields["setting"] == "patience"

    @pytest.mark.parametrize(
        "mutant", [m for m in MUTANTS if m.item in ("double sleep", "bytes flat", "late read")], ids=lambda m: m.name
    )
    def test_a_fault_is_caught_all_the_same(self, mutant: Mutant) -> None:
        subject = Subject.of(mutant.kind, extra=mutant.extra, patience=5)
        assert [outcome.item for outcome in check_connector(subject, items=[mutant.item]).failed] == [mutant.item]

    @pytest.mark.integration
    def test_an_owner_has_a_process_of_its_own(self) -> None:
        """The kernel counts pins by process."""

        def where(stage: Stage) -> str:
            apart = stage.pair()
            found = ["here" if isinstance(engine, EngineHere) else "apart" for engine in apart]
            stage.close()
            return ", ".join(found + ["here" if isinstance(engine, EngineHere) else "apart" for engine in stage.pair(here=True)])

        found = [next(run_items(Subject.of(name), [Item("where", "P4a", where)])).reason for name in ("ipc", "memory")]
        assert found == ["apart, here, here, here", "here, here, here, here"]


FREED_MEMORY = """
import ctypes
from torpor.testing.connectors.vitals import resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resident_bytes()
pieces = [libc.malloc(ctypes.c_size_t(64 << 10)) for _ in range(256)]
for piece in pieces:
    ctypes.memset(piece, 1, 64 << 10)
used = resident_bytes()
for piece in pieces[:-1]:  # the last keeps the heap from shrinking by itself
    libc.free(piece)
print(used - before, resident_bytes() - before)
"""


class TestVitals:
    def test_memory_that_was_freed_is_not_resident(self) -> None:
        """The C library keeps it, up to what it may need again. A process of its own: other tests' threads free some, too."""
        if not hasattr(ctypes.CDLL(None), "malloc_trim"):
            pytest.skip("this C library takes nothing back")
        ended = subprocess.run([sys.executable, "-c", FREED_MEMORY], capture_output=True, text=True, timeout=60, check=True)
        used, freed = map(int, ended.stdout.split())
        assert used > 15 << 20
        assert freed < 4 << 20


class TestSilentOwners:
    """What comes from a store whose engine was stopped while it kept a prompt is the beginning of it."""

    def stage(self) -> MagicMock:
        stage = MagicMock()
        stage.patient.side_effect = lambda seconds: seconds
        return stage

    def reader(self, right_blocks: int) -> MagicMock:
        d = MagicMock()
        d.call.side_effect = lambda name, *args, **kwargs: {"read": "recving", "blocks_asked": 1, "sums": [0]}[name]
        d.has.side_effect = lambda prompt, blocks: len(blocks) <= right_blocks
        d.sleep.return_value = {"held": 0}
        return d

    def test_the_beginning_of_a_prompt_is_enough_if_it_is_right(self) -> None:
        items_peers._silent_owner(self.stage(), MagicMock(), self.reader(right_blocks=1))

    def test_wrong_bytes_are_caught(self) -> None:
        with pytest.raises(Failure, match="wrong bytes"):
            items_peers._silent_owner(self.stage(), MagicMock(), self.reader(right_blocks=0))


class TestCommand:
    def run(self, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check-connector", *arguments])
        logging.disable(logging.NOTSET)
        return int(ended.value.code or 0), capsys.readouterr().out

    def test_a_table_with_a_row_for_every_item(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, text = self.run("memory", "--only", "double sleep", "--only", "peer crash", capsys=capsys)
        assert status == 0
        assert "memory: conforms" in text
        assert re.search(r"double sleep +M9 +passed", text)
        assert re.search(r"peer crash +P2 P5 +not applicable .*its reach is 'process'", text)

    def test_a_failure_ends_with_1_and_says_why(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, text = self.run("faulty_moves:OnceOnly", "--only", "double sleep", "--json", capsys=capsys)
        (outcome,) = json.loads(text)
        assert (status, outcome["status"]) == (1, "failed")
        assert "released already" in outcome["reason"]

    def test_options_are_json_where_they_read_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        only = ["--only", "own buffers"]
        assert self.run("pinned", "--option", "read_timeout_s=5", *only, capsys=capsys)[0] == 0
        assert self.run("pinned", "--option", "read_timeout_s=soon", *only, capsys=capsys)[0] == 2

    def test_without_its_package_it_ends_with_2_and_says_what_to_install(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for package in agents.PACKAGES:
            monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SystemExit) as ended:
            main(["check-connector", "nixl"])
        logging.disable(logging.NOTSET)
        assert ended.value.code == 2
        assert "pip install 'torpor[nixl]'" in " ".join(capsys.readouterr().err.split())

    def test_settings_of_the_engines_are_given_and_checked(self, capsys: pytest.CaptureFixture[str]) -> None:
        only = ["--only", "own buffers"]
        assert self.run("pinned", "--setting", "withdraw_timeout_s=2", "--patience", "2", *only, capsys=capsys)[0] == 0
        for wrong in (["--setting", "colour=red"], ["--setting", "engine_id=E"], ["--patience", "0.5"]):
            assert self.run("pinned", *wrong, *only, capsys=capsys)[0] == 2

    def test_a_class_that_is_not_there_ends_with_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("no.such:Thing", capsys=capsys)[0] == 2

    def test_what_every_item_looks_at(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, text = self.run("ipc", "--explain", capsys=capsys)
        assert status == 0
        assert all(item.name in text for item in ITEMS)


class TestSubject:
    def test_a_class_that_others_cannot_import_is_refused(self) -> None:
        class Local(PinnedConnector):
            pass

        with pytest.raises(ConfigurationError, match="top of a module"):
            Subject.of(Local)

    def test_an_unknown_item_lists_the_known(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no item is called dreams; known: refusal, placement"):
            check_connector(Subject.of("memory"), items=["dreams"])

    def test_an_unknown_connector_is_an_error(self) -> None:
        with pytest.raises(ConnectorError):
            Subject.of("carrier pigeon")

    def test_every_item_says_what_it_proves(self) -> None:
        assert all(item.says and item.proves for item in ITEMS)
