"""Jobs planned by tables: against brute force, fresh plans, NCCL's rules, and the clock."""

import itertools
import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import SearchError
from tccl_py.model.cluster import Cluster, Host, NodeClass, gpus_text
from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.rings import Hop
from tccl_py.nccl.network import chain_hop_space, paired_chain_set
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.nccl.view import view
from tccl_py.plan.chains import Choice
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import check_plan, load_plan
from tccl_py.plan.staging import check_files
from tccl_py.plan.tables import ClassRates, KeptChains, KeptTable, table_files
from tccl_py.planning.jobs import as_achieved, bound_of, plan_of_job
from tccl_py.planning.join import plan_over
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.hosts import HostSlots, listed_hosts
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.source import Simulator
from tests.cluster_plans import mixed
from tests.networked import networked_machine
from tests.test_cli_plan import done, tccl

UNDER = Settings(channels=2)
MACHINE = networked_machine(gpus=3, nics=2, numa_nodes=2)
GPUS = [(0, 1, 2), (0, 1), (1, 2), (2,)]
PAIRINGS = {
    1: [((0, 0),), ((0, 1),), ((1, 0),), ((1, 1),)],
    2: [((0, 0), (1, 1)), ((0, 1), (1, 0))],
}


def table(number, gpus, rates):
    """A table with a rate for each pairing of one number of chains, 0 for none."""
    space = chain_hop_space(view(MACHINE, Knowledge(), UNDER, gpus=gpus), chains_in_set=1)
    hops, paired = {}, []
    for pairs, rate in rates.items():
        if rate:
            chains = paired_chain_set(space, pairs)
            numbers = tuple(
                tuple(hops.setdefault(Hop(h.source, h.target, h.flow), len(hops)) for h in c.hops)
                for c in chains
            )
            share = rate / len(pairs)
            gbps = tuple((share,) * len(chain) for chain in numbers)
            paired.append(
                KeptChains(under=0, pairs=pairs, chains=numbers, gbps=gbps, rate_gbps=rate)
            )
    best = max(paired, key=lambda one: one.rate_gbps)
    marked = msgspec.structs.replace(best, best=True, chosen=True)
    slowest = min(rate for rate in rates.values() if rate)
    own = Choice(name="default", settings=UNDER, predicted_gbps=slowest)
    kept = KeptTable(
        node_class=f"box{number}",
        gpus=gpus,
        nics=(0, 1),
        simulated=True,
        default_settings=Settings(),
        rated_default=own,
        default=own,
        settings=(UNDER,),
        hops=tuple(hops),
        answers=tuple(marked if one is best else one for one in paired),
    )
    return ClassRates(NodeClass(name=kept.node_class, machine=MACHINE), kept)


def possible(gpus, pairs):
    """Return whether NCCL runs these chains: a single GPU has one NIC for both directions."""
    return len(gpus) > 1 or all(one == other for one, other in pairs)


def brute_force(hosts, tables, count, rails):
    """The best ring of all orders of hosts and all crossings of NICs."""
    best, (first, *rest) = 0.0, range(len(hosts))
    crossings = [(0,), (1,)] if count == 1 else [(0, 1), (1, 0)]
    if rails == "any":
        best = min(max(tables[one].values()) for one in hosts)
    for order in itertools.permutations(rest):
        of = [tables[hosts[at]] for at in (first, *order)]
        for taken in itertools.product(crossings, repeat=len(hosts)):
            rates = []
            for at, rates_of in enumerate(of):
                pairs = tuple(sorted(zip(taken[at - 1], taken[at], strict=True)))
                rates.append(rates_of.get(pairs, 0.0))
            best = max(best, min(rates))
    return best


rate_tables = st.sampled_from([1, 2]).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.tuples(
                st.sampled_from(GPUS),
                st.lists(
                    st.integers(0, 40).map(float),
                    min_size=len(PAIRINGS[count]),
                    max_size=len(PAIRINGS[count]),
                ),
            ),
            min_size=1,
            max_size=4,
        ),
    )
)


def test_rings_of_a_job_leave_out_the_nics_that_those_of_the_plan_leave_out():
    # NCCL's own chains are in the table too, and use all NICs.
    both = table(0, GPUS[0], {((0, 0),): 5.0, ((1, 1),): 9.0})
    node = ClassRates(both.node_class, msgspec.structs.replace(both.kept, nics=(0,)))
    hosts = tuple(Host(name=f"h{n}", node_class=0, slots=3) for n in range(2))
    cluster = Cluster(hosts=hosts, classes=(node.node_class,), rails="any")
    plan = plan_over(cluster, [node], PlanRequest())
    assert {(c.entry_nic, c.exit_nic) for path in plan.paths for c in path.chains} == {(0, 0)}
    assert (plan.rate_gbps, plan.settings.ib_hca) == (5.0, ("mlx5_0:1",))


@settings(max_examples=250, deadline=None)
@given(rate_tables, st.data(), st.sampled_from(["any", "only"]))
def test_jobs_over_random_tables_equal_brute_force_unlike_gpus_included(case, data, rails):
    count, kinds = case
    rates = [
        {
            pairs: rate if possible(gpus, pairs) else 0.0
            for pairs, rate in zip(PAIRINGS[count], row, strict=True)
        }
        for gpus, row in kinds
    ]
    # A class has a chain.
    rates = [row if any(row.values()) else {PAIRINGS[count][0]: 1.0} for row in rates]
    nodes = [table(n, kinds[n][0], row) for n, row in enumerate(rates)]
    hosts = data.draw(st.lists(st.integers(0, len(nodes) - 1), min_size=2, max_size=4))
    cluster = Cluster(
        hosts=tuple(
            Host(name=f"h{n}", node_class=one, slots=len(nodes[one].gpus))
            for n, one in enumerate(hosts)
        ),
        classes=tuple(node.node_class for node in nodes),
        rails=rails,
    )
    used = set(hosts)
    if used != set(range(len(nodes))):
        numbers = sorted(used)
        renumbered = tuple(
            msgspec.structs.replace(host, node_class=numbers.index(host.node_class))
            for host in cluster.hosts
        )
        classes = tuple(nodes[n].node_class for n in numbers)
        cluster = msgspec.structs.replace(cluster, hosts=renumbered, classes=classes)
        nodes = [nodes[n] for n in numbers]
    expected = brute_force(hosts, rates, count, rails)
    try:
        plan = plan_over(cluster, nodes, PlanRequest())
    except SearchError:
        assert expected == 0
        return
    assert plan.rate_gbps == expected
    assert min(path.rate_gbps for path in plan.paths) == pytest.approx(expected)
    check_plan(plan, where="job")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A plan of four hosts, and its directory."""
    place = tmp_path_factory.mktemp("plans") / "four"
    done("plan", place, "--simulate", "amd-v100", "--nodes", "4", *FEW)
    return place


FEW = ("--rings", "1", "--max-sets", "60")


@pytest.mark.parametrize("gpus", [None, "0-1", "0"])
def test_a_job_gets_what_a_fresh_plan_of_its_hosts_has_and_nothing_is_measured(
    gpus, four, tmp_path
):
    more = () if gpus is None else ("--gpus", gpus)
    before = (four / "measurements.jsonl").read_bytes()
    result = done("export", four, "--hosts", "node[2,4]", *more, "-o", tmp_path / "job")
    assert "GB/s (simulated" in result.stderr
    assert (four / "measurements.jsonl").read_bytes() == before
    job = load_plan(tmp_path / "job")
    check_files(tmp_path / "job")
    hosts = tmp_path / "hosts.txt"
    slots = 4 if gpus is None else len(listed(gpus))
    hosts.write_text(f"node2 slots={slots}\nnode4 slots={slots}\n")
    fresh_at = (tmp_path / "fresh", "--hosts", hosts)
    done("plan", *fresh_at, "--simulate", "amd-v100", "--gpus-per-job", "1", *FEW)
    fresh = load_plan(tmp_path / "fresh")
    assert job.rate_gbps == pytest.approx(fresh.rate_gbps, rel=0.01)
    assert job.cluster.names == ("node2", "node4")
    assert job.class_gpus == fresh.class_gpus
    assert job.choices["default"].rate_gbps == pytest.approx(fresh.choices["default"].rate_gbps)
    assert job.recommended == fresh.recommended
    assert job.sets_measured == 0
    told = json.loads(done("show", tmp_path / "job", "--json").stdout)
    assert set(told["choices"]) == {"default", "variables", "graph"}


def listed(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_the_files_of_a_job_with_unlike_gpus_close_into_its_rings(four, tmp_path):
    given = ("--hosts", "node1,node2,node4", "--gpus", "node[1,4]:0-1;node2:0")
    done("export", four, *given, "-o", tmp_path / "job")
    plan = load_plan(tmp_path / "job")
    assert {host.name: plan.gpus_of(host) for host in plan.hosts} == {
        "node1": (0, 1),
        "node2": (0,),
        "node4": (0, 1),
    }
    jobs = []
    for host in plan.hosts:
        one = plan.cluster.classes[plan.class_number(host)]
        graph = (tmp_path / "job" / "nccl" / "hosts" / f"{host.name}.xml").read_text()
        gpus = plan.gpus_of(host)
        jobs.append(NodeJob(machine=one.machine, knowledge=one.knowledge, gpus=gpus, graph=graph))
    variables = environment(plan.settings)
    found = validate_cluster(jobs, version=plan.settings.version, environment=variables)
    assert found.verdict == "used", found.reason
    assert {tuple(ring) for ring in found.rings} == set(plan.orders)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--hosts", "node1"), "names 1 host"),
        (("--hosts", "node[1-5]"), "node5"),
        (("--hosts", "0-1"), "'node[1-4]'"),
        (("--hosts", "node[1-2]", "--gpus", "0-7"), "GPU 4: is not in machine"),
        (("--hosts", "node[1-2]:3", "--gpus", "0-1"), "3 ranks"),
        (("--hosts", "node[1-2]", "--gpus", "node3:0-1"), "names 'node3'"),
        (("--hosts", "node[1-2]", "--gpus", "node1:0;node1:1"), "twice"),
        (("--hosts", "node[1-2", "--gpus", "0-1"), "brackets"),
        (("--gpus", "0-1"), "needs --hosts"),
        (("--hosts", "node[1-2]", "--runtime", "tccl"), "--hosts"),
    ],
)
def test_jobs_that_are_refused(words, said, four, tmp_path):
    result = tccl("export", four, *words, "-o", tmp_path / "job")
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert said in result.stderr
    assert not (tmp_path / "job").exists()


def test_a_job_over_gpus_without_a_table_gets_default_nccl_and_a_bound_for_its_rate(four, tmp_path):
    place = tmp_path / "job"
    result = done(
        "export", four, "--hosts", "node[1,3]", "--gpus", "node1:0-2;node3:0,1", "-o", place
    )
    assert "DIR --gpus-per-job 0-2" in result.stderr
    assert "at most" in result.stderr
    assert not list(place.rglob("*.xml"))
    assert (place / "nccl/order/hosts.txt").read_text() == "node1\nnode3\n"
    script = (place / "nccl/env.sh").read_text()
    assert "not known, at most" in script
    assert "unset NCCL_GRAPH_FILE" in script and "export" not in script
    # Nothing takes it for a plan with rates.
    refused = tccl("env", place)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"`. {place}/nccl/env.sh`" in refused.stderr.replace("\n", " ")


def test_a_job_of_a_verified_plan_has_the_share_of_its_rates_that_jobs_got_and_no_bound():
    plan = mixed()
    made = as_achieved(plan, plan, {"graph": plan.rate_gbps / 2, "default": 2.5}, "graph")
    assert (made.bound_gbps, made.proven, made.winner) == (None, False, "graph")
    assert made.rate_gbps == plan.rate_gbps / 2
    shares = dict.fromkeys(("default", "variables"), 2.5 / plan.choices["default"].rate_gbps)
    for name, share in shares.items():
        assert made.choices[name].rate_gbps == plan.choices[name].rate_gbps * share


def test_a_job_can_be_shown_but_makes_no_further_jobs(four, tmp_path):
    job, hosts = tmp_path / "job", ("--hosts", "node[1,3]")
    assert f". {job}/nccl/env.sh" in done("export", four, *hosts, "-o", job).stderr
    shown = " ".join(done("show", job).stdout.split())
    assert "plugin by `tccl env DIR --plugin`" in shown and "cost none: " in shown
    refused = tccl("export", job, *hosts, "-o", tmp_path / "other")
    assert refused.exit_code == 2
    assert "name the cluster's plan" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name, gpus", [("amd-v100", "0-2"), ("nvswitch-8gpu-8nic", "0+2+5")])
def test_no_rate_of_default_nccl_exceeds_the_bound_of_a_job_without_a_table(name, gpus):
    def tables_for(sets):
        found = []
        make_cluster_plan(pair, [source], budget=Budget(sets=8), tables=found, gpus_per_job=sets)
        return [ClassRates(pair.classes[0], one) for one in found]

    model = load_machine(name)
    source = Simulator(model)
    pair = cluster_of(
        [HostReport(host=h, machine=model.machine, knowledge=model.knowledge) for h in "ab"]
    )
    measured = tables_for(gpus)[-1]
    assert gpus_text(measured.gpus) == gpus
    rate = measured.rated_default.rate_gbps
    default = measured.kept.default_settings
    bound = bound_of(pair, [measured.gpus], [tables_for("1")], default)
    assert rate <= bound < 400
    # A class with a table bounds the job by its own rate.
    narrower = bound_of(pair, [measured.gpus], [[measured]], default)
    assert narrower == min(bound, measured.default.rate_gbps)


@pytest.mark.parametrize("nics", [1, 2, 3, 8])
@pytest.mark.parametrize("gbps", [50.0, 25.0])
def test_chains_of_a_job_share_the_ports_of_its_nics(nics, gbps):
    machine = load_machine("nvswitch-8gpu-8nic").machine
    ports = [msgspec.structs.replace(nic, speed_mbps=int(gbps * 8000)) for nic in machine.nics]
    machine = msgspec.structs.replace(machine, nics=tuple(ports[:nics]))
    pair = cluster_of([HostReport(host=name, machine=machine) for name in "ab"])
    other = SimpleNamespace(gpus=(0,), default="")
    # NCCL has several chains by each NIC of a few: they get no more than the port has.
    bound = bound_of(pair, [machine.gpu_indices], [[other]], Settings(version="2.28"))
    assert bound == pytest.approx(nics * gbps)


# Of equal hosts all pairs are the same job: the third is of another machine.


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """A plan of three hosts whose searches measured all that can be faster, and its maker."""

    def made(names, **more):
        reports = [
            HostReport(host=name, machine=one.machine, knowledge=one.knowledge)
            for name, one in ((name, models[name[0]]) for name in names)
        ]
        cluster = cluster_of(reports)
        kinds = dict.fromkeys(name[0] for name in names)
        sources = [Simulator(models[kind]) for kind in kinds]
        return make_cluster_plan(
            cluster, sources, ring_counts=(1,), budget=Budget(sets=20_000), **more
        )

    models = {"a": load_machine("amd-v100"), "b": load_machine("intel-v100")}
    tables = []
    plan = made(["a1", "a2", "b1"], tables=tables)
    place = tmp_path_factory.mktemp("unlike") / "plan"
    place.mkdir()
    write_plan(plan, place, tables=table_files(tables))
    return place, made


@pytest.mark.parametrize("pair", [("a1", "a2"), ("a1", "b1")])
def test_a_pair_gets_exactly_what_its_fresh_plan_has_where_searches_end_by_themselves(pair, unlike):
    place, made = unlike
    job = plan_of_job(load_plan(place), place, [HostSlots(name) for name in pair])
    fresh = made(pair, gpus_per_job="4")
    # Both searches are exhausted: with fewer sets the fresh plan could be worse than the tables.
    assert fresh.proven
    assert job.rate_gbps == fresh.rate_gbps
    assert job.paths == fresh.paths and job.settings == fresh.settings
    for name in ("default", "variables"):
        assert job.choices[name].rate_gbps == fresh.choices[name].rate_gbps
    assert job.recommended == fresh.recommended


def test_a_job_needs_a_place_and_a_plan_of_a_cluster(four, tmp_path):
    assert "add -o DIR" in tccl("export", four, "--hosts", "node[1-2]").stderr
    done("plan", tmp_path / "one", "--simulate", "amd-v100", "--max-sets", "20")
    alone = tccl("export", tmp_path / "one", "--hosts", "a,b", "-o", tmp_path / "job")
    assert "is not in the plan" in alone.stderr


def test_hosts_are_listed_by_a_file_or_as_slurm_has_them(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("gpu01 slots=2\ngpu02\n")
    assert listed_hosts(str(path), where="") == (HostSlots("gpu01", 2), HostSlots("gpu02"))
    assert [one.name for one in listed_hosts("gpu[01-02],login", where="")] == [
        "gpu01",
        "gpu02",
        "login",
    ]
