"""All mutants: those of every module here that has ``MUTANTS``. What is added needs a test that notices it."""

from __future__ import annotations

import importlib
import pkgutil

import mutants
from mutants.mutant import Mutant

MODULES = sorted(module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name not in ("catalogue", "__main__"))
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for name in MODULES for mutant in getattr(importlib.import_module(f"mutants.{name}"), "MUTANTS", ())
)
