"""A plan that grows: hosts added to it under mpirun, alike and slowed ones."""

import itertools
import json

import pytest

from tccl_py.plan.load import load_plan
from tests.namespaces import PAYLOAD, namespaces_in
from tests.test_cli_plan import done

pytestmark = pytest.mark.mpi

LINK_GBPS, SLOW_GBPS = 0.25, 0.1
QUICK = ("--backend", "host", "--devices", "1", "--interfaces", "eth0", "--rings", "1")
QUICK += ("--target", "0.3", "--max-sets", "4", "--gpus-per-job", "1")


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    with namespaces_in(folder, link_gbps=LINK_GBPS, uplink_gbps=4 * LINK_GBPS) as made:
        yield made


def planned(namespaces, directory, hosts, *more):
    ran = namespaces.run("plan", "-o", str(directory), *QUICK, *more, hosts=hosts, timeout_s=120)
    assert ran.code == 0, ran.stderr
    return load_plan(directory)


@pytest.fixture(scope="module")
def grown(namespaces, tmp_path_factory):
    """A plan of two hosts before and after two more were added, and its directory."""
    directory = tmp_path_factory.mktemp("plans") / "plan"
    first = planned(namespaces, directory, ("h0", "h1"))
    before = (directory / "measurements.jsonl").read_text().splitlines()
    namespaces.slow("h3", SLOW_GBPS)
    # Host h0 does not run.
    return first, before, planned(namespaces, directory, ("h1", "h2", "h3"), "--extend"), directory


def test_an_equal_host_is_sampled_and_a_slow_one_gets_a_class_of_its_own(grown):
    first, before, plan, directory = grown
    assert first.cluster.names == ("h0", "h1")
    assert plan.cluster.names == ("h0", "h1", "h2", "h3")
    classes = plan.cluster.host_classes
    assert classes["h0"] == classes["h1"] == classes["h2"] != classes["h3"]
    assert any("h2" in notice and "samples" in notice for notice in plan.notices)
    assert any(notice.startswith("host h3: ") and "slower" in notice for notice in plan.notices)
    assert plan.rate_gbps == pytest.approx(SLOW_GBPS * PAYLOAD, rel=0.2)
    # What was measured is kept, and the class of h2 was not measured again.
    lines = (directory / "measurements.jsonl").read_text().splitlines()
    assert lines[1 : len(before)] == before[1:]
    sets = [json.loads(line)["transfers"] for line in lines[len(before) :]]
    of_h2 = [text for text in sets if "h2." in text and "h3." not in text]
    assert 0 < len(of_h2) <= 6


def test_every_pair_of_the_grown_plan_gets_what_its_links_have(grown, tmp_path):
    *_, plan, directory = grown
    for pair in itertools.combinations(plan.cluster.names, 2):
        place = tmp_path / "-".join(pair)
        done("export", directory, "--hosts", ",".join(pair), "-o", place)
        slowest = SLOW_GBPS if "h3" in pair else LINK_GBPS
        assert load_plan(place).rate_gbps == pytest.approx(slowest * PAYLOAD, rel=0.2)


def test_a_fresh_plan_finds_the_slow_host_and_predicts_the_same(grown, namespaces, tmp_path):
    *_, plan, _ = grown
    fresh = planned(namespaces, tmp_path / "fresh", ("h1", "h2", "h3"))
    assert fresh.rate_gbps == pytest.approx(plan.rate_gbps, rel=0.2)
    classes = fresh.cluster.host_classes
    assert classes["h1"] == classes["h2"] != classes["h3"]
