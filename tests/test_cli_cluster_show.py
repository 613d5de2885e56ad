"""`tccl show`, `export` and `env` of a cluster's plan, and what refuses one."""

import json
import socket
import subprocess

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.model.measurement import JournalHeader
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import PlannedHost
from tccl_py.plan.directory import write_plan
from tccl_py.planning.plan_sources import hosts_again
from tccl_py.sources.journal import JournalFile
from tests.cluster_plans import FOUR, LOCAL, PAIR, cluster_plan, equal_hosts, mixed
from tests.commands import refused, tccl
from tests.planned import rebind, replace_plan


def saved(plan, place):
    place.mkdir(exist_ok=True)
    write_plan(plan, place)
    return place


@pytest.fixture
def directory(tmp_path):
    return saved(mixed(notices=("N2 left out",), whole_ring_gbps=9.5), tmp_path / "plan")


def rows(text):
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


def test_show_has_classes_passages_order_and_rates(directory):
    result = tccl("show", directory)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = rows(result.stdout)
    assert "4 hosts of four, pair, one, GPUs 0,1,2,3 or 0,1 or 0: simulated" in lines[0]
    for line in (
        "four 2 0,1,2,3 N0 mlx5_0 N1 mlx5_1",
        "pair 1 0,1 N0 mlx5_0 N1 mlx5_1",
        "four (0) 2 0 N0 1 0 2 3 N1 20.00 N0 -> G1",
        "1 N1 3 2 0 1 N0 21.00 N1 -> G3",
        "host order another order than given: gpu[3,2,1],login",
        "whole rings 9.50 GB/s with all hosts at once (simulated from assumed values)",
        "bound 12.50 GB/s, not proven best",
        "default NCCL 5.00 GB/s (simulated from assumed values): NCCL as it runs here; as it is",
        "NCCL 2.30",
        "cost 7 sets simulated, 3 from memory or journal, 2 by symmetry",
        "note: N2 left out",
    ):
        assert line in lines, line


def test_hosts_in_the_order_given_are_compressed(tmp_path):
    plan = equal_hosts(1024, bound_gbps=10.05, proven=True)
    lines = rows(tccl("show", saved(plan, tmp_path / "plan")).stdout)
    assert "host order as given: gpu[0000-1023]" in lines
    assert "0 N0 0 1 2 3 N0 20.00 N0 -> G0" in lines
    assert any("bound 10.05 GB/s, proven best within 1 %" in line for line in lines)
    assert not any(line.startswith("whole rings") for line in lines)


def test_hops_lists_every_flow_with_its_rate(directory):
    lines = rows(tccl("show", directory, "--hops").stdout)
    assert "four (0) 0 N0 G1 20.00 N0->N0->G1{blocks=2} (slowest)" in lines
    assert "four (0) 0 G0 G2 22.00 G0->G0->C1->G2->G2{blocks=2}" in lines
    assert "one (2) 1 G0 N1 22.00 G0->G0->C0->N1->N1{blocks=2}" in lines
    flows = sum(len(chain.hops) for one in mixed().paths for chain in one.chains)
    assert sum("blocks=2}" in line for line in lines) == flows


def many_passages():
    """Every host has a passage of its own."""
    orders = [(a, b, *({0, 1, 2, 3} - {a, b})) for a in range(4) for b in range(4) if a != b]
    names = [f"gpu{number:02d}" for number in range(24)]
    chains = {name: ((number % 2, orders[number // 2], 0),) for number, name in enumerate(names)}
    return cluster_plan([(name, FOUR) for name in names], chains)


def test_of_many_passages_show_has_the_first(tmp_path):
    plan = many_passages()
    assert len(plan.paths) == 24
    place = saved(plan, tmp_path / "plan")
    lines = rows(tccl("show", place).stdout)
    assert any("and 16 more rows" in line for line in lines)
    hops = rows(tccl("show", place, "--hops").stdout)
    assert sum(line.startswith("23 ") for line in hops) == 5


def test_a_long_order_is_cut(tmp_path):
    names = [f"{number}x" for number in range(400)]
    chains = dict.fromkeys(names, ((0, (0, 1), 0),))
    plan = cluster_plan([(name, PAIR) for name in names], chains)
    result = tccl("show", saved(plan, tmp_path / "plan"))
    assert " (nccl/order/hosts.txt" in " ".join(rows(result.stdout))
    assert len(result.stdout) < 6000


def test_json_has_a_ring_of_global_ranks_for_each_channel(tmp_path):
    plan = mixed(settings=Settings(channels=6, **LOCAL))
    found = json.loads(tccl("show", saved(plan, tmp_path / "plan"), "--json").stdout)
    assert len(found["rings"]) == 6
    assert found["rings"][0] == found["rings"][2] == found["rings"][4]
    assert all(sorted(ring) == list(range(11)) for ring in found["rings"])


@pytest.mark.parametrize("arguments", [("show",), ("show", "--json"), ("show", "--hops")])
def test_nothing_in_a_plan_reaches_the_terminal_as_a_command(arguments, tmp_path):
    plan = mixed(notices=("\x1b[31mred\x9b",))
    stock = msgspec.structs.replace(plan.choices["default"], note="\x1b]0;x\x07")
    machine = msgspec.structs.replace(plan.cluster.classes[0].machine, name="\x1b[2J")
    first = msgspec.structs.replace(plan.cluster.classes[0], machine=machine)
    cluster = msgspec.structs.replace(plan.cluster, classes=(first, *plan.cluster.classes[1:]))
    plan = replace_plan(plan, default=stock, cluster=cluster)
    result = tccl(arguments[0], saved(plan, tmp_path / "plan"), *arguments[1:])
    assert result.exit_code == 0
    assert not set("\x00\x07\x1b\x7f\x9b") & set(result.output)


def evaluated(text):
    """The NCCL variables after a shell evaluated this."""
    result = subprocess.run(
        ["sh", "-c", f"export NCCL_GRAPH_FILE=stale; {text}\nenv | grep ^NCCL_ || :"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    return dict(line.split("=", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize(
    "name, full, chosen",
    [
        ("gpu1", "gpu1", "gpu1"),
        ("gpu1.site", "gpu1.site", "gpu1"),
        ("gpu2", "gpu2.site", "gpu2.site"),
        ("gpu3", "gpu3.site", None),
    ],
)
def test_env_is_for_the_host_that_it_runs_on(name, full, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(socket, "getfqdn", lambda: full)
    names = ("gpu1", "gpu2.site")
    chains = dict.fromkeys(names, ((0, (0, 1), 0),))
    place = saved(cluster_plan([(one, PAIR) for one in names], chains), tmp_path / "my plan")
    result = tccl("env", place)
    found = evaluated(result.stdout).get("NCCL_GRAPH_FILE")
    if chosen is None:
        assert (result.exit_code, found) == (1, None)
        assert "host 'gpu3' is not in the plan: no graph file" in result.stderr
    else:
        assert (result.exit_code, found) == (0, f"{place}/nccl/hosts/{chosen}.xml")


def test_measuring_again_needs_the_hosts_of_a_measured_plan(tmp_path):
    write_plan(mixed(simulated=False, assumed=False), tmp_path)
    parts = {"gpu1": "GPUs a", "gpu2": "GPUs b"}
    header = JournalHeader(machine="gpu1,gpu2", identity="", hosts=parts, simulated=False)
    JournalFile(tmp_path / "measurements.jsonl", header).close()
    for words in (("check",), ("show", "--why")):
        refused(tccl(*words, tmp_path), "by mpirun or srun")


@pytest.mark.parametrize(("port", "named"), [(0, "N0,N1"), (1, None)])
def test_hosts_are_measured_again_over_the_interfaces_of_their_plan(port, named, monkeypatch):
    """RDMA ports are found: no user can name them as interfaces."""
    nics = [msgspec.structs.replace(nic, name=nic.id, port=port) for nic in PAIR.nics]
    machine = msgspec.structs.replace(PAIR, nics=tuple(nics))
    hosts = [("gpu1", machine), ("gpu2", machine)]
    plan = cluster_plan(hosts, {name: ((0, (0, 1), 1),) for name, _ in hosts})
    header, asked = JournalHeader(machine="gpu1", identity="", simulated=False), []

    def open_hosts(*_, interfaces, **others):
        asked.append((interfaces, others.get("backend")))
        raise InputError("here", "no host is asked", "")

    monkeypatch.setattr("tccl_py.planning.plan_sources.open_hosts", open_hosts)
    with pytest.raises(InputError, match="no host is asked"), hosts_again(plan, header, None):
        pass
    assert asked == [(named, None)]


@pytest.mark.parametrize("command", ["show", "env", "export"])
def test_a_damaged_plan_is_one_sentence(command, directory, tmp_path):
    hostile = PlannedHost(name="../../x", path=0, first_rank=0)
    plan = mixed()
    msgspec.structs.replace(plan, hosts=(hostile, *plan.hosts[1:])).save(directory / "plan.json")
    rebind(directory)
    more = ("-o", tmp_path / "out") if command == "export" else ()
    refused(tccl(command, directory, *more), "does not have host '../../x'")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("columns", ["80", "60", "40", "1"])
def test_nothing_is_cut_in_a_narrow_terminal(columns, tmp_path, monkeypatch):
    names = [f"{number}x" for number in range(40)]
    wanted = Settings(channels=2, ib_hca=tuple(f"mlx5_{nic}:1" for nic in range(12)), **LOCAL)
    chains = dict.fromkeys(names, ((0, (0, 1), 0),))
    plan = cluster_plan([(name, PAIR) for name in names], chains, settings=wanted)
    place = saved(plan, tmp_path / "plan")
    monkeypatch.setenv("COLUMNS", columns)
    text = tccl("show", place, "--hops").stdout
    # Words of a column go on below; of the summary, in the lines that follow.
    assert "…" not in text
    joined = "".join(text.split())
    assert ",".join(names) in joined
    assert "NCCL_IB_HCA='=mlx5_0:1,...'" in joined
    assert max(map(len, text.splitlines())) <= max(40, int(columns))


@pytest.mark.parametrize("columns", ["0", "-5", "wide", "²", "9" * 5000])
def test_columns_that_are_no_number_of_them_change_nothing(columns, directory, monkeypatch):
    usual = tccl("show", directory).stdout
    monkeypatch.setenv("COLUMNS", columns)
    assert tccl("show", directory).stdout == usual
