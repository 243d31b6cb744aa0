"""Which driver ``auto`` is on this machine."""

from __future__ import annotations

from torpor._native import Device
from torpor.errors import ConfigurationError, DeviceError
from torpor.memory.tensors import torch_sees_gpus


def choose_driver(name: str, ordinal: int = 0) -> str:
    """``name``, or for ``auto``: "cuda" where the driver has such a device and torch was built to use it, else "host"."""
    if name != "auto":
        return name
    try:
        Device.open("cuda", ordinal).close()
    except (ConfigurationError, DeviceError):
        return "host"
    return "cuda" if torch_sees_gpus() else "host"


def open_device(driver: str, ordinal: int) -> Device:
    """ConfigurationError when there is no such device here, with the settings that asked for it."""
    try:
        return Device.open(driver, ordinal)
    except ConfigurationError as error:
        numbered = f"device {ordinal}" in error.message
        asked = {"setting": "device", "value": ordinal} if numbered else {"setting": "driver", "value": driver}
        raise ConfigurationError(f"memory driver {driver!r}: {error.message}", **{**asked, **error.fields}) from error
