"""Errors travel between processes as what they are, and read as attributes."""

from __future__ import annotations

import pytest

from torpor.errors import (
    AsleepError,
    BugError,
    ConfigurationError,
    DeviceMemoryError,
    PeerError,
    RemoteError,
    StateError,
    TorporError,
)


class OfOneModule(PeerError):
    pass


@pytest.mark.parametrize("kind", RemoteError.known().values())
def test_every_class_survives_the_wire(kind: type[TorporError]) -> None:
    error = RemoteError.decode(RemoteError.encode(kind("why", bytes_needed=3, peer="p", state=None)))
    assert type(error) is kind
    assert str(error) == "why"
    assert (error.bytes_needed, error.peer, error.state) == (3, "p", None)


def test_a_modules_own_class_travels_as_its_public_parent() -> None:
    assert type(RemoteError.decode(RemoteError.encode(OfOneModule("gone", peer="d1")))) is PeerError
    assert OfOneModule not in RemoteError.known().values()


def test_foreign_exceptions_are_bugs_and_say_what_they_were() -> None:
    error = RemoteError.decode(RemoteError.encode(KeyError("x")))
    assert type(error) is BugError
    assert error.original == "KeyError"


def test_an_unknown_type_from_a_newer_peer_is_still_an_error() -> None:
    assert type(RemoteError.decode({"type": "Unheard", "message": "m"})) is BugError


def test_fields_that_are_not_there_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="DeviceMemoryError"):
        _ = DeviceMemoryError("short").nothing


def test_whose_fault_shows_in_the_tree() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(AsleepError, StateError)
