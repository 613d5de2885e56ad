"""Jobs over pairs of hosts in network namespaces, planned by the tables of one measured plan."""

import itertools
import json

import pytest

from tccl_py.plan.load import load_plan
from tests.mpi.test_planning_over_hosts import (
    GIVEN,
    LINK_GBPS,
    SWITCHES,
    namespaces,  # noqa: F401 (a fixture)
    planned,  # noqa: F401 (a fixture)
    shaped_rate,
)
from tests.namespaces import PAYLOAD, RACKS
from tests.test_cli_plan import done

pytestmark = pytest.mark.mpi


def test_every_pair_gets_what_the_shaped_network_leaves_and_nothing_is_measured(
    planned,  # noqa: F811
    tmp_path,
):
    _, directory = planned
    before = (directory / "measurements.jsonl").read_bytes()
    for pair in itertools.combinations(GIVEN, 2):
        place = tmp_path / "-".join(pair)
        done("export", directory, "--hosts", ",".join(pair), "-o", place)
        job = load_plan(place)
        assert job.host_order == pair
        assert not job.simulated
        beside = len({RACKS[host] for host in pair}) == 1
        expected = LINK_GBPS * PAYLOAD if beside else shaped_rate(pair)
        assert job.rate_gbps == pytest.approx(expected, rel=0.2)
    assert (directory / "measurements.jsonl").read_bytes() == before


def test_a_pair_gets_what_a_fresh_plan_of_the_pair_has(planned, namespaces, tmp_path):  # noqa: F811
    _, directory = planned
    switches = tmp_path / "switches.yaml"
    switches.write_text(SWITCHES)
    done("export", directory, "--hosts", "h0,h2", "-o", tmp_path / "job")
    job = load_plan(tmp_path / "job")
    command = ["plan", "-o", str(tmp_path / "fresh"), "--backend", "host", "--devices", "1"]
    command += ["--interfaces", "eth0", "--switches", str(switches), "--rings", "1"]
    command += ["--target", "0.3", "--max-sets", "4", "--json"]
    ran = namespaces.run(*command, hosts=("h0", "h2"), timeout_s=240)
    assert ran.code == 0, ran.stderr
    fresh = json.loads(ran.stdout)
    assert job.rate_gbps == pytest.approx(fresh["rate_gbps"], rel=0.2)
    assert job.hosts == load_plan(tmp_path / "fresh").hosts
