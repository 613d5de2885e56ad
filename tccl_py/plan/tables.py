"""Tables of chains on hosts of a class, kept with a plan: jobs are planned by them, unmeasured.

A table answers each question that planning asked of a class of hosts: the best chains under
settings, the best chains between given NICs, and default NCCL's own chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_version, decode_json, encode_line, pick, read_text
from tccl_py.model.cluster import NodeClass, gpus_text, shown
from tccl_py.model.rings import Hop, Ring
from tccl_py.nccl.graph_search import DefaultRings, default_rings
from tccl_py.nccl.network import NicPair
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.chains import Choice, PlanChain, Rate, plan_chain
from tccl_py.plan.staging import AGAIN, TABLES, check_files, read_manifest

FORMAT_VERSION = 3
MAX_TABLES = 1_024
FORK_CHANNELS = 15
"""The most channels of the TCCL fork: it has 32, less one for NCCL's own, for both."""
NicPairs = tuple[NicPair, ...]
"""The pairs of entry and exit NIC of a host's chains, sorted."""
Most = tuple[float, tuple[str, ...]]
"""A bound, GB/s, and what it assumes."""


def pairs_of(entries: Iterable[int], exits: Iterable[int]) -> NicPairs:
    """Return the NIC pairs of a host's chains, whichever ring takes which.

    >>> pairs_of((1, 0), (0, 1))
    ((0, 1), (1, 0))
    """
    return tuple(sorted(zip(entries, exits, strict=True)))


class KeptChains(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best chains on a host between some NICs."""

    under: int
    """The number of the table's settings."""
    pairs: NicPairs
    chains: tuple[tuple[int, ...], ...]
    """The numbers of the table's hops, by chain."""
    gbps: tuple[tuple[Rate, ...], ...]
    """The rates of these hops."""
    rate_gbps: Rate
    """The rate of all chains together."""
    error: float = 0.0
    """Half the 95 % interval of the rate, relative."""
    assumed: bool = False
    """Whether assumed values lie behind the rate."""
    bound_gbps: Rate | None = None
    """What no chains exceed: as many under the settings if these are the best, else between the
    NICs."""
    bound_assumptions: tuple[str, ...] = ()
    best: bool = False
    """Whether these are the best of so many chains under the settings."""
    chosen: bool = False
    """Whether they are a result of the search over settings."""


class KeptTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a class of hosts and some of its GPUs."""

    node_class: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    simulated: bool
    dry_run: bool = False
    default_settings: Settings
    rated_default: Choice
    """NCCL's own chains under the variables without which they have no rate."""
    default: Choice
    """Default NCCL, with the reason where it has no rate."""
    railed: Choice | None = None
    """NCCL's own chains with NCCL_CROSS_NIC=0, where hosts are on rails."""
    settings: tuple[Settings, ...] = ()
    hops: tuple[Hop, ...] = ()
    answers: tuple[KeptChains, ...] = ()
    closed: KeptChains | None = None
    """The best ring that closes inside the host, for the TCCL fork; without NICs."""
    notices: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION


class ClassRates:
    """The rates of chains on the hosts of a class by a table; a ClassStudy searches for further."""

    searches = False
    """Whether further chains are searched for: it is a study."""
    cancelled = stopped = False
    """Whether an interruption ended the study, or a later question."""
    sets_by_symmetry = 0

    def __init__(self, node_class: NodeClass, kept: KeptTable) -> None:
        self.node_class, self.kept = node_class, kept
        self.gpus, self.nics = kept.gpus, kept.nics
        self.rated_default, self.default = kept.rated_default, kept.default
        self.closed = kept.closed
        self._settings = {settings: number for number, settings in enumerate(kept.settings)}
        self._hops = {hop: number for number, hop in enumerate(kept.hops)}
        self._between: dict[tuple[Settings, NicPairs], KeptChains | None] = {
            (kept.settings[chains.under], chains.pairs): chains for chains in kept.answers
        }
        self._best: dict[tuple[Settings, int], KeptChains | None] = {
            (kept.settings[chains.under], len(chains.pairs)): chains
            for chains in kept.answers
            if chains.best
        }

    def view(self, settings: Settings) -> NcclView:
        """Return NCCL's view of a host, with the GPUs of the table."""
        host = self.node_class
        return view(host.machine, host.knowledge, settings, gpus=self.gpus)

    def default_rings(self, choice: Choice) -> DefaultRings:
        """Return NCCL's own chains on a host by a choice without a graph file."""
        return default_rings(self.view(choice.settings), nodes=2)

    @cached_property
    def choices(self) -> Sequence[tuple[Settings, KeptChains]]:
        """Settings with the best chains that a search over settings found, best first."""
        first = {settings: at for at, (settings, _) in reversed(list(enumerate(self._best)))}
        chosen = [(s, chains) for (s, _), chains in self._best.items() if chains and chains.chosen]
        return sorted(chosen, key=lambda choice: (-choice[1].rate_gbps, first[choice[0]]))

    def may_answer(self, settings: Settings, count: int) -> bool:
        """Return whether `best_under` may find chains: they share the channels evenly."""
        stored = self._best.get((settings, count)) is not None
        possible = settings.channels % count == 0 and not self.view(settings).unsound
        return stored or (self.searches and possible)

    def best_under(self, settings: Settings, count: int) -> KeptChains | None:
        """Return the best set of so many chains; None if there is none."""
        return self._best.get((settings, count))

    def between(
        self, settings: Settings, pairs: NicPairs, *, only_few: bool = False
    ) -> KeptChains | None:
        """Return the best chains between exactly these NICs; None if there are none.

        With `only_few` a study answers a few cheap questions.
        """
        del only_few
        return self._between.get((settings, pairs))

    def most(self, _settings: Settings, _count: int, /) -> Most | None:
        """Return what no set of so many chains exceeds, whichever NICs; None if it is not known."""
        return None

    def rings_of(self, chains: KeptChains) -> tuple[Ring, ...]:
        """Return the hops of each chain, as rings through the world outside."""
        hops = list(self._hops)
        return tuple(Ring(tuple(hops[number] for number in row)) for row in chains.chains)

    def plan_chains(self, chains: KeptChains) -> tuple[PlanChain, ...]:
        """Return chains of the table with their hops."""
        hops = (ring.hops for ring in self.rings_of(chains))
        return tuple(map(plan_chain, hops, chains.gbps))

    def all_chains(self) -> Iterator[tuple[Settings, PlanChain]]:
        """Yield all chains of the table, and the ring inside the host."""
        settings = list(self._settings)
        for chains in filter(None, (*self._between.values(), self.closed)):
            for chain in self.plan_chains(chains):
                yield settings[chains.under], chain

    def table(self) -> KeptTable:
        """Return the table with all answers so far."""
        answers: dict[tuple[Settings, NicPairs], KeptChains] = {}
        for (settings, _), best in self._best.items():
            if best is not None:
                chains = self._between.get((settings, best.pairs)) or best
                marks = pick(best, "bound_gbps", "bound_assumptions", "best", "chosen")
                answers[settings, best.pairs] = msgspec.structs.replace(chains, **marks)
        for key, answer in self._between.items():
            if answer is not None:
                answers.setdefault(key, answer)
        return msgspec.structs.replace(
            self.kept,
            settings=tuple(self._settings),
            hops=tuple(self._hops),
            answers=tuple(answers.values()),
            closed=self.closed,
        )


# Files.


def table_files(tables: Iterable[KeptTable]) -> dict[str, str]:
    """Return the names of tables' files in a plan's directory, and their texts."""
    return {
        f"{TABLES}/{table.node_class}.{gpus_text(table.gpus)}.json": encode_line(table).decode()
        for table in tables
    }


def kept_files(directory: Path, classes: Iterable[str] | None = None) -> dict[str, str]:
    """Return the texts of tables in a plan's directory, those of some classes (None: all).

    Raises InputError: no manifest, a file is missing or was changed, or there are too many.
    """
    names = [name for name in read_manifest(directory).files if name.startswith(f"{TABLES}/")]
    if len(names) > MAX_TABLES:
        right = f"at most {MAX_TABLES} are possible"
        raise InputError(str(directory / TABLES), f"has {len(names)} tables", right)
    if classes is not None:
        prefixes = {f"{TABLES}/{name}" for name in classes}
        names = [name for name in names if name.rsplit(".", 2)[0] in prefixes]
    check_files(directory, names)
    return {name: read_text(directory / name) for name in names}


def read_tables(directory: Path, classes: Iterable[NodeClass]) -> list[ClassRates]:
    """Read the tables of some classes in a plan's directory.

    Raises InputError: as `kept_files`; or a damaged table.
    """
    of_name = {node_class.name: node_class for node_class in classes}
    tables = []
    for name, text in kept_files(directory, of_name).items():
        where = str(directory / name)
        table = _check(decode_json(text, KeptTable, where=where, name="table"), of_name, where)
        tables.append(ClassRates(of_name[table.node_class], table))
    return tables


def _check(table: KeptTable, classes: Mapping[str, NodeClass], where: str) -> KeptTable:
    """Return a table whose parts fit together; paths of a plan made of it are checked again."""
    check_version(table.format_version, FORMAT_VERSION, where)
    if table.node_class not in classes:
        raise InputError(where, f"is of class {shown(table.node_class)}", AGAIN)
    machine = classes[table.node_class].machine
    available = set(machine.gpu_indices), {nic.index for nic in machine.nics}
    fits = table.gpus and set(table.gpus) <= available[0]
    fits = fits and table.nics and set(table.nics) <= available[1]
    fits = fits and any(answer.best and answer.chosen for answer in table.answers)
    for settings in table.settings:
        check_settings(settings)
    for answer in filter(None, (*table.answers, table.closed)):
        lengths = [len(hops) for hops in answer.chains]
        fits = fits and 0 <= answer.under < len(table.settings)
        fits = fits and len(lengths) == (len(answer.pairs) or 1) and all(lengths)
        fits = fits and lengths == [len(rates) for rates in answer.gbps]
        fits = fits and all(0 <= n < len(table.hops) for hops in answer.chains for n in hops)
    if not fits:
        raise InputError(where, f"does not fit class {shown(table.node_class)}", AGAIN)
    return table
