"""What the virtual machine needs of this one: Debian packages, and Debian's kernel, which is unpacked and never installed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kernel import Kernel, KernelError, unpack

# What tells that it is there -> its package. libibverbs-dev and gcc: the tests compile a small helper for bare verbs.
PACKAGES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/bin/busybox": "busybox-static",
    "/usr/bin/rdma": "iproute2",
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "libibverbs1",
    "/usr/lib/x86_64-linux-gnu/librdmacm.so.1": "librdmacm1",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so": "ibverbs-providers",
    "/usr/bin/ibv_devinfo": "ibverbs-utils",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/usr/bin/cc": "gcc",
}
META_PACKAGE = "linux-image-amd64"  # depends on the kernel that is current
APT_LIMIT_S = 420.0

Say = Callable[[str], None]


class CannotPrepare(Exception):
    """Something is missing that cannot be installed from here; says what to do."""


def prepare(cache: Path, say: Say) -> Kernel:
    """Does nothing when everything is there, also without a network. CannotPrepare."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotPrepare(f"the cache folder: {error}; name another with --cache") from error
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(missing_packages(), say)
        return fetch_kernel(cache, say)


def missing_packages() -> list[str]:
    """Also where another release of Debian calls a provider's file differently: its folder is looked for by pattern."""
    missing = [package for path, package in PACKAGES.items() if not Path(path).exists()]
    if any(Path("/usr/lib/x86_64-linux-gnu/libibverbs").glob("librxe-*.so")):
        missing = [package for package in missing if package != "ibverbs-providers"]
    return missing


def install(packages: list[str], say: Say) -> None:
    if not packages:
        return
    wanted = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise CannotPrepare(f"there is no apt-get; install what Debian calls: {wanted}")
    if os.geteuid() != 0:
        raise CannotPrepare(f"installing needs root; run once as root: apt-get install --no-install-recommends {wanted}")
    say(f"installing {wanted}")
    apt("apt-get", "update", "-qq")
    apt("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)


def fetch_kernel(cache: Path, say: Say) -> Kernel:
    """The one in the cache, or else Debian's current one. apt-get download needs no root."""
    found = Kernel.in_cache(cache)
    if found is not None:
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise CannotPrepare("Debian's kernel comes by apt-get and dpkg-deb, and they are not here")
    package = kernel_package()
    say(f"fetching {package}")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        apt("apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", package, folder=folder)
        (deb,) = Path(folder).glob("*.deb")
        say("unpacking it (nothing of it is installed)")
        apt("dpkg-deb", "-x", str(deb), f"{folder}/tree")
        try:
            return unpack(Path(folder) / "tree", cache)
        except KernelError as error:
            raise CannotPrepare(f"{package} cannot be used: {error}") from error


def kernel_package() -> str:
    """What the meta package depends on today."""
    for attempt in (1, 2):
        shown = subprocess.run(["apt-cache", "depends", META_PACKAGE], capture_output=True, text=True, timeout=60).stdout
        found = re.search(r"Depends: (linux-image-\d\S+)", shown)
        if found:
            return found[1]
        if attempt == 1 and os.geteuid() == 0:
            apt("apt-get", "update", "-qq")
    raise CannotPrepare(f"apt-cache knows no {META_PACKAGE}: run apt-get update; only Debian has it")


def apt(*command: str, folder: str | None = None) -> None:
    """CannotPrepare with the last lines it said: no network, a lock that another apt holds, no space."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=APT_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotPrepare(f"{' '.join(command[:3])} did not end within {APT_LIMIT_S:g} s: is there a network?") from error
    if ran.returncode:
        last = "; ".join(ran.stdout.strip().splitlines()[-3:])
        raise CannotPrepare(f"{' '.join(command)} failed: {last} (no network? copy the cache folder from a machine with one)")
