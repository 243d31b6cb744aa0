"""What a server's front end imports while its core loads: a web framework and a tokenizer, two seconds and more."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def import_early(*, without_torch: bool) -> None:
    """On a thread of its own; what goes wrong shows where it is imported in earnest. ``without_torch``: this process will do
    with transformers' tokenizers."""

    def run() -> None:
        with suppress(Exception):
            importlib.import_module("torpor.server.app")
            with torch_hidden(without_torch):
                importlib.import_module("torpor.engine.tokenizer_classes")

    threading.Thread(target=run, name="torpor-imports", daemon=True).start()


@contextmanager
def torch_hidden(hide: bool) -> Iterator[None]:
    """Where torch is not installed, transformers has tokenizers only, and imports in 1 s instead of 3. It decides so once per
    process, when it is imported: for processes that are all ours."""
    if not hide or "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch was not found
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
