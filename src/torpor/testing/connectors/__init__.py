"""The conformance suite of KV connectors, and connectors for tests.

A connector is a class that keeps the contract of ``torpor.connectors.base``. Check one with

    torpor check-connector ipc
    torpor check-connector my_package.my_module:MyConnector --option key=value

or in a test of your own:

    from torpor.testing.connectors import Subject, check_connector

    def test_my_connector():
        report = check_connector(Subject.of(MyConnector, extra={"key": "value"}))
        assert report.passed, report.failed

The class need not be registered, but it must be found again as ``module:Class``, since some items run engines in other processes.
What it is taken for comes from facts it declares: ``supports_sleep_mode`` (without it the suite checks that it is refused, and
what of it does not sleep), ``reach`` (whether engines of other processes, or none, can read what one handed over) and
``finds_by`` (``kv_transfer_params`` or the prompt's tokens). ``{folder}`` in a value of ``extra`` is a folder that is fresh for
every item. ``fail_next`` says how to make the next release or restore of a worker fail as its transport would; the suite knows it
for torpor's own workers.

``ITEMS`` are the items, each with the invariant it proves. An outcome is passed, failed, or not applicable, with the reason.
"""

from torpor.testing.connectors.memory import BUFFER_BYTES, MemoryConnector, MemoryConnectorWorker, UnsupportedConnector
from torpor.testing.connectors.outcomes import Failure, NotApplicable, Outcome, Report, Status
from torpor.testing.connectors.pinned import PinnedConnector, UnfollowedPinned
from torpor.testing.connectors.subject import FOR_TESTS, Subject
from torpor.testing.connectors.suite import ITEMS, Item, check_connector, chosen, run_items

__all__ = [
    "BUFFER_BYTES",
    "FOR_TESTS",
    "ITEMS",
    "Failure",
    "Item",
    "MemoryConnector",
    "MemoryConnectorWorker",
    "NotApplicable",
    "Outcome",
    "PinnedConnector",
    "Report",
    "Status",
    "Subject",
    "UnfollowedPinned",
    "UnsupportedConnector",
    "check_connector",
    "chosen",
    "run_items",
]
