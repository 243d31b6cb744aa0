"""scripts/rdma-vm without a virtual machine: what goes into one, and what it says where it cannot be had."""

from __future__ import annotations

import runpy
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODULES = ("kernel", "mounts", "host", "initramfs", "machine")
SIGNATURE = b"~Module signature appended~\n"


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its modules, by their names, and the names of its main module."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "rdma_vm"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    main = runpy.run_path(str(SCRIPTS / "rdma_vm" / "__main__.py"), run_name="rdma_vm")
    return {**main, **{name: sys.modules.pop(name) for name in MODULES}}


def module(depends: str, signature: bytes = b"") -> bytes:
    """As much of a kernel module as is looked at."""
    plain = b"\x7fELF code\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0"
    if not signature:
        return plain
    return plain + signature + struct.pack(">8xI", len(signature)) + SIGNATURE


def test_a_signature_is_cut_off(vm: dict[str, Any]) -> None:
    kernel = vm["kernel"]
    assert kernel.unsigned(module("a", b"signed by somebody")) == module("a")
    assert kernel.unsigned(module("a")) == module("a")


@pytest.mark.parametrize(("written", "found"), [("", []), ("a", ["a"]), ("ib_core,udp-tunnel", ["ib_core", "udp_tunnel"])])
def test_dependencies_are_read_off_a_module(vm: dict[str, Any], written: str, found: list[str]) -> None:
    assert vm["kernel"].dependencies(module(written)) == found


def test_dependencies_are_loaded_first(vm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = vm["kernel"]
    monkeypatch.setattr(kernel, "MODULES", ("rxe", "dummy"))
    (tmp_path / "new").mkdir()
    found = {}
    for name, depends in {"rxe": "ib_core,udp-tunnel", "ib_core": "", "udp-tunnel": "ib_core", "dummy": ""}.items():
        found[name] = tmp_path / f"{name}.ko"
        found[name].write_bytes(module(depends, b"signed"))
    order = kernel.load_order(found, "", tmp_path / "new")
    assert order == ["ib_core", "udp_tunnel", "rxe", "dummy"]
    assert (tmp_path / "new" / "udp_tunnel.ko").read_bytes() == module("ib_core")


def test_a_module_that_is_built_in_is_left_out_and_one_that_is_missing_is_named(
    vm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = vm["kernel"]
    monkeypatch.setattr(kernel, "MODULES", ("virtio_pci",))
    assert kernel.load_order({}, "kernel/drivers/virtio/virtio-pci.ko\n", tmp_path) == []
    with pytest.raises(kernel.KernelError, match="no module virtio_pci"):
        kernel.load_order({}, "kernel/drivers/other.ko\n", tmp_path)


def test_the_archive_is_read_by_cpio_s_rules(vm: dict[str, Any]) -> None:
    """Header of 110 characters, name and content padded to four."""
    record = vm["initramfs"].record(7, "etc/hosts", 0o100644, b"12345")
    fields = [int(record[6 + 8 * i : 14 + 8 * i], 16) for i in range(13)]
    assert record[:6] == b"070701"
    assert (fields[0], fields[1], fields[6], fields[11]) == (7, 0o100644, 5, len("etc/hosts") + 1)
    assert record[110:120] == b"etc/hosts\0"
    assert record[120:] == b"12345\0\0\0"
    assert len(record) % 4 == 0


def test_a_folder_inside_another_is_not_mounted_twice(vm: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    mounts = vm["mounts"].mounts_for(tmp_path, [tmp_path / "inside"], [tmp_path / "inside"])
    found = {(mount.path, mount.writable) for mount in mounts}
    assert found == {(tmp_path, False), (Path("/usr"), False), (tmp_path / "inside", True)}
    assert len(mounts) == 3


def test_kvm_is_taken_where_the_processor_s_own_is_there(
    vm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nested machine's kvm_pvm has the device file too, and is many times slower than no KVM."""
    machine = vm["machine"]
    (tmp_path / "kvm").touch()
    (tmp_path / "kvm_amd").mkdir()
    monkeypatch.setattr(machine, "KVM", tmp_path / "kvm")
    monkeypatch.setattr(machine, "KVM_MODULES", (tmp_path / "kvm_intel",))
    assert machine.accelerator("auto") == "tcg"
    monkeypatch.setattr(machine, "KVM_MODULES", (tmp_path / "kvm_intel", tmp_path / "kvm_amd"))
    assert machine.accelerator("auto") == "kvm"
    assert machine.accelerator("tcg") == "tcg"


class TestWhatIsMissing:
    def test_without_apt_the_packages_are_named(self, vm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        host = vm["host"]
        monkeypatch.setattr(host.shutil, "which", lambda name: None)
        with pytest.raises(host.CannotPrepare, match=r"no apt-get; install what Debian calls: qemu-system-x86 busybox-static"):
            host.install(["qemu-system-x86", "busybox-static"], print)

    def test_without_root_the_command_is_named(self, vm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        host = vm["host"]
        monkeypatch.setattr(host.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
        with pytest.raises(host.CannotPrepare, match="run once as root: apt-get install --no-install-recommends rdma-core"):
            host.install(["rdma-core"], print)

    def test_what_apt_said_is_shown(self, vm: dict[str, Any]) -> None:
        host = vm["host"]
        with pytest.raises(host.CannotPrepare, match=r"Could not resolve host.*no network"):
            host.apt("sh", "-c", "echo Could not resolve host; exit 100")

    def test_nothing_is_installed_where_nothing_is_missing(self, vm: dict[str, Any]) -> None:
        vm["host"].install([], lambda what: pytest.fail(what))

    def test_a_kernel_in_the_cache_needs_no_network(
        self, vm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host, kernel = vm["host"], vm["kernel"]
        monkeypatch.setattr(host.shutil, "which", lambda name: None)
        with pytest.raises(host.CannotPrepare, match="apt-get and dpkg-deb"):
            host.fetch_kernel(tmp_path, print)
        (tmp_path / "6.1").mkdir()
        (tmp_path / "6.1" / "modules.json").write_text(
            f'{{"wanted": {list(kernel.MODULES)!r}, "order": ["a"]}}'.replace("'", '"')
        )
        found = host.fetch_kernel(tmp_path, print)
        assert (found.release, found.modules) == ("6.1", ("a",))


def test_help_says_how(tmp_path: Path) -> None:
    ran = subprocess.run([SCRIPTS / "rdma-vm", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--timeout" in ran.stdout
    assert "rxe0" in ran.stdout
