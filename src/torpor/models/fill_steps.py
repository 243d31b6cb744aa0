"""How somebody follows the filling of tensors, target by target."""

from __future__ import annotations

from typing import Protocol


class FillSteps(Protocol):
    """Hears of every target that is about to be written and that has been written, on the thread that writes it."""

    def before(self, name: str) -> None:
        """May block until there is memory; what it raises ends the filling."""

    def after(self, name: str) -> None: ...


class NoSteps:
    def before(self, name: str) -> None: ...

    def after(self, name: str) -> None: ...


NO_STEPS = NoSteps()
