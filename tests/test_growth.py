"""Plans that grow: against fresh plans, and hosts that differ from their class."""

import json

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.cluster import Cluster, Host, NodeClass
from tccl_py.model.measurement import JournalHeader, Measurement
from tccl_py.model.reports import HostReport, cluster_of, part_of
from tccl_py.model.transfer import parse_set, transfer_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import check_files
from tccl_py.plan.tables import kept_files, read_tables
from tccl_py.planning.plan_sources import (
    PlacedSource,
    Sample,
    journal_by_class,
    odd_hosts,
    placements,
)
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, read_journal, widen_journal
from tests.networked import networked_machine
from tests.planned import replace_plan
from tests.test_cli_plan import Impatient, done, tccl

FEW = ("--rings", "1", "--max-sets", "60")


@pytest.fixture
def hosts(tmp_path):
    def listed(*names):
        path = tmp_path / f"{names[0]}.txt"
        path.write_text("".join(f"{name}\n" for name in names))
        return path

    return listed


@pytest.fixture
def two(tmp_path, hosts):
    """A plan of two equal hosts."""
    done("plan", tmp_path / "p", "--simulate", "amd-v100", "--hosts", hosts("a1", "a2"), *FEW)
    return tmp_path / "p"


def fresh_rate(*models):
    reports = [
        HostReport(host=f"{one.name}-{n}", machine=one.machine, knowledge=one.knowledge)
        for one in models
        for n in range(2)
    ]
    sources = [Simulator(one) for one in models]
    budget = Budget(sets=60)
    return make_cluster_plan(
        cluster_of(reports), sources, ring_counts=(1,), budget=budget
    ).rate_gbps


def test_equal_hosts_are_added_without_measuring_their_class_again(two, hosts):
    before = load_plan(two)
    journal = (two / "measurements.jsonl").read_bytes()
    words = ("--simulate", "amd-v100", "--hosts", hosts("a1", "a2", "a3", "a4"), *FEW)
    done("plan", two, *words)
    plan = load_plan(two)
    check_files(two)
    assert plan.cluster.names == ("a1", "a2", "a3", "a4")
    assert len(plan.cluster.classes) == 1
    assert plan.rate_gbps == pytest.approx(before.rate_gbps, rel=0.01)
    assert plan.sets_measured == 0
    assert (two / "measurements.jsonl").read_bytes() == journal


def test_hosts_of_another_machine_are_measured_and_merged_as_in_a_fresh_plan(two, hosts, tmp_path):
    kept = {path.name: path.read_bytes() for path in (two / "tables").iterdir()}
    more = ("--simulate", "intel-v100", "--hosts", hosts("a1", "a2", "b1", "b2"))
    done("plan", two, *more, *FEW)
    plan = load_plan(two)
    assert [one.name for one in plan.cluster.classes] == ["amd-v100", "intel-v100"]
    models = [load_machine("amd-v100"), load_machine("intel-v100")]
    assert plan.rate_gbps == pytest.approx(fresh_rate(*models), rel=0.01)
    tables = {path.name for path in (two / "tables").iterdir()}
    assert tables > set(kept)
    done("export", two, "--hosts", "a2,b1", "-o", tmp_path / "job")
    assert load_plan(tmp_path / "job").rate_gbps == pytest.approx(plan.rate_gbps, rel=0.01)


def test_a_host_with_other_rates_is_named_and_gets_a_class_of_its_own(two, hosts, tmp_path):
    model = json.loads(encode_json(load_machine("amd-v100")))
    for capacity in model["capacities"]:
        for figure in capacity.values():
            if isinstance(figure, dict) and "provenance" in figure:
                figure["scale"] = figure.get("scale", 1.0) / 3
    (tmp_path / "slow.json").write_text(json.dumps(model))
    before = load_plan(two).rate_gbps
    words = ("--simulate", tmp_path / "slow.json", "--hosts", "a[1-3]", *FEW)
    result = done("plan", two, *words)
    plan = load_plan(two)
    assert plan.cluster.host_classes == {"a1": 0, "a2": 0, "a3": 1}
    assert any("slower than its class" in notice for notice in plan.notices), result.stdout
    assert plan.rate_gbps < before
    done("export", two, "--hosts", "a1,a2", "-o", tmp_path / "job")
    assert load_plan(tmp_path / "job").rate_gbps == pytest.approx(before, rel=0.01)


def test_tables_for_more_gpus_are_added_and_the_others_are_kept(two, hosts):
    kept = {path.name: path.read_bytes() for path in (two / "tables").iterdir()}
    more = ("--hosts", hosts("a1", "a2"), "--gpus-per-job", "3,1-2", *FEW)
    done("plan", two, "--simulate", "amd-v100", *more)
    plan = load_plan(two)
    assert plan.cluster.names == ("a1", "a2")
    tables = {one.gpus for one in read_tables(two, plan.cluster.classes)}
    assert {(0, 1, 2), (1, 2)} < tables
    assert all((two / "tables" / name).read_bytes() == text for name, text in kept.items())
    assert plan.sets_measured > 0


def test_simulated_hosts_do_not_join_measured_ones(two, hosts, tmp_path):
    plan = load_plan(two)
    stock = msgspec.structs.replace(plan.choices["default"], assumed=False)
    measured = replace_plan(plan, simulated=False, default=stock)
    write_plan(measured, two, tables=kept_files(two))
    words = ("--simulate", "amd-v100", "--hosts", "a[1-3]")
    result = tccl("plan", two, *words)
    assert result.exit_code == 2
    assert "measured rates" in result.stderr


def test_an_interrupted_search_leaves_a_whole_plan_as_it_was(two, monkeypatch):
    before = {
        path: path.read_bytes()
        for path in two.rglob("*")
        if path.suffix != ".jsonl" and path.is_file()
    }
    monkeypatch.setattr("tccl_py.cli.plan.ProgressLine", Impatient)
    for more in (("--hosts", "a1,a2,b1"), ("--hosts", "a1,a2", "--force")):
        words = ("--simulate", "intel-v100", *more, "--rings", "1", "--max-sets", "60")
        cut = tccl("plan", two, *words)
        assert cut.exit_code == 130, cut.stderr
        assert all(path.read_bytes() == text for path, text in before.items())


def test_new_hosts_need_a_switch_where_the_plan_has_switches(tmp_path, hosts):
    tree = "switches:\n  - name: s1\n    uplink_gbps: 5\n    hosts: [{}]\n"
    few, more = tmp_path / "few.yaml", tmp_path / "more.yaml"
    few.write_text(tree.format("a1, a2"))
    more.write_text(tree.format("a1, a2, a3").replace("    uplink_gbps: 5\n", ""))
    words = (tmp_path / "p", "--simulate", "amd-v100", *FEW)
    done("plan", *words, "--hosts", hosts("a1", "a2"), "--switches", few)
    new = ("--hosts", "a[1-3]")
    assert "--switches" in tccl("plan", tmp_path / "p", *new).stderr
    done("plan", tmp_path / "p", *new, "--switches", more)
    tree = load_plan(tmp_path / "p").cluster.switches
    assert [one.uplink_gbps for one in tree.all_switches if one.name == "s1"] == [5]


# Hosts that differ.


MACHINE = networked_machine(gpus=2, nics=1)
SET = parse_set("N0->N0->G0 G0->G0->G1 G1->N0->N0")


class Hosts:
    """Hosts with rates; a set has that of the slowest of its hosts."""

    simulated = False

    def __init__(self, rates):
        self.rates = rates
        self.asked = []

    def measure(self, sets):
        return [self.one(transfers) for transfers in sets]

    def one(self, transfers):
        names = {
            p.host for f in transfers.flows for t in f.transfers for p in (t.source, t.destination)
        }
        self.asked.append(names)
        rate = min(self.rates[name] for name in names)
        samples = tuple((rate, rate * 1.01, rate * 0.99) for _ in transfers.flows)
        return Measurement(transfers=transfers, samples_gbps=samples, simulated=False)


def cluster(count):
    known = NodeClass(name="box", machine=MACHINE)
    hosts = tuple(Host(name=f"h{n}", node_class=0, slots=2) for n in range(count))
    return Cluster(hosts=hosts, classes=(known,))


@pytest.mark.parametrize(
    "rates, hosts, known, odd",
    [
        ([10, 10, 10, 10], ["h2", "h3"], ["h0"], []),
        ([10, 10, 10, 6], ["h2", "h3"], ["h0"], ["h3"]),
        ([10, 10, 10, 14], ["h2", "h3"], [], []),  # its partner hides that it is faster
        # Beside a slow partner another is tried.
        ([10, 10, 6, 10], ["h1", "h2", "h3"], [], ["h2"]),
        # Of two hosts alone nobody can tell.
        ([10, 10, 10, 6], ["h2", "h3"], [], ["h2", "h3"]),
        ([10, 10, 10.5, 9.5], ["h2", "h3"], ["h0"], []),
    ],
)
def test_hosts_that_differ_beyond_the_interval_are_named(rates, hosts, known, odd):
    source = Hosts({f"h{n}": rate for n, rate in enumerate(rates)})
    samples = [Sample(SET, 10.0, 0.01)]
    found = odd_hosts(Bench(source), cluster(4), hosts, samples, known)
    assert list(found) == odd
    assert all("slower" in why for why in found.values())


def test_equal_machines_join_a_class_and_known_hosts_keep_their_machine():
    old, other = cluster(2), networked_machine(gpus=3, nics=1)
    new = HostReport(host="n", machine=MACHINE)
    assert cluster_of([new], known=old).host_classes == {"h0": 0, "h1": 0, "n": 0}
    assert cluster_of([HostReport(host="h1", machine=MACHINE)], known=old) == old
    merged = cluster_of([HostReport(host="n", machine=other)], known=old)
    assert [one.name for one in merged.classes] == ["box", other.name]
    with pytest.raises(InputError, match="another machine"):
        cluster_of([HostReport(host="h0", machine=other)], known=old)


# The journal of all hosts.


def header(*hosts, driver="1", rest="host backend, repeats 6"):
    parts = dict.fromkeys(hosts, f"GPUs x; driver {driver}")
    return JournalHeader(
        machine=",".join(hosts), identity=rest, hosts=parts, simulated=False, dry_run=True
    )


def test_a_journal_of_more_hosts_holds_for_fewer_and_no_others():
    both = header("h0", "h1")
    assert both.covers(header("h1"))
    assert both.covers(both)
    assert not header("h1").covers(both)
    assert not both.covers(header("h1", driver="2"))
    assert not both.covers(header("h1", rest="host backend, repeats 7"))
    alone = JournalHeader(machine="box", identity="GPUs x; driver 1", simulated=False)
    assert not both.covers(alone)
    assert not alone.covers(header("h1"))


def test_a_class_is_found_in_the_journal_whatever_hosts_it_was_measured_on(two, hosts, tmp_path):
    done("plan", two, "--hosts", "a[1-3]")
    plan = load_plan(two)
    (path, *_) = plan.paths
    wanted = transfer_set(hop.flow for chain in path.chains for hop in chain.hops)
    journal = JournalFile(tmp_path / "journal", header("a1", "a2", "a3"))
    source = Bench(Hosts({"a2": 5.0, "a3": 5.0}), journal=journal)
    (place,) = placements(part_of(plan.cluster, ("a3", "a2")))
    PlacedSource(source, place).measure([wanted])
    source.close()
    (found,) = journal_by_class(plan, read_journal(tmp_path / "journal"))
    assert [one.rate_gbps for one in found[wanted]] == [5.0]


def test_a_widened_journal_keeps_its_measurements(tmp_path):
    path = tmp_path / "journal"
    journal = JournalFile(path, header("h0", "h2"))
    one = Measurement(
        transfers=parse_set("h0.G0->h0.G0->h0.G1"), samples_gbps=((1.0,),), simulated=False
    )
    journal.append(one)
    journal.close()
    widen_journal(path, header("h1", "h2"))
    found = read_journal(path)
    assert found.header == header("h0", "h1", "h2")
    assert list(found.measurements) == [one.transfers]
    before = path.read_bytes()
    widen_journal(path, header("h1"))
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="host h1"):
        widen_journal(path, header("h1", driver="2"))
