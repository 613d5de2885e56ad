"""A plan in programs and notebooks: the Plan, with what functions do with it as methods."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tccl_py.errors import check_range, check_type
from tccl_py.nccl.settings import Settings
from tccl_py.plan import load
from tccl_py.plan.chains import ChoiceName, Orders
from tccl_py.plan.plan import Plan

if TYPE_CHECKING:
    import networkx as nx

    from tccl_py.model.measurement import Sources
    from tccl_py.plan.tables import KeptTable


class PlanHandle(Plan, frozen=True, kw_only=True):  # noqa: PLW1641 (has dictionaries)
    """A Plan with methods, as `make_plan`, `make_cluster_plan` and `load_plan` return it."""

    def __repr__(self) -> str:
        """Describe the plan in three lines."""
        from tccl_py.plan.text import description  # noqa: PLC0415 (loads NCCL's files)

        return description(self)

    def __eq__(self, other: object) -> bool:
        """Return whether another plan, with methods or without, has the same content."""
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__struct_fields__)

    def write(
        self, directory: Path | str, source: Sources = None, *, tables: Iterable[KeptTable] = ()
    ) -> None:
        """Write what `tccl plan` writes into a new or empty directory, which all commands read.

        Args:
            directory: one that is new, empty, or has the source's journal, measurements.jsonl.
            source: as `rate` takes it; its model and measurements are written too.
            tables: of a cluster, as `make_cluster_plan` fills them: for `tccl export --hosts`.

        Raises InputError: the directory has other files, or cannot be written; or as `rate`.
        """
        from tccl_py.planning.rating import write_directory  # noqa: PLC0415 (loads sources)

        check_type(directory, "directory", str, Path)
        write_directory(self, Path(directory), source, tables)

    def rate(
        self, rings: Orders, settings: Settings | None = None, *, source: Sources = None
    ) -> float:
        """Return the bandwidth of any rings over the plan's GPUs, all of them together, in GB/s.

        Args:
            rings: orders of GPUs, or of ranks over several hosts, as in `orders`; one or several.
            settings: NCCL's; None is those of the plan's graph files.
            source: answers the transfer sets; of several classes of hosts a list with one for each.
                None simulates, where the plan was simulated by bundled models.

        Raises InputError: not each GPU once in each ring, or hosts in another order; rings that do
        not share the channels evenly; no source, or one of another machine. SearchError: the
        settings give two neighbours no hop.
        """
        from tccl_py.planning.rating import rate_of_rings  # noqa: PLC0415 (loads sources)

        return rate_of_rings(self, rings, settings, source)

    def what_if(self, order: Iterable[int], source: Sources = None, *, ring: int = 0) -> float:
        """Return the bandwidth of the plan's rings with this order in one ring's place, GB/s.

        Raises InputError: no such ring, or as `rate`.
        """
        check_type(ring, "ring", int)
        check_range("`ring`", ring, 0, self.ring_count - 1)
        orders = (*self.orders[:ring], order, *self.orders[ring + 1 :])
        return self.rate(orders, source=source)

    def files(self, name: ChoiceName, directory: Path | str = ".") -> dict[str, str]:
        """Return the files for jobs by a choice: names below `nccl/` of a directory, and texts.

        Raises InputError: rings that NCCL would not take.
        """
        from tccl_py.plan.directory import nccl_files  # noqa: PLC0415 (loads NCCL's files)

        files = nccl_files(msgspec.structs.replace(self, winner=name), Path(directory))
        no_graph = ("env.sh", "nccl.conf")
        return files if name == "graph" else {name: files[name] for name in no_graph}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `tccl show --json` prints it, without choices by message size."""
        from tccl_py.plan.text import show_plan  # noqa: PLC0415 (loads NCCL's files)

        found: dict[str, Any] = msgspec.to_builtins(show_plan(self))
        return found

    def hop_rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each hop of each ring, as pandas.DataFrame takes them."""
        from tccl_py.plan.hop_rows import hop_rows  # noqa: PLC0415 (loads networkx)

        return hop_rows(self)

    def to_networkx(self) -> nx.MultiDiGraph:
        """Return the rings as a networkx graph over GPUs: an edge for each hop, with its row."""
        from tccl_py.plan.hop_rows import hop_graph  # noqa: PLC0415 (loads networkx)

        return hop_graph(self)

    @property
    def advice(self) -> str:
        """The recommendation, in a sentence or two."""
        from tccl_py.plan.text import advice  # noqa: PLC0415 (loads NCCL's files)

        return advice(self)


def with_methods(plan: Plan) -> PlanHandle:
    """Return a plan with its methods."""
    return PlanHandle(**{name: getattr(plan, name) for name in plan.__struct_fields__})


def load_plan(path: Path | str) -> PlanHandle:
    """Read a plan file, or `plan.json` in a directory.

    Raises InputError: unreadable, of another format version, damaged, or parts that do not fit
    together.
    """
    return with_methods(load.load_plan(path))
