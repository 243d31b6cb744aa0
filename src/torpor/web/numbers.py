"""Numbers of a front door's configuration, checked before anything is loaded: at work they would be a busy loop, a pool in which
nothing fits, or an error of the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torpor.errors import ConfigurationError


def check_above_zero(config: Any, settings: Iterable[str]) -> None:
    """ConfigurationError for the first setting that is not more than 0. Infinity is: it means never."""
    for setting in settings:
        value = getattr(config, setting)
        if not value > 0:
            raise ConfigurationError(f"{setting} is {value}, it must be more than 0", setting=setting, value=value)


def check_finite(config: Any, settings: Iterable[str]) -> None:
    """ConfigurationError for the first setting that is not a number from 0 on."""
    for setting in settings:
        value = getattr(config, setting)
        if not math.isfinite(value) or value < 0:
            raise ConfigurationError(f"{setting} is {value}, it must be a number, 0 or more", setting=setting, value=value)
