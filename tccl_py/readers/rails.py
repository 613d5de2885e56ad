"""Rails: which NICs of unlike hosts reach each other, by a file's names or by NICs' subnets.

    rails:                          # the NICs on each rail: NIC on all hosts, or HOST:NIC
      first: [mlx5_0]
      second: [node1:mlx5_3, node2:mlx5_1]

Rails are numbered in their order. A NIC that no rail has is on one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Interface

from tccl_py.errors import require
from tccl_py.model.cluster import shown
from tccl_py.model.machine import Machine

Rails = Mapping[str, Sequence[str]]
"""The NICs of each rail by the rail's name, as in a file."""


def rails_by_name(
    rails: Rails, machines: Mapping[str, Machine], *, where: str
) -> dict[str, tuple[int, ...]]:
    """Return the rail of each NIC by host.

    Raises InputError: a name that no host has, a NIC on two rails, or two of a host on one.
    """
    unknown = {(rail, name) for rail, names in rails.items() for name in names}
    numbers = {}
    for host, machine in machines.items():
        of_nic: dict[int, str] = {}
        for nic in machine.nics:
            mine = {f"{host}:{name}" for name in (nic.name, nic.id)} | {nic.name, nic.id}
            for rail, names in rails.items():
                place = f"{where} rails.{rail}"
                if not (found := mine.intersection(names)):
                    continue
                unknown -= {(rail, name) for name in found}
                other = of_nic.get(nic.index, rail)
                fault = f"has {shown(nic.name)} of {host}, which rail {other} has"
                require(other == rail, place, fault, "a NIC is on one rail")
                fault = f"has two NICs of {host}"
                require(rail not in of_nic.values(), place, fault, "a host has one NIC on a rail")
                of_nic[nic.index] = rail
        numbers[host] = _numbered(machine, {n: list(rails).index(of_nic[n]) for n in of_nic})
    rail, name = min(unknown, default=("", ""))
    fault = f"names {shown(name)}, which no host of the job has"
    right = "a NIC is named as in NCCL_IB_HCA, without the port"
    require(not unknown, f"{where} rails.{rail}", fault, right)
    return numbers


def rails_of_subnets(
    addresses: Mapping[str, Mapping[int, str]], machines: Mapping[str, Machine]
) -> dict[str, tuple[int, ...]]:
    """Return the rail of each NIC by host, where each rail is a subnet; {} if subnets tell none.

    They tell none where a host has two NICs in a subnet, or a subnet has some of the hosts alone,
    as where routers join subnets.
    """
    subnets: dict[object, dict[str, int]] = {}
    for host, nics in addresses.items():
        for nic, text in nics.items():
            # An interface without an address of IPv4 has none.
            members = subnets.setdefault(IPv4Interface(text).network, {}) if "." in text else {}
            if members.setdefault(host, nic) != nic:
                return {}
    rails = sorted((on for on in subnets.values() if len(on) > 1), key=lambda on: min(on.values()))
    if not rails or any(on.keys() != machines.keys() for on in rails):
        return {}
    return {
        host: _numbered(machine, {on[host]: rail for rail, on in enumerate(rails)})
        for host, machine in machines.items()
    }


def _numbered(machine: Machine, on: Mapping[int, int]) -> tuple[int, ...]:
    """Return the rail of each NIC; those without one get numbers that no rail has."""
    return tuple(on.get(nic.index, 1000 + nic.index) for nic in machine.nics)
