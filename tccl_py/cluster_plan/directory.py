"""The directory of a cluster's plan, and the files in it that NCCL and launchers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tccl_py.cluster_plan.plan import ClusterPlan, load_cluster_plan
from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.knowledge import description_to_json
from tccl_py.nccl.view import view
from tccl_py.plan.files import (
    HOSTS_FOLDER,
    LAUNCH_NOTES,
    ORDER_FOLDER,
    cluster_env_text,
    conf_text,
    host_graph_file,
    node_graph_text,
)
from tccl_py.plan.host_order import HostOrder, host_order_files, launch_notes
from tccl_py.plan.staging import PLAN_FILE, check_if_listed, write_new_directory, write_with_plan
from tccl_py.simulator.descriptions import read_description
from tccl_py.simulator.model import MachineModel


def cluster_files(plan: ClusterPlan, directory: Path) -> dict[str, str]:
    """Names (below `nccl/`) and texts of what NCCL and launchers read, as it will lie in
    `directory`: a graph file for each host, settings, and the order of hosts.

    Raises:
        InputError: chains that NCCL would not take as they are meant, or a directory whose path
            cannot stand in an environment variable.
    """
    place = PurePosixPath(directory.resolve() / "nccl")
    graphs = graph_texts(plan, {host.passage for host in plan.hosts})
    files = {host_graph_file(host.name): graphs[host.passage] for host in plan.hosts}
    files["nccl.conf"] = conf_text(plan.settings, provenance=plan.provenance)
    files["env.sh"] = cluster_env_text(
        plan.settings, place / HOSTS_FOLDER, provenance=plan.provenance
    )
    order = host_order(plan)
    for name, text in host_order_files(order).items():
        files[f"{ORDER_FOLDER}/{name}"] = text
    notes = launch_notes(order, directory=str(place / ORDER_FOLDER))
    files[f"{ORDER_FOLDER}/{LAUNCH_NOTES}"] = notes
    return files


def graph_texts(plan: ClusterPlan, passages: Iterable[int]) -> dict[int, str]:
    """The graph file of hosts with these passages, by number; each is made once for all of them.

    Raises:
        InputError: chains that NCCL would not take as they are meant.
    """
    return {number: _graph_text(plan, number) for number in sorted(passages)}


def _graph_text(plan: ClusterPlan, number: int) -> str:
    passage = plan.passages[number]
    one = plan.cluster.classes[passage.node_class]
    gpus = plan.gpus[passage.node_class]
    count = len(passage.chains)
    dealt = [passage.chains[channel % count] for channel in range(plan.settings.channels)]
    return node_graph_text(
        view(one.machine, one.knowledge, plan.settings, gpus=gpus),
        [chain.gpus for chain in dealt],
        [(chain.entry_nic, chain.exit_nic) for chain in dealt],
        # Rings are as fast as the slowest host lets them be, and NCCL takes the least of all.
        rate_gbps=plan.rate_gbps,
        provenance=plan.provenance,
    )


def host_order(plan: ClusterPlan) -> HostOrder:
    """The plan's order of hosts, with the GPU of each rank."""
    return HostOrder(
        hosts=plan.host_order,
        gpus=tuple(plan.gpus[plan.passages[host.passage].node_class] for host in plan.hosts),
        provenance=f"tccl-py, rates {plan.provenance}",
    )


def class_file(name: str) -> str:
    """Where a plan's directory has the machine of a class, by the name of the class."""
    return f"machines/{name}.json"


def planned_model(plan: ClusterPlan, number: int, directory: Path) -> MachineModel | None:
    """The model in a plan's directory of a class, by its number; None if its file has none.

    Raises:
        InputError: the file is missing, was changed, is damaged, or describes another machine.
    """
    one = plan.cluster.classes[number]
    path = directory / class_file(one.name)
    check_if_listed(directory, class_file(one.name))
    found = read_description(path)
    if (found.machine, found.knowledge) != (one.machine, one.knowledge):
        raise InputError(str(path), "is not the plan's machine", "plan it again")
    return found.model


def planned_models(plan: ClusterPlan, directory: Path) -> dict[str, MachineModel]:
    """The models whose rates a simulated plan has, by the names of classes, as far as they are
    there; to write the plan anew.

    Raises:
        InputError: a file is damaged or describes another machine.
    """
    found = {}
    for number, one in enumerate(plan.cluster.classes if plan.simulated else ()):
        if (directory / class_file(one.name)).is_file():
            model = planned_model(plan, number, directory)
            if model is not None:
                found[one.name] = model
    return found


def write_cluster_plan(
    plan: ClusterPlan, directory: Path, *, models: Mapping[str, MachineModel] | None = None
) -> None:
    """Write all files of a plan below `directory`, and the manifest of them: all, or none.

    Args:
        plan: what to write.
        directory: where; it exists.
        models: by the names of classes, what a simulated plan's rates come from; written in their
            machines' place, so that more can be planned from them.

    Raises:
        InputError: a file cannot be written; what was there before is still there.
    """
    files = _below_nccl(plan, directory)
    for one in plan.cluster.classes:
        model = (models or {}).get(one.name)
        files[class_file(one.name)] = (
            description_to_json(one.machine, one.knowledge) if model is None else encode_json(model)
        )
    files[PLAN_FILE] = encode_json(plan)
    write_with_plan(files, directory, check=load_cluster_plan)


def write_cluster_files(plan: ClusterPlan, output: Path) -> int:
    """Write what NCCL and launchers read to the new directory `output`; how many files that are.

    Raises:
        InputError: it exists, or cannot be written; nothing is left of it then.
    """
    return write_new_directory(output, lambda place: _below_nccl(plan, place))


def _below_nccl(plan: ClusterPlan, directory: Path) -> dict[str, str]:
    return {f"nccl/{name}": text for name, text in cluster_files(plan, directory).items()}
