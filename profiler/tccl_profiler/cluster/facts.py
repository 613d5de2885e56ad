"""What a host is, as its agent tells it, and what the hosts of a cluster must have in common."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import msgspec

from tccl_profiler.cluster.interfaces import (
    interface,
    interface_of,
    unused_interfaces,
    with_interfaces,
    with_own_nics,
)
from tccl_py.errors import InputError
from tccl_py.model.knowledge import Fingerprint, Knowledge
from tccl_py.model.machine import Machine
from tccl_py.readers.installed_nccl import installed_nccl
from tccl_py.readers.nvml import VARIABLE, only_gpus, visible_indices

_NONE = "none"
_GPUS = "start ranks where GPUs are, or add --backend host to rehearse on the hosts' memory"


class Software(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions; "none" is what is not there."""

    tccl_py: str
    python: str
    driver: str
    nccl: str


class NicAddress(msgspec.Struct, frozen=True, kw_only=True):
    """By which interface and address a NIC is reached over TCP."""

    interface: str
    address: str


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the cluster; `addresses` are by the index of the NIC, `down` are interfaces."""

    name: str
    machine: Machine
    knowledge: Knowledge
    fingerprint: Fingerprint
    software: Software
    addresses: Mapping[int, NicAddress]
    down: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """What can be measured here, by id: GPUs, and NICs that have an address."""
        gpus = (f"G{index}" for index in self.machine.gpu_indices)
        return (*gpus, *(f"N{index}" for index in sorted(self.addresses)))


def host_facts(
    name: str, *, backend: str, devices: int | None, interfaces: tuple[str, ...]
) -> HostFacts:
    """What this host is.

    Args:
        name: the host's.
        backend: `cuda`, which discovers the machine, or `host`, which has a stand-in for it.
        devices: how many devices the stand-in has.
        interfaces: those to use as NICs; none are the machine's own.

    Raises:
        InputError: no GPU, an interface that is not there, or more; it names the host.
    """
    try:
        machine, knowledge, fingerprint = _discovered(backend, devices)
    except InputError as error:
        raise InputError(f"host {name}: {error.where}", error.what, error.right) from error
    if interfaces:
        machine = with_interfaces(machine, interfaces, host=name)
    addresses: dict[int, NicAddress] = {}
    # Discovery leaves out what is down; another host may have the same interface up.
    down = [] if interfaces else list(unused_interfaces())
    for nic in machine.nics:
        found = interface(interface_of(nic))
        if found is not None and not found.up:
            down.append(found.name)
        elif found is not None and found.address:
            addresses[nic.index] = NicAddress(interface=found.name, address=found.address)
        elif interfaces:
            raise InputError(
                f"host {name}", f"interface {nic.name} has no address", "give it one, or another"
            )
    return HostFacts(
        name=name,
        machine=machine,
        knowledge=knowledge,
        fingerprint=fingerprint,
        software=_software(fingerprint),
        addresses=addresses,
        down=tuple(down),
    )


def _discovered(backend: str, devices: int | None) -> tuple[Machine, Knowledge, Fingerprint]:
    if backend == "cuda":
        from tccl_py.readers.live import discover_machine  # noqa: PLC0415

        try:
            machine, knowledge, fingerprint = discover_machine()
        except InputError as error:
            # What else can be read is no help to the hosts of a job.
            raise InputError(error.where, error.what, _GPUS) from error
        shown = visible_indices(machine, fingerprint.gpu_uuids, os.environ.get(VARIABLE))
        return (*only_gpus(machine, knowledge, shown), fingerprint)
    from tccl_profiler.host.machine import host_fingerprint, host_machine  # noqa: PLC0415

    machine = host_machine(devices, least=1)
    return with_own_nics(machine), Knowledge(), host_fingerprint(machine)


def _software(fingerprint: Fingerprint) -> Software:
    return Software(
        tccl_py=_own_version(),
        python=platform.python_version(),
        driver=fingerprint.driver,
        nccl=found.version if (found := installed_nccl()) is not None else _NONE,
    )


def _own_version() -> str:
    try:
        return metadata.version("tccl-py")
    except metadata.PackageNotFoundError:
        return "not installed"  # run from its source


_ALIKE: tuple[tuple[str, Callable[[Software], str]], ...] = (
    ("tccl-py", lambda one: one.tccl_py),
    # Workers of one version of Python talk to each other by formats of numpy and msgspec only.
    ("the NVIDIA driver", lambda one: one.driver),
    ("NCCL", lambda one: one.nccl),
)


def check_hosts(
    hosts: Sequence[HostFacts],
    *,
    expected: Sequence[str] = (),
    interfaces: Sequence[str] = (),
    addressed: bool = True,
) -> None:
    """Refuse hosts that cannot be one cluster.

    Args:
        hosts: what is there.
        expected: names that a list of hosts gave; empty where there is none.
        interfaces: those that the user named; one that is down is a fault then.
        addressed: whether NICs need addresses for TCP.

    Raises:
        InputError: fewer than two hosts, one too many or too few, versions that differ, a NIC that
            is down; each names the host.
    """
    names = [one.name for one in hosts]
    if expected:
        for name in expected:
            if name not in names:
                raise InputError(
                    f"host {name}",
                    "is in the list of hosts, and no rank runs there",
                    "start a rank on it, or take it out of the list",
                )
        for name in names:
            if name not in expected:
                raise InputError(
                    f"host {name}",
                    "runs a rank and is not in the list of hosts",
                    "add it to the list, or start no rank on it",
                )
    if len(hosts) < 2:
        raise InputError(
            "this MPI job",
            f"has {len(hosts)} host{'s' * (len(hosts) != 1)} ({', '.join(names)})",
            "start ranks on 2 hosts at least, or leave mpirun out",
        )
    _check_software(hosts)
    found = {nic.interface for one in hosts for nic in one.addresses.values()}
    for name in interfaces:
        if name not in found and not any(name in one.down for one in hosts):
            raise InputError(
                f"interface {name[:40]}", "is on no host of this job", f"there are {_list(found)}"
            )
    _check_nics(hosts, named=bool(interfaces), addressed=addressed)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _check_software(hosts: Sequence[HostFacts]) -> None:
    first = hosts[0]
    for what, version in _ALIKE:
        for other in hosts[1:]:
            here, there = version(first.software), version(other.software)
            if here != there:
                raise InputError(
                    f"host {other.name}",
                    f"has {what} {there}, host {first.name} has {here}",
                    "install the same on all hosts",
                )


def _check_nics(hosts: Sequence[HostFacts], *, named: bool, addressed: bool) -> None:
    """A NIC that is down, where the user named it or where another host has it up."""
    up = {nic.interface: one.name for one in hosts for nic in one.addresses.values()}
    for one in hosts:
        for name in one.down:
            if named or name in up:
                elsewhere = f", on host {up[name]} it is up" if name in up else ""
                raise InputError(
                    f"host {one.name}",
                    f"interface {name} is down{elsewhere}",
                    "bring it up, or name the interfaces to use",
                )
        if not addressed and not one.machine.nics:
            raise InputError(f"host {one.name}", "has no NIC", "leave it out of the job")
        if addressed and not one.addresses:
            raise InputError(
                f"host {one.name}",
                "has no NIC with an address that other hosts could reach",
                "bring one up, or name the interfaces to use, as --interfaces eth0",
            )
