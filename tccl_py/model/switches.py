"""The one tree that descriptions of single switches make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.cluster import MAX_HOSTS, SwitchTree, check_host_names, shown

MAX_SWITCHES = 65_536
MAX_LEVELS = 32
MAX_NAMES = 2 * MAX_HOSTS
"""Of hosts and switches that the switches of one file have below them, all together."""


class SwitchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One switch as a file has it: those below it by name; `where` is its place in the file."""

    name: str
    where: str
    hosts: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    uplink_gbps: float | None = None


def joined(
    lines: Sequence[SwitchLine], *, where: str, hosts: Iterable[str] | None = None
) -> SwitchTree:
    """The tree of all these switches, or of those that lead to `hosts`.

    Switches that are below no other are joined by one that has no name.

    Raises:
        InputError: doubled or unknown names, a switch below two others or below itself, a host at
            two switches, too many switches or levels; with `hosts`, as `restricted`.
    """
    if not lines:
        raise InputError(where, "has no switch", "describe one at least")
    if len(lines) > MAX_SWITCHES:
        raise InputError(where, f"has {len(lines)} switches", f"at most {MAX_SWITCHES} are read")
    by_name: dict[str, SwitchLine] = {}
    for line in lines:
        if line.name in by_name:
            what = f"switch {shown(line.name)} is also at {by_name[line.name].where}"
            raise InputError(line.where, what, "describe each switch once")
        by_name[line.name] = line
    above = _above(by_name)
    roots = [name for name in by_name if name not in above]
    _check_levels(by_name, above)
    tops = tuple(_tree(by_name, name) for name in roots)
    tree = tops[0] if len(tops) == 1 else SwitchTree(name="", switches=tops)
    if hosts is not None:
        return restricted(tree, hosts, where=where)
    _check_once(tree, set(tree.all_hosts), where)
    return tree


def restricted(tree: SwitchTree, hosts: Iterable[str], *, where: str = "switch tree") -> SwitchTree:
    """The tree with these hosts only, and without the switches that lead to none of them.

    >>> leaf = SwitchTree(name="leaf", hosts=("a", "b"))
    >>> tree = SwitchTree(name="", switches=(leaf, SwitchTree(name="other", hosts=("c",))))
    >>> restricted(tree, ["b"])
    SwitchTree(name='leaf', hosts=('b',), switches=(), uplink_gbps=None)

    Raises:
        InputError: a host that is not in the tree, is at two of its switches, or is named twice;
            or no host at all.
    """
    names = check_host_names(hosts, where="hosts of the job")
    wanted = set(names)
    if not wanted:
        raise InputError("hosts of the job", "there are none", "name one at least")
    there = set(tree.all_hosts)
    for name in names:
        if name not in there:
            right = "every host of the job must be at one of the switches, named as the job does"
            raise InputError(where, f"host {name} is at no switch", right)
    _check_once(tree, wanted, where)
    kept = _kept(tree, wanted)
    if kept.name == "" and not kept.hosts and len(kept.switches) == 1:
        return kept.switches[0]
    return kept


def _above(by_name: dict[str, SwitchLine]) -> dict[str, str]:
    """The switch above each that has one."""
    above: dict[str, str] = {}
    for line in by_name.values():
        for name in line.switches:
            if name not in by_name:
                what = f"there is no switch {shown(name)}"
                raise InputError(line.where, what, "describe it, or leave it out")
            if name in above:
                what = f"switch {shown(name)} is also below {shown(above[name])}"
                raise InputError(line.where, what, "a switch is below one other at most")
            above[name] = line.name
    return above


def _check_levels(by_name: dict[str, SwitchLine], above: dict[str, str]) -> None:
    """Refuse switches that are below themselves, or below too many."""
    for line in by_name.values():
        name, passed = line.name, {line.name}
        while name in above:
            name = above[name]
            if name in passed:
                what = f"switch {shown(name)} is below itself"
                raise InputError(by_name[name].where, what, "every switch hangs from a root")
            passed.add(name)
            if len(passed) > MAX_LEVELS:
                what = f"switch {shown(line.name)} is below {MAX_LEVELS} others or more"
                raise InputError(line.where, what, f"at most {MAX_LEVELS} levels are read")


def _tree(by_name: dict[str, SwitchLine], name: str) -> SwitchTree:
    line = by_name[name]
    return SwitchTree(
        name=name,
        hosts=line.hosts,
        switches=tuple(_tree(by_name, below) for below in line.switches),
        uplink_gbps=line.uplink_gbps,
    )


def _check_once(tree: SwitchTree, wanted: set[str], where: str) -> None:
    """Refuse a wanted host that is at two switches, or at one of them twice."""
    found: dict[str, str] = {}
    for switch in tree.all_switches:
        for host in switch.hosts:
            if host in found and host in wanted:
                both = f"{shown(found[host])} and {shown(switch.name)}"
                what = f"host {host} is at the switches {both}"
                raise InputError(where, what, "a host is at one switch, once")
            found[host] = switch.name


def _kept(switch: SwitchTree, wanted: set[str]) -> SwitchTree:
    below = (_kept(one, wanted) for one in switch.switches)
    return msgspec.structs.replace(
        switch,
        hosts=tuple(host for host in switch.hosts if host in wanted),
        switches=tuple(one for one in below if one.hosts or one.switches),
    )
