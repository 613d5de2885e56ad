"""Which NICs of hosts reach each other: cables between hosts, and rails of unlike hosts.

Both have a part of the YAML form of `tccl_py.readers.switches`:

    ports:                                # the functions of a port, the same on all hosts; optional
      p0: [rocep1s0f0, roceP2p1s0f0]
      p1: [rocep1s0f1, roceP2p1s0f1]
    cables:                               # HOST:PORT, or HOST:NIC for a NIC that no port has
      - [node1:p0, node2:p1]
      - [node2:p0, node3:p1]
      - [node3:p0, node1:p1]

    rails:                                # the NICs on each rail: NIC on all hosts, or HOST:NIC
      first: [mlx5_0]
      second: [node1:mlx5_3, node2:mlx5_1]

Function n of one end of a cable reaches function n of the other, and nothing else. The file may
have hosts outside the job. Rails are numbered in their order, and a NIC that no rail has is on one
of its own. Subnets of NICs tell cables and rails too: NCCL finds by them which NICs reach each
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Interface, IPv4Network
from typing import Annotated

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.model.cluster import Cable, CableEnd, cabled_nics, check_host_name, shown
from tccl_py.model.machine import Machine
from tccl_py.readers.sysfs import PREFIX_BITS, Neighbour

MAX_CABLED = 64
"""Hosts of one ring along cables."""
_MAX_PORTS = 64
_NAMED = 4
_STRANGER = "", 0

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_End = tuple[str, str]


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Cables as a file has them: pairs of (host, port), and the names of each port's NICs."""

    cables: tuple[tuple[_End, _End], ...] = ()
    functions: Mapping[str, tuple[str, ...]] = {}
    where: str = ""


def describe_cables(
    cables: Sequence[tuple[_Text, _Text]], ports: Mapping[str, Sequence[str]], *, where: str
) -> Ports:
    """Return the cables of a file, each port with one cable at most (InputError)."""
    require(len(ports) <= _MAX_PORTS, where, f"has {len(ports)} ports", f"at most {_MAX_PORTS}")
    port_of: dict[str, str] = {}
    for port, names in ports.items():
        require(names, f"{where} ports.{port}", "has no NIC", "name its functions")
        for name in names:
            if name in port_of:
                fault = f"NIC {shown(name)} is a function of {port_of[name]} too"
                raise InputError(f"{where} ports.{port}", fault, "a NIC belongs to one port")
            port_of[name] = port
    used: dict[_End, int] = {}
    ends_of: list[tuple[_End, _End]] = []
    for number, texts in enumerate(cables):
        place = f"{where} cables[{number}]"
        ends = _end(texts[0], port_of, place), _end(texts[1], port_of, place)
        if ends[0][0] == ends[1][0]:
            raise InputError(place, "leads from a host to itself", "a cable joins two hosts")
        for end in ends:
            if end in used:
                fault = f"port {':'.join(end)} has the cable of cables[{used[end]}] already"
                raise InputError(place, fault, "a port has one cable")
            used[end] = number
        ends_of.append(ends)
    functions = {port: tuple(names) for port, names in ports.items()}
    return Ports(cables=tuple(ends_of), functions=functions, where=where)


def _end(text: str, port_of: Mapping[str, str], place: str) -> _End:
    host, _, port = text.rpartition(":")
    require(host and port, place, f"{shown(text)} is no end of a cable", "write HOST:PORT")
    check_host_name(host, where=place)
    if port in port_of:
        right = f"name port {port_of[port]}: its functions share the cable"
        raise InputError(place, f"{shown(text)} names one function of a port", right)
    return host, port


def cables_of(ports: Ports, machines: Mapping[str, Machine]) -> tuple[Cable, ...]:
    """Return the cables between these hosts, with NICs by index.

    Raises InputError: a port that a host has not, ends of unlike numbers of functions, a host
    without a cable, or too many hosts.
    """
    hosts = len(machines)
    right = f"at most {MAX_CABLED} are joined by cables"
    require(hosts <= MAX_CABLED or not ports.cables, ports.where, f"is for {hosts} hosts", right)
    cables = []
    used: dict[tuple[str, int], int] = {}
    for number, ends in enumerate(ports.cables):
        if all(host in machines for host, _ in ends):
            place = f"{ports.where} cables[{number}]"
            one, other = (
                CableEnd(host, _nics(ports, host, port, machines[host], place))
                for host, port in ends
            )
            fault = f"joins ports of {len(one.nics)} and {len(other.nics)} functions"
            require(len(one.nics) == len(other.nics), place, fault, "both ends have as many")
            for end in [(near.host, nic) for near in (one, other) for nic in near.nics]:
                if (before := used.setdefault(end, number)) != number:
                    fault = f"N{end[1]} of {end[0]} has the cable of cables[{before}] already"
                    raise InputError(place, fault, "a port has one cable")
            cables.append(Cable((one, other)))
    near: dict[str, set[str]] = defaultdict(set)
    for host, _, (neighbour, _) in cabled_nics(cables):
        near[host].add(neighbour)
    least = min(2, hosts - 1) if ports.cables else 0
    few = sorted(host for host in machines if len(near[host]) < least)
    lead = "two cables lead from other hosts" if least > 1 else "cable leads from another host"
    fault = f"no {lead} of the job to {', '.join(few[:_NAMED])}"
    named = {host for ends in ports.cables for host, _ in ends}
    if others := sorted(named - machines.keys()):
        fault += f"; the file has {', '.join(others[:_NAMED])} besides"
    require(not few, ports.where, fault, "a ring needs two ways to each host, of two hosts one")
    return tuple(cables)


def _nics(ports: Ports, host: str, port: str, machine: Machine, place: str) -> tuple[int, ...]:
    index_of = {name: nic.index for nic in machine.nics for name in (nic.id, nic.name)}
    names = ports.functions.get(port, (port,))
    for name in names:
        if name not in index_of:
            has = ", ".join(nic.name for nic in machine.nics[:8]) or "none"
            fault = f"host {host} has no port or NIC {shown(name)}"
            raise InputError(
                place, fault, f"its RDMA NICs are {has}; ports: names ports of several"
            )
    nics = tuple(index_of[name] for name in names)
    twice = f"names a NIC of {host} twice in port {port}"
    require(len({*nics}) == len(nics), place, twice, "a function is in its port once")
    return nics


# Cables as the addresses of NICs tell.


Addresses = Mapping[str, Mapping[int, str]]
"""The address of each NIC by host, as `10.0.1.1/24`; an interface without an address has none."""


def cables_of_subnets(addresses: Addresses) -> tuple[Cable, ...]:
    """Return the cables between NICs of three hosts or more, where each has a subnet of its own.

    There are none where a subnet joins more than two hosts, as the rails of a switch do. Functions
    of a port may share the subnet of their cable, as many at both ends.

    >>> ends = {"a": ["10.0.1.1/24", "10.0.3.1/24"], "b": ["10.0.1.2/24", "10.0.2.1/24"]}
    >>> ends["c"] = ["10.0.2.2/24", "10.0.3.2/24"]
    >>> cables = cables_of_subnets({host: dict(enumerate(each)) for host, each in ends.items()})
    >>> [[(end.host, end.nics) for end in cable.ends] for cable in cables]
    [[('a', (0,)), ('b', (0,))], [('a', (1,)), ('c', (1,))], [('b', (1,)), ('c', (0,))]]
    """
    joined = [ends for ends in _by_subnet(addresses).values() if len(ends) > 1]
    pairs = [ends for ends in joined if len(ends) == 2 and len({*map(len, ends.values())}) == 1]
    hosts = {host for ends in pairs for host in ends}
    if len(addresses) < 3 or len(pairs) < len(joined) or hosts != addresses.keys():
        return ()
    return tuple(
        Cable.between(a, nics, b, others)
        for (a, nics), (b, others) in (ends.items() for ends in pairs)
    )


def _by_subnet(addresses: Addresses) -> dict[IPv4Network, dict[str, list[int]]]:
    """Return the NICs in each subnet, by host."""
    members: dict[IPv4Network, dict[str, list[int]]] = defaultdict(dict)
    for host, nics in addresses.items():
        for nic, text in sorted(nics.items()):
            if (address := _interface(text)) is not None:
                members[address.network].setdefault(host, []).append(nic)
    return members


def check_no_cables(addresses: Addresses, *, where: str) -> None:
    """Check that hosts of which no cable is known may be at a switch.

    Raises InputError: of three hosts or more no subnet has more than two, and one has two.
    """
    joined = [ends for ends in _by_subnet(addresses).items() if len(ends[1]) > 1]
    if len(addresses) > 2 and joined and all(len(ends) == 2 for _, ends in joined):
        network, pair = joined[0]
        alone = sorted(addresses.keys() - {host for _, ends in joined for host in ends})
        fault = f"{' and '.join(pair)} share {network}, as by a cable"
        fault += f", and {', '.join(alone[:_NAMED])} share no subnet" if alone else ""
        raise InputError(where, fault, "name the cables, or the switch, in a file for `switches`")


def used_functions(cables: Iterable[Cable], addresses: Addresses) -> tuple[Cable, ...]:
    """Return cables with those functions that NCCL finds: of a subnet the first.

    By subnet-aware routing it sends by the first NIC in the subnet of the other end.
    """
    return tuple(_with_functions(cable, addresses) for cable in cables)


def _with_functions(cable: Cable, addresses: Addresses) -> Cable:
    one, other = cable.ends
    kept: dict[object, tuple[int, int]] = {}
    for near, far in zip(one.nics, other.nics, strict=True):
        address = _interface(addresses.get(one.host, {}).get(near, ""))
        kept.setdefault(address.network if address else near, (near, far))
    nears, fars = zip(*kept.values(), strict=True)
    return Cable.between(one.host, nears, other.host, fars)


def doubts_of_addresses(addresses: Addresses) -> Iterator[str]:
    """Yield what NCCL makes of addresses that do not tell functions or cables apart."""
    subnets = _by_subnet(addresses).items()
    local = [network for network, ends in subnets if network.is_link_local and len(ends) > 1]
    if local:
        yield (
            f"NICs have link-local addresses ({local[0]}), which tell no cable and are one subnet "
            "to NCCL: give the ends of each cable a /24 of their own"
        )
    shared = [
        " and ".join(ends)
        for network, ends in subnets
        if network not in local and len(ends) == 2 and min(map(len, ends.values())) > 1
    ]
    if shared:
        yield (
            f"functions of a port share a subnet on the cable of {'; '.join(shared[:_NAMED])}: "
            "NCCL sends all by the first of them. For all of the port give each pair of functions "
            "a subnet of its own: a /24 each, or a /25 each of the cable's /24"
        )


Heard = Mapping[str, Mapping[int, tuple[str, Sequence[Neighbour]]]]
"""The interface of each NIC by host, and the ports that it hears."""


def cables_of_lldp(heard: Heard) -> tuple[Cable, ...]:
    """Return the cables between hosts of which ports hear each other, and nothing else.

    Functions of a port hear all of the far port's, and are joined in order. There are none where
    anything else is heard, as a switch is, or a host is joined to none.
    """
    nic_of = {
        (_short(host), interface): (host, nic)
        for host, nics in heard.items()
        for nic, (interface, _) in nics.items()
    }
    far_of = {
        (host, nic): frozenset(
            nic_of.get((_short(port.system), port.port), _STRANGER) for port in ports
        )
        for host, nics in heard.items()
        for nic, (_, ports) in nics.items()
        if ports
    }
    cables = set[Cable]()
    for far in set(far_of.values()):
        near = frozenset(end for end, ends in far_of.items() if ends == far)
        sides = sorted((sorted(near), sorted(far)))
        hosts = [{host for host, _ in side} for side in sides]
        equal = len(near) == len(far) and {far_of.get(end) for end in far} == {near}
        if not equal or hosts[0] == hosts[1] or sum(map(len, hosts)) != len(hosts):
            return ()
        (a, nics), (b, others) = ((side[0][0], [nic for _, nic in side]) for side in sides)
        cables.add(Cable.between(a, nics, b, others))
    joined = {end.host for cable in cables for end in cable.ends}
    ordered = sorted(cables, key=lambda cable: [(end.host, end.nics) for end in cable.ends])
    return tuple(ordered) if joined == heard.keys() else ()


def _short(name: str) -> str:
    """Return a host's name as both LLDP and a job have it."""
    return name.partition(".")[0].lower()


def subnet_prefix(cables: Sequence[Cable], addresses: Addresses, *, where: str) -> int | None:
    """Return the bits that NCCL has to compare (None: its own); InputError: ends in two subnets."""
    members: dict[IPv4Network, set[int]] = defaultdict(set)
    pairs: dict[IPv4Network, set[str]] = {}
    for host, nic, (other, far) in cabled_nics(cables):
        texts = addresses.get(host, {}).get(nic, ""), addresses.get(other, {}).get(far, "")
        near, away = map(_interface, texts)
        if near is None or away is None:
            continue
        fault = f"joins N{nic} of {host}, which is {near}, and N{far} of {other}, {away}"
        right = "give the ends of a cable addresses in one subnet"
        require(near.network == away.network, f"{where}, a cable that", fault, right)
        joined = pairs.setdefault(near.network, {host, other})
        fault = f"{near.network} is on cables of {', '.join(sorted(joined | {host, other}))}"
        require(joined == {host, other}, where, fault, "give each cable a subnet of its own")
        members[near.network] |= {int(near.ip), int(away.ip)}

    def tells(bits: int) -> bool:
        heads = [{address >> (32 - bits) for address in each} for each in members.values()]
        return len(set.union(*heads)) == len(heads) == sum(map(len, heads))

    if not members or tells(PREFIX_BITS):
        return None
    lengths = sorted({network.prefixlen for network in members}, reverse=True)
    return next(filter(tells, lengths), None)


def _interface(text: str) -> IPv4Interface | None:
    """Return an IPv4 address with its network; None for any other text."""
    return IPv4Interface(text) if "." in text else None


# Rails.


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
        numbers[host] = _rail_numbers(machine, {n: list(rails).index(of_nic[n]) for n in of_nic})
    rail, name = min(unknown, default=("", ""))
    fault = f"names {shown(name)}, which no host of the job has"
    right = "a NIC is named as in NCCL_IB_HCA, without the port"
    require(not unknown, f"{where} rails.{rail}", fault, right)
    return numbers


def rails_of_subnets(
    addresses: Addresses, machines: Mapping[str, Machine]
) -> dict[str, tuple[int, ...]]:
    """Return the rail of each NIC by host, where each rail is a subnet; {} if subnets tell none.

    They tell none where a host has two NICs in a subnet, or a subnet has some of the hosts alone,
    as where routers join subnets.
    """
    subnets = list(_by_subnet(addresses).values())
    joined = [on for on in subnets if len(on) > 1]
    several = any(len(nics) > 1 for on in subnets for nics in on.values())
    if several or not joined or any(on.keys() != machines.keys() for on in joined):
        return {}
    rails = sorted(joined, key=lambda on: min(on.values()))
    return {
        host: _rail_numbers(machine, {on[host][0]: rail for rail, on in enumerate(rails)})
        for host, machine in machines.items()
    }


def _rail_numbers(machine: Machine, on: Mapping[int, int]) -> tuple[int, ...]:
    """Return the rail of each NIC; those without one get numbers that no rail has."""
    return tuple(on.get(nic.index, 1000 + nic.index) for nic in machine.nics)
