"""A cluster plan's directory: its files make NCCL run the planned rings, and appear together."""

import json
import os
import shutil
import subprocess

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.delivery.job import JobRequest, deliver
from tccl_py.delivery.plugin import plugin_exports
from tccl_py.errors import InputError
from tccl_py.model.cluster import MAX_NAME
from tccl_py.nccl.communicators import same_rings
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import digest
from tccl_py.nccl.settings import Settings, environment, settings_from_environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.nccl.versions import known_versions
from tccl_py.plan.directory import (
    nccl_files,
    write_nccl_files,
    write_new_plan,
    write_plan,
)
from tccl_py.plan.load import load_plan
from tests.cluster_plans import FOUR, LOCAL, MACHINES, cluster_plan, equal_hosts, mixed
from tests.effort import calls_at_most
from tests.planned import needing_a_graph


def judged(plan, files):
    """What NCCL does with the files, started as the rank map says."""
    one_of = {host.name: plan.cluster.classes[host.node_class] for host in plan.cluster.hosts}
    jobs = [
        NodeJob(
            machine=one_of[host].machine,
            knowledge=one_of[host].knowledge,
            gpus=gpus,
            graph=files[f"hosts/{host}.xml"],
        )
        for host, gpus in ((one.name, plan.gpus_of(one)) for one in plan.hosts)
    ]
    variables = environment(plan.settings)
    return validate_cluster(jobs, version=plan.settings.version, environment=variables)


def check_run(plan, files):
    """The files make NCCL run the plan's rings and cross by its NICs, and nothing else."""
    found = judged(plan, files)
    assert found.verdict == "used", found.reason
    planned = plan.channel_rings
    assert len(found.rings) % len(planned) == 0
    for channel, ring in enumerate(found.rings):
        assert same_rings(ring, planned[channel % len(planned)])
        chains = [plan.paths[host.path].chains[channel % plan.ring_count] for host in plan.hosts]
        ends = [(chain.entry_nic, chain.exit_nic) for chain in chains]
        assert [(nics.entry, nics.exit) for nics in found.nics[channel]] == ends


def test_the_files_of_hosts_of_three_classes_close_into_the_planned_rings(tmp_path):
    plan = mixed()
    assert plan.orders == (
        (1, 0, 2, 3, 5, 4, 7, 6, 8, 9, 10),
        (3, 2, 0, 1, 4, 5, 9, 8, 6, 7, 10),
    )
    check_run(plan, nccl_files(plan, tmp_path))


@st.composite
def plans(draw):
    """Hosts of some classes in any order, each with chains of its own."""
    rings = draw(st.integers(1, 3))
    version = draw(st.sampled_from(known_versions()))
    chosen = draw(st.lists(st.sampled_from(MACHINES), min_size=2, max_size=6))
    hosts = [(f"h{number}", machine) for number, machine in enumerate(chosen)]
    gpus = {"four": draw(st.sampled_from([(0, 1, 2, 3), (1, 2), (0, 3)]))}
    nics = draw(st.sampled_from([(0, 1), (1,)]))
    chains = {}
    for name, machine in hosts:
        used = gpus.get(machine.name, machine.gpu_indices)
        chains[name] = []
        for _ in range(rings):
            order = draw(st.permutations(used))
            entry, leave = draw(st.sampled_from(nics)), draw(st.sampled_from(nics))
            one = (entry, tuple(order), entry if len(order) == 1 else leave)
            chains[name].append(one)
    return cluster_plan(
        hosts,
        chains,
        order=draw(st.permutations([name for name, _ in hosts])),
        gpus=gpus,
        settings=Settings(
            version=version,
            channels=rings * draw(st.integers(1, 2)),
            cross_nic=draw(st.sampled_from([None, 1, 2])),
            # What is left out moves the numbers of the others in the graph file.
            ib_hca=tuple(f"mlx5_{nic}:1" for nic in nics),
            **LOCAL,
        ),
    )


@settings(max_examples=150)
@given(plans())
def test_any_chains_and_any_order_of_hosts_close_into_the_planned_rings(tmp_path_factory, plan):
    check_run(plan, nccl_files(plan, tmp_path_factory.getbasetemp()))


@settings(max_examples=50)
@given(plans())
def test_a_plan_is_the_same_after_saving(tmp_path_factory, plan):
    place = tmp_path_factory.getbasetemp() / "saved.json"
    plan.save(place)
    assert load_plan(place) == plan


def test_the_order_of_hosts_is_the_planned_one(tmp_path):
    files = nccl_files(mixed(), tmp_path)
    assert files["order/hosts.txt"] == "gpu3\ngpu2\ngpu1\nlogin\n"
    assert "gpu3 slots=4\ngpu2 slots=2\n" in files["order/hostfile.openmpi"]
    order = f"{tmp_path}/nccl/order"
    assert f"mpirun --hostfile {order}/hostfile.openmpi" in files["order/launch.txt"]


def test_ranks_take_the_gpus_that_are_planned_for(tmp_path):
    hosts = [("a", FOUR), ("b", FOUR)]
    chains = dict.fromkeys("ab", ((0, (3, 1), 0),))
    plan = cluster_plan(hosts, chains, gpus={"four": (1, 3)})
    assert plan.orders == ((1, 0, 3, 2),)
    files = nccl_files(plan, tmp_path)
    ranks = json.loads(files["order/rank-map.json"])["ranks"]
    assert [rank["gpu"] for rank in ranks] == [1, 3, 1, 3]
    check_run(plan, files)


def test_all_settings_of_the_network_are_set_for_every_job(tmp_path):
    wanted = Settings(
        channels=2,
        net_gdr_level="PHB",
        net_gdr_read=False,
        cross_nic=1,
        ib_hca=("mlx5_0:1", "mlx5_1:1"),
        ib_gid_index=3,
        **LOCAL,
    )
    files = nccl_files(mixed(settings=wanted), tmp_path)
    lines = [line for line in files["nccl.conf"].splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert variables == environment(wanted)
    assert {
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NET_GDR_READ",
        "NCCL_CROSS_NIC",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
    } <= set(variables)
    assert settings_from_environment(variables, channels=2) == wanted


def test_graph_files_say_what_a_channel_carries_and_whether_it_changes_nics(tmp_path):
    files = nccl_files(mixed(), tmp_path)
    assert 'crossnic="1" nchannels="2" speedintra="5" speedinter="5"' in files["hosts/gpu1.xml"]
    assert 'crossnic="0" nchannels="2" speedintra="5" speedinter="5"' in files["hosts/login.xml"]
    assert "rates simulated from assumed values" in files["hosts/gpu1.xml"].splitlines()[0]


def test_a_thousand_hosts_take_few_calls_and_equal_ones_share_a_text(tmp_path):
    plan = equal_hosts(1024)
    with calls_at_most(500_000):
        write_plan(plan, tmp_path)
    assert load_plan(tmp_path) == plan
    files = nccl_files(plan, tmp_path)
    graphs = [text for name, text in files.items() if name.startswith("hosts/")]
    assert (len(graphs), len(set(map(id, graphs)))) == (1024, 1)
    assert len(list((tmp_path / "nccl" / "hosts").iterdir())) == 1024
    check_run(plan, files)


def test_each_host_of_a_job_has_an_index_for_the_plugin(tmp_path):
    job = tmp_path / "job"
    plan = needing_a_graph(mixed())
    write_new_plan(plan, job, {one.name: "{}" for one in plan.cluster.classes})
    hosts = job / "nccl" / "hosts"
    for host in plan.hosts:
        index = (hosts / f"{host.name}.index").read_text().splitlines()
        gpus = ",".join(map(str, sorted(plan.gpus_of(host))))
        [(_, named, file, found)] = [line.split() for line in index if line.startswith("set")]
        assert named == gpus
        assert digest((hosts / file).read_bytes()) == found
        assert (hosts / file).read_text() == (hosts / f"{host.name}.xml").read_text()
        assert f"job {sum(len(plan.gpus_of(one)) for one in plan.hosts)}" in index
    (job / "nccl" / LIBRARY).touch()
    assert plugin_exports(plan, job) == environment(plan.job_settings) | {
        "NCCL_ENV_PLUGIN": str(job / "nccl" / LIBRARY),
        "TCCL_JOB": str(job),
    }
    said = []
    for nccl, off in (("2.28.9", False), ("2.33.1", True)):
        given = deliver(plan, job, JobRequest(plugin=True, nccl=nccl), say=said.append)
        assert ("NCCL_ENV_PLUGIN" not in given.variables) == given.refused == off
    assert "NCCL 2.33.1 is newer than 2.32" in said[-1]


@pytest.mark.parametrize("winner", ["default", "variables", "graph"])
def test_a_job_that_needs_no_graph_file_has_no_file_of_the_plugin(tmp_path, winner):
    plan = msgspec.structs.replace(needing_a_graph(mixed()), winner=winner)
    write_new_plan(plan, tmp_path / "job", {one.name: "{}" for one in plan.cluster.classes})
    named = {path.suffix for path in (tmp_path / "job" / "nccl" / "hosts").iterdir()}
    assert named == ({".xml", ".index", ".graph"} if winner == "graph" else {".xml"})


def test_hosts_named_like_files_of_a_job_get_their_own_graph_files(tmp_path):
    plan = needing_a_graph(mixed())
    names = {"gpu2": "path-0", "gpu3": "path-1"}  # Their paths are 1 and 0
    hosts, ordered = (
        tuple(msgspec.structs.replace(one, name=names.get(one.name, one.name)) for one in part)
        for part in (plan.cluster.hosts, plan.hosts)
    )
    cluster = msgspec.structs.replace(plan.cluster, hosts=hosts)
    plan = msgspec.structs.replace(plan, cluster=cluster, hosts=ordered)
    write_new_plan(plan, tmp_path / "job", {one.name: "{}" for one in cluster.classes})
    for name, text in nccl_files(plan, tmp_path / "job").items():
        assert (tmp_path / "job" / "nccl" / name).read_text() == text


def test_the_longest_name_of_a_host_can_name_its_file(tmp_path):
    names = ("a", "x" * MAX_NAME)
    chains = dict.fromkeys(names, ((0, (0, 1, 2, 3), 0),))
    plan = cluster_plan([(name, FOUR) for name in names], chains)
    write_plan(plan, tmp_path)
    assert (tmp_path / "nccl" / "hosts" / f"{names[1]}.xml").is_file()
    assert load_plan(tmp_path) == plan
    longer = ("a", "x" * (MAX_NAME + 1))
    chains = dict.fromkeys(longer, ((0, (0, 1, 2, 3), 0),))
    # Before anything is measured, and by name.
    with pytest.raises(InputError, match=r"the name 'x+'\.\.\. has 241 characters; at most 240"):
        cluster_plan([(name, FOUR) for name in longer], chains)


def runs_programs(shell):
    """Whether a shell is here and runs programs of PATH: builds of busybox may prefer their own."""
    inside = [*([shell, "sh"] if shell == "busybox" else [shell]), "-c", "command -v uname"]
    found = shutil.which(shell) and subprocess.run(inside, capture_output=True, check=False)
    return bool(found) and found.stdout.startswith(b"/")


SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "busybox") if runs_programs(name)]


def named_host(place, name, full):
    """A folder of programs in which this host has these names; `full` None: nobody knows it."""
    tools = place / "tools"
    tools.mkdir()
    for tool, text in (
        ("uname", f"echo {name}"),
        ("hostname", f"echo {full}" if full else "false"),
    ):
        (tools / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tools / tool).chmod(0o755)
    return tools


def sourced(shell, script, tools, **variables):
    """The NCCL variables after sourcing a script, and what went to stderr."""
    inside = (
        'set -eu; export NCCL_GRAPH_FILE=stale; . "$1"; set | grep "^_tccl" && exit 3; '
        "env | grep ^NCCL_ || :"
    )
    result = subprocess.run(
        [*([shell, "sh"] if shell == "busybox" else [shell]), "-c", inside, "sh", str(script)],
        capture_output=True,
        text=True,
        env={"PATH": f"{tools}:{os.environ['PATH']}", **variables},
        check=True,
    )
    return dict(line.split("=", 1) for line in result.stdout.splitlines()), result.stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("folder", ["plan", 'it\'s a "plan" $HOME `x` *'])
@pytest.mark.parametrize(
    "name, full, chosen",
    [
        ("gpu1", None, "gpu1"),
        ("gpu1.site.example", None, "gpu1"),
        ("gpu2", "gpu2.site.example", "gpu2.site.example"),
        ("gpu2.site.example", "gpu2.site.example", "gpu2.site.example"),
        ("gpu2", None, "gpu2.site.example"),
        ("gpu", None, None),
        ("other", "other.site.example", None),
    ],
)
def test_a_job_gets_the_file_of_the_host_it_runs_on(shell, folder, name, full, chosen, tmp_path):
    names = ("gpu1", "gpu2.site.example")
    chains = dict.fromkeys(names, ((0, (0, 1, 2, 3), 0),))
    wanted = Settings(channels=2, ib_hca=("mlx5_0", "mlx5_1"), **LOCAL)
    plan = cluster_plan([(one, FOUR) for one in names], chains, settings=wanted)
    write_nccl_files(plan, tmp_path / folder)
    nccl = tmp_path / folder / "nccl"
    found, said = sourced(shell, nccl / "env.sh", named_host(tmp_path, name, full))
    graph = {} if chosen is None else {"NCCL_GRAPH_FILE": f"{nccl}/hosts/{chosen}.xml"}
    assert found == {**environment(wanted), **graph}
    if chosen is None:
        sentence = f"tccl: no graph file for host {name} in {nccl}/hosts: NCCL chooses its own"
        assert said.startswith(sentence)
        assert said.count("\n") == 1
    else:
        assert said == ""


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("rank", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", ""])
def test_a_script_of_several_nodes_gets_no_file_that_its_ranks_would_all_have(
    shell, rank, tmp_path
):
    chains = dict.fromkeys(("gpu1", "gpu2"), ((0, (0, 1, 2, 3), 0),))
    plan = cluster_plan([(one, FOUR) for one in chains], chains, settings=Settings(**LOCAL))
    write_nccl_files(plan, tmp_path / "plan")
    env_file, tools = tmp_path / "plan" / "nccl" / "env.sh", named_host(tmp_path, "gpu1", None)
    variables = {"SLURM_JOB_NUM_NODES": "2", **({rank: "8"} if rank else {})}
    found, said = sourced(shell, env_file, tools, **variables)
    assert ("NCCL_GRAPH_FILE" in found) == bool(rank)
    assert ("source this file in each rank" in said) == (not rank)
    assert environment(plan.settings).items() <= found.items()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "node, name, chosen",
    [
        ("node7", "gpu1", "gpu1"),
        ("node7", "other", "node7"),
        ("", "gpu1", "gpu1"),
        ("node8", "gpu1.site", "gpu1"),
        ("node8", "other", None),
    ],
)
def test_a_host_gets_its_file_by_its_own_name_or_by_slurms(shell, node, name, chosen, tmp_path):
    chains = dict.fromkeys(("gpu1", "node7"), ((0, (0, 1, 2, 3), 0),))
    plan = cluster_plan([(one, FOUR) for one in chains], chains, settings=Settings(**LOCAL))
    write_nccl_files(plan, tmp_path / "plan")
    nccl, tools = tmp_path / "plan" / "nccl", named_host(tmp_path, name, None)
    found, said = sourced(shell, nccl / "env.sh", tools, SLURMD_NODENAME=node)
    graph = None if chosen is None else f"{nccl}/hosts/{chosen}.xml"
    assert found.get("NCCL_GRAPH_FILE") == graph
    assert said.startswith("tccl: no graph file for host" if chosen is None else "")
    assert bool(said) == (chosen is None)
