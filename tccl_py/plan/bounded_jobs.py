"""Jobs over GPUs that no table is for: default NCCL, with an upper bound in place of a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from tccl_py.files import decode_json, encode_json, picked, read_text
from tccl_py.merge.rings import uplink_limit
from tccl_py.model.cluster import Cluster, NodeClass
from tccl_py.nccl.graph_search import default_choice_or_sys
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import view
from tccl_py.plan.files import conf_text, env_text
from tccl_py.plan.load import BOUNDED_JOB, Head, plan_file
from tccl_py.plan.plan import FORMAT_VERSION
from tccl_py.plan.staging import PLAN_FILE, with_manifest, write_new_directory
from tccl_py.plan.tables import HostTable, OwnChains
from tccl_py.plan.writing import order_files

_MBPS = 8_000
"""Of a GB/s."""


class BoundedHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host of a job, and its GPUs, one for each rank."""

    name: str
    gpus: tuple[int, ...]


class BoundedJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job whose rate nobody measured: default NCCL, over hosts in the order given.

    `bound_gbps` is no less than the bandwidth of NCCL's own rings; None if nothing bounds it.
    `simulated` says what the bound rests on.
    """

    format_version: int = FORMAT_VERSION
    kind: str = BOUNDED_JOB
    hosts: tuple[BoundedHost, ...]
    settings: Settings
    bound_gbps: Annotated[float, msgspec.Meta(gt=0)] | None
    simulated: bool
    notices: tuple[str, ...]
    pinned_env: dict[str, str] = {}

    @property
    def provenance(self) -> str:
        """The basis of the bound."""
        return f"not known, but bounded by {'simulated' if self.simulated else 'measured'} tables"

    @property
    def rate_text(self) -> str:
        """The rate in words."""
        most = "" if self.bound_gbps is None else f", at most {self.bound_gbps:.2f} GB/s"
        return f"not known{most} ({'simulated' if self.simulated else 'measured'} tables)"

    @property
    def advice(self) -> str:
        """The recommendation."""
        return "Leave NCCL as it is: no rings over these GPUs were measured."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of `show --json`: the keys of a plan, without rings and rates."""
        own: dict[str, Any] = {"rings": [], "achieved_gbps": None, "note": "not measured"}
        names = environment(self.settings)
        settings = {"settings": msgspec.to_builtins(self.settings), "environment": names}
        default = {"rate_gbps": None, **settings, **own}
        return {
            "kind": "cluster",
            "hosts": [host.name for host in self.hosts],
            "gpus": {host.name: host.gpus for host in self.hosts},
            "bounded": True,
            "rings": [],
            "rate_gbps": None,
            **picked(self, "bound_gbps", "simulated"),
            "proven": False,
            "sets_measured": 0,
            **settings,
            "kept": self.pinned_env,
            "recommended": "default",
            "choices": {"default": default},
            "stock": default,
            "notices": self.notices,
        }


def bound_of(
    cluster: Cluster, gpus: Sequence[tuple[int, ...]], tables: Sequence[Sequence[HostTable]]
) -> float | None:
    """Return an upper bound on default NCCL's bandwidth in a job, GB/s; None if nothing bounds it.

    `cluster` is the job's, its hosts in rank order; of its classes are the GPUs, and all tables.
    """
    of_classes = zip(cluster.classes, gpus, tables, strict=True)
    found = [bound for one in of_classes for bound in _bounds_of_class(*one)]
    if cluster.switches is not None:
        found.append(uplink_limit(cluster.switches, cluster.names))
    least = min(found)
    return least if least < float("inf") else None


def _bounds_of_class(
    one: NodeClass, gpus: tuple[int, ...], tables: Sequence[HostTable]
) -> Iterator[float]:
    """Yield bounds on the bandwidth of NCCL's own chains on hosts of a class.

    A NIC carries no more than its port. Tables for more or fewer GPUs bound nothing: chains over
    them have other hops, and only a set of the same transfers bounds one with further transfers.
    """
    ports = {nic.index: nic.speed_mbps / _MBPS or float("inf") for nic in one.machine.nics}
    for table in tables:
        if table.gpus == gpus and isinstance(table.plain, OwnChains):
            yield table.plain.rate_gbps
    seen = view(one.machine, one.knowledge, tables[0].kept.default_settings, gpus=gpus)
    chains = default_choice_or_sys(seen, nodes=2).chains
    for ends in ([chain.entry for chain in chains], [chain.exit for chain in chains]):
        yield min(ports[nic] * len(ends) / count for nic, count in Counter(ends).items())


# Files.


def write_bounded_job(job: BoundedJob, output: Path) -> int:
    """Write a job's files to the new directory `output`, without graph files; return their number.

    Raises InputError: it exists, or cannot be written; nothing is left then.
    """

    def files_of(place: Path) -> Mapping[str, str | bytes]:
        hosts = [(host.name, host.gpus) for host in job.hosts]
        folder = PurePosixPath(place.resolve() / "nccl")
        nccl = {
            "env.sh": env_text(job.settings, None, provenance=job.provenance),
            "nccl.conf": conf_text(job.settings, provenance=job.provenance),
            **order_files(hosts, folder, provenance=job.provenance),
        }
        files: dict[str, str | bytes] = {f"nccl/{name}": text for name, text in nccl.items()}
        files[PLAN_FILE] = encode_json(job)
        return with_manifest(files)

    return write_new_directory(output, files_of)


def read_bounded_job(path: Path) -> BoundedJob | None:
    """Read a job's plan file; None if it is a plan with rates.

    Raises InputError: unreadable or damaged.
    """
    path = plan_file(path)
    text = read_text(path)
    if decode_json(text, Head, where=str(path), name="Plan").kind != BOUNDED_JOB:
        return None
    return decode_json(text, BoundedJob, where=str(path))
