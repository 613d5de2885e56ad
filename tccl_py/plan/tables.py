"""Tables of chains on hosts of a class, kept with a plan: jobs are planned by them, unmeasured.

A table answers each question that planning asked of a class of hosts: the best chains under
settings, the best chains between given NICs, and default NCCL's own chains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_version, decode_json, encode_line, read_text
from tccl_py.model.cluster import NodeClass, shown
from tccl_py.model.machine import parse_gpus
from tccl_py.model.rings import Hop
from tccl_py.nccl.graph_search import DefaultChain
from tccl_py.nccl.network import NicPair, Pairing
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.plan.parts import PlanChain, Rate, plan_chain
from tccl_py.plan.staging import AGAIN, TABLES, check_files, read_manifest

FORMAT_VERSION = 1
MAX_TABLES = 1_024


class ChainSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NIC pairs of the best chains under settings, sorted, with their rate and bound, GB/s.

    `chosen` marks a result of the search over settings.
    """

    pairs: tuple[NicPair, ...]
    rate_gbps: Rate
    bound_gbps: Rate | None = None
    chosen: bool = False


class HostChains(msgspec.Struct, frozen=True, kw_only=True):
    """Chains that share a host, each hop with its rate, and the rate of all together, GB/s.

    `error` is half the 95 % interval, relative.
    """

    chains: tuple[PlanChain, ...]
    rate_gbps: float
    error: float = 0.0
    simulated: bool = False
    assumed: bool = False


class OwnChains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NCCL's own chains on a host, under the variables without which they have no rate.

    `distinct` is the number of different chains; the rest is as of DefaultChoice and HostChains.
    """

    settings: Settings
    distinct: int
    chains: tuple[DefaultChain, ...]
    cross_nic: int
    rate_gbps: Rate
    error: float = 0.0
    assumed: bool = False
    fallback: bool = False


class KeptChains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HostChains; a chain lists numbers of the table's hops, and `gbps` their rates."""

    pairs: tuple[NicPair, ...]
    chains: tuple[tuple[int, ...], ...]
    gbps: tuple[tuple[Rate, ...], ...]
    rate_gbps: Rate
    error: float = 0.0
    assumed: bool = False


class KeptSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that was asked under one choice of settings."""

    settings: Settings
    best: tuple[ChainSet, ...]
    paired: tuple[KeptChains, ...]


class KeptTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a class of hosts and some of its GPUs."""

    node_class: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    simulated: bool
    default_settings: Settings
    stock: OwnChains
    plain: OwnChains | str
    hops: tuple[Hop, ...]
    answers: tuple[KeptSettings, ...]
    notices: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION


class HostTable:
    """A class of hosts with the kept rates of chains on its hosts, and no others.

    `plain` is default NCCL, or the reason why it has no rate; `stock` has the variables without
    which it has none. A search for chains is a table that `measures` further answers.
    """

    measures = False
    cancelled = False
    sets_by_symmetry = 0

    def __init__(self, node_class: NodeClass, kept: KeptTable) -> None:
        self.node_class, self.kept = node_class, kept
        self.gpus, self.nics = kept.gpus, kept.nics
        self.stock, self.plain = kept.stock, kept.plain
        self._best: dict[tuple[Settings, int], ChainSet | None] = {
            (answer.settings, len(one.pairs)): one for answer in kept.answers for one in answer.best
        }
        self._kept = {
            (answer.settings, Pairing(one.pairs)): one
            for answer in kept.answers
            for one in answer.paired
        }
        self._chains: dict[tuple[Settings, Pairing], HostChains | None] = {}

    @cached_property
    def choices(self) -> Sequence[tuple[Settings, ChainSet]]:
        """Settings with the best chains that a search over settings found, best first."""
        first = {settings: at for at, (settings, _) in reversed(list(enumerate(self._best)))}
        found = [(s, one) for (s, _), one in self._best.items() if one and one.chosen]
        return sorted(found, key=lambda one: (-one[1].rate_gbps, first[one[0]]))

    def may_answer(self, settings: Settings, count: int) -> bool:
        """Return whether `best_under` may find chains: they share the channels evenly."""
        known = self._best.get((settings, count)) is not None
        return known or (self.measures and settings.channels % count == 0)

    def best_under(self, settings: Settings, count: int) -> ChainSet | None:
        """Return the best set of so many chains; None if there is none."""
        return self._best.get((settings, count))

    def chains_with(self, settings: Settings, pairing: Pairing) -> HostChains | None:
        """Return the best chains between exactly these NICs; None if there are none."""
        key = settings, pairing
        if key not in self._chains:
            kept = self._kept.get(key)
            self._chains[key] = self.found_chains(*key) if kept is None else self._read(kept)
        return self._chains[key]

    def found_chains(self, _settings: Settings, _pairing: Pairing, /) -> HostChains | None:
        """Return an answer of `chains_with` that is not kept."""
        return None

    def _read(self, kept: KeptChains) -> HostChains:
        rows = zip(kept.chains, kept.gbps, strict=True)
        return HostChains(
            chains=tuple(plan_chain([self.kept.hops[n] for n in row], gbps) for row, gbps in rows),
            rate_gbps=kept.rate_gbps,
            error=kept.error,
            simulated=self.kept.simulated,
            assumed=kept.assumed,
        )

    def all_chains(self) -> Iterator[tuple[Settings, HostChains]]:
        """Yield all chains of the table."""
        for settings, pairing in self._kept:
            found = self.chains_with(settings, pairing)
            assert found is not None
            yield settings, found

    def table(self) -> KeptTable:
        """Return the table with all answers so far."""
        chains = {
            key: found for key in (*self._kept, *self._chains) if (found := self.chains_with(*key))
        }
        best = {key: one for key, one in self._best.items() if one is not None}
        hops: dict[Hop, int] = {}
        answers = tuple(
            KeptSettings(
                settings=settings,
                best=tuple(one for (under, _), one in best.items() if under == settings),
                paired=tuple(
                    _kept_chains(pairing, one, hops)
                    for (under, pairing), one in chains.items()
                    if under == settings
                ),
            )
            for settings in dict.fromkeys(settings for settings, _ in (*best, *chains))
        )
        return msgspec.structs.replace(self.kept, hops=tuple(hops), answers=answers)


def _kept_chains(pairing: Pairing, found: HostChains, hops: dict[Hop, int]) -> KeptChains:
    """Return chains by the numbers of their hops; `hops` takes new ones."""
    return KeptChains(
        pairs=pairing.pairs,
        chains=tuple(
            tuple(hops.setdefault(Hop(*hop.ends, hop.flow), len(hops)) for hop in chain.hops)
            for chain in found.chains
        ),
        gbps=tuple(tuple(hop.gbps for hop in chain.hops) for chain in found.chains),
        rate_gbps=found.rate_gbps,
        error=found.error,
        assumed=found.assumed,
    )


# Files.


def gpus_text(gpus: Sequence[int]) -> str:
    """Return GPUs as a part of a file name, and as an item of --gpus-per-job.

    >>> gpus_text((0, 1, 2, 3)), gpus_text((0, 2, 5)), gpus_text((4,))
    ('0-3', '0+2+5', '4')
    """
    if len(gpus) > 1 and tuple(gpus) == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return "+".join(map(str, gpus))


def table_files(tables: Iterable[KeptTable]) -> dict[str, str]:
    """Return the names of tables' files in a plan's directory, and their texts."""
    return {
        f"{TABLES}/{one.node_class}.{gpus_text(one.gpus)}.json": encode_line(one).decode()
        for one in tables
    }


def kept_files(directory: Path, classes: Iterable[str] | None = None) -> dict[str, str]:
    """Return the texts of tables in a plan's directory, those of some classes (None: all).

    Raises:
        InputError: no manifest, a file is missing or was changed, or there are too many.
    """
    names = [name for name in read_manifest(directory).files if name.startswith(f"{TABLES}/")]
    if len(names) > MAX_TABLES:
        right = f"at most {MAX_TABLES} are possible"
        raise InputError(str(directory / TABLES), f"has {len(names)} tables", right)
    if classes is not None:
        prefixes = {f"{TABLES}/{one}" for one in classes}
        names = [name for name in names if name.rsplit(".", 2)[0] in prefixes]
    check_files(directory, names)
    return {name: read_text(directory / name) for name in names}


def read_tables(directory: Path, classes: Iterable[NodeClass]) -> list[HostTable]:
    """Read the tables of some classes in a plan's directory.

    Raises:
        InputError: as `kept_files`; or a damaged table.
    """
    of_name = {one.name: one for one in classes}
    found = []
    for name, text in kept_files(directory, of_name).items():
        where = str(directory / name)
        kept = _checked(decode_json(text, KeptTable, where=where), of_name, where)
        found.append(HostTable(of_name[kept.node_class], kept))
    return found


def _checked(kept: KeptTable, classes: Mapping[str, NodeClass], where: str) -> KeptTable:
    """Return a table whose parts fit together; paths of a plan made of it are checked again."""
    check_version(kept.format_version, FORMAT_VERSION, where)
    if kept.node_class not in classes:
        raise InputError(where, f"is of class {shown(kept.node_class)}", AGAIN)
    machine = classes[kept.node_class].machine
    known = set(machine.gpu_indices), {nic.index for nic in machine.nics}
    fits = kept.gpus and set(kept.gpus) <= known[0] and set(kept.nics) <= known[1]
    for answer in kept.answers:
        check_settings(answer.settings)
        for one in answer.paired:
            lengths = [len(hops) for hops in one.chains]
            fits = fits and len(lengths) == len(one.pairs) and all(lengths)
            fits = fits and lengths == [len(rates) for rates in one.gbps]
            fits = fits and all(0 <= n < len(kept.hops) for hops in one.chains for n in hops)
    if not fits:
        raise InputError(where, f"does not fit class {shown(kept.node_class)}", AGAIN)
    return kept


# Subsets of GPUs.


def job_gpus(text: str | None, gpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of GPUs of jobs on a host, from a list of counts and sets; all GPUs first.

    A count is of the lowest GPUs; larger counts than a host has are left out. None is all GPUs,
    half of them, a quarter, and one.

    >>> job_gpus(None, range(8))
    [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), (0, 1), (0,)]
    >>> job_gpus("2,4-7,0+2", range(8))[1:]
    [(0, 1), (4, 5, 6, 7), (0, 2)]

    Raises:
        InputError: an item that is neither.
    """
    count = len(gpus)
    found: list[tuple[int, ...]] = [tuple(gpus)]
    if text is None:
        found += [tuple(gpus[:some]) for some in (count // 2, count // 4, 1) if some]
    for item in [] if text is None else map(str.strip, text.split(",")):
        if re.fullmatch("0*[1-9][0-9]{0,3}", item, re.ASCII):
            found += [tuple(gpus[: int(item)])] if int(item) <= count else []
            continue
        try:
            # A number alone would be a count.
            some = parse_gpus(item.replace("+", ",") if set("+-") & set(item) else "")
        except InputError as error:
            what, right = f"{shown(item)} is no number of GPUs and no set", "as 8,4,4-7,0+2"
            raise InputError("--gpus-per-job", what, f"write counts or sets, {right}") from error
        found += [tuple(sorted(some))] if set(some) <= set(gpus) else []
    return list(dict.fromkeys(found))
