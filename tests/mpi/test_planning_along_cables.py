"""Hosts in network namespaces that cables join: a plan goes along them, and names a wrong one."""

import json

import pytest

from tccl_py.plan.load import load_plan
from tests.namespaces import MANAGEMENT, PAYLOAD, namespaces_in, near
from tests.skips import needs_idle_cores, unless_busy

pytestmark = pytest.mark.mpi

LINK_GBPS = 0.3
GIVEN = ("h0", "h2", "h1", "h3")
"""Of the hosts beside each other in this order, two pairs have no cable."""
CABLES = tuple((f"h{n}", "eth0", f"h{(n + 1) % 4}", "eth1") for n in range(4))
FEW = ("--backend", "host", "--devices", "1", "--interfaces", "eth0,eth1", "--target", "0.3")
PLAN = ("plan", *FEW, "--rings", "1", "--max-sets", "1", "--json")


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cables")
    with namespaces_in(folder, link_gbps=LINK_GBPS, cables=CABLES) as made:
        yield made


@pytest.fixture(scope="module")
def planned(namespaces, tmp_path_factory):
    """The plan, and the bytes that each interface received while it was made."""
    needs_idle_cores()
    folder = tmp_path_factory.mktemp("plan") / "plan"
    ends = [end for a, x, b, y in CABLES for end in ((a, x), (b, y))]
    before = [namespaces.received(*end) for end in ends]
    with unless_busy(workers=4):
        ran = namespaces.run(*PLAN, str(folder), hosts=GIVEN, timeout_s=240)
        assert ran.code == 0, ran.stderr
    after = [namespaces.received(*end) for end in ends]
    received = {end: now - then for end, now, then in zip(ends, after, before, strict=True)}
    return json.loads(ran.stdout), load_plan(folder), received, folder


def test_the_rings_go_along_the_cables_that_the_subnets_tell(planned):
    _, plan, *_ = planned
    joined = {end for a, x, b, y in CABLES for end in (((a, x), (b, y)), ((b, y), (a, x)))}
    assert sorted(plan.host_order) == ["h0", "h1", "h2", "h3"]
    names = {nic.index: nic.name for nic in plan.cluster.classes[0].machine.nics}
    for host, following in zip(plan.hosts, (*plan.hosts[1:], plan.hosts[0]), strict=True):
        chains = plan.paths[host.path].chains, plan.paths[following.path].chains
        for out, into in zip(*chains, strict=True):
            ends = (host.name, names[out.exit_nic]), (following.name, names[into.entry_nic])
            assert ends in joined


def test_chains_are_measured_over_the_cables_of_the_plan_at_their_rate(planned):
    told, plan, received, _ = planned
    # A ring that passed a cable twice in one direction would have half of it.
    with unless_busy(workers=4):
        assert told["rate_gbps"] == near(LINK_GBPS * PAYLOAD)
        assert plan.whole_ring_gbps == near(LINK_GBPS * PAYLOAD)
    # The whole ring passes each cable once, in one direction.
    assert sum(count > 1 << 20 for count in received.values()) >= len(CABLES)


def test_a_cable_of_the_file_that_the_addresses_contradict_is_named(namespaces, tmp_path):
    file = tmp_path / "cables.yaml"
    wrong = [("h1", "eth1", "h3", "eth1"), ("h0", "eth0", "h3", "eth0"), CABLES[1]]
    wrong.append(("h0", "eth1", "h2", "eth0"))
    lines = [f"  - [{a}:{x}, {b}:{y}]" for a, x, b, y in wrong]
    file.write_text("\n".join(["cables:", *lines, ""]))
    ran = namespaces.run(*PLAN, str(tmp_path / "plan"), "--switches", str(file), hosts=GIVEN)
    assert ran.code == 2
    assert "N1 of h1, which is 10.50.0.2/24, and N1 of h3, 10.50.2.2/24" in ran.stderr
    assert not (tmp_path / "plan").exists()


def test_a_host_with_an_address_of_another_cable_has_no_way(namespaces, tmp_path):
    namespaces.ip("h1", "addr", "del", "10.50.0.2/24", "dev", "eth1")
    namespaces.ip("h1", "addr", "add", "10.50.9.2/24", "dev", "eth1")
    try:
        ran = namespaces.run(*PLAN, str(tmp_path / "plan"), hosts=GIVEN)
    finally:
        namespaces.ip("h1", "addr", "del", "10.50.9.2/24", "dev", "eth1")
        namespaces.ip("h1", "addr", "add", "10.50.0.2/24", "dev", "eth1")
    assert ran.code == 2
    assert "no two lead to h0, h1" in ran.stderr


def test_jobs_of_the_plan_are_verified_in_its_order(planned, namespaces):
    _, plan, *_ = planned
    words = ("--backend", "host", "--no-checks", "--sizes", "4K", "--rounds", "6", "--json")
    ran = namespaces.run(
        *("verify", str(planned[3]), *words, "--seconds", "0.2"),
        hosts=GIVEN,
        options=("-x", f"GLOO_SOCKET_IFNAME={MANAGEMENT}"),
        # The first import of torch takes a while on each host.
        timeout_s=300,
    )
    assert ran.code in (0, 1), ran.stderr
    told = json.loads(ran.stdout)
    assert told["hosts"] == list(plan.host_order)


def test_a_check_names_a_cable_that_no_longer_leads_where_the_plan_has_it(planned, namespaces):
    namespaces.ip("h1", "addr", "del", "10.50.0.2/24", "dev", "eth1")
    namespaces.ip("h1", "addr", "add", "10.50.9.2/24", "dev", "eth1")
    try:
        ran = namespaces.run("check", str(planned[3]), hosts=GIVEN)
    finally:
        namespaces.ip("h1", "addr", "del", "10.50.9.2/24", "dev", "eth1")
        namespaces.ip("h1", "addr", "add", "10.50.0.2/24", "dev", "eth1")
    assert ran.code == 2
    assert "N0 of h0, which is 10.50.0.1/24, and N1 of h1, 10.50.9.2/24" in ran.stderr
