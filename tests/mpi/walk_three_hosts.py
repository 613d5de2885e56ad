"""The tutorial "Three small hosts, no switch", walked in network namespaces: about 10 minutes.

    pytest tests/mpi/walk_three_hosts.py

Interfaces have the names of the page's functions, four a host, with a subnet for each pair of
functions that a cable joins. Host memory stands for GPUs, and TCP for RDMA.
"""

import json
import subprocess
import sys

import pytest

from tccl_py.model.cluster import cabled_nics
from tccl_py.plan.load import load_plan
from tccl_py.readers.cables import cables_of
from tccl_py.readers.switches import parse_switch_yaml
from tccl_py.simulator.descriptions import load_bundled
from tests.namespaces import MANAGEMENT, namespaces_in
from tests.test_docs import shown_files

pytestmark = pytest.mark.mpi

HOSTS = ("spark1", "spark2", "spark3")
MACHINE = load_bundled("gb10-2port").machine
FUNCTIONS = [nic.name for nic in MACHINE.nics]
FILES = shown_files()
LIMITS = ("--rings", "2", "--max-sets", "1", "--target", "0.9", "--keep-order", "--json")
DRY = ("--backend", "host", "--devices", "1", "--interfaces", ",".join(FUNCTIONS))
PLAN = ("plan", *DRY, *LIMITS)


def functions_joined(name):
    """The functions that the cables of a file join: a host and a function, and what it reaches."""
    ports = parse_switch_yaml(FILES[name], where=name, hosts=HOSTS).ports
    cables = cables_of(ports, dict.fromkeys(HOSTS, MACHINE))
    ends = cabled_nics(cables)
    return {(host, FUNCTIONS[nic]): (far, FUNCTIONS[into]) for host, nic, (far, into) in ends}


class Walk:
    """Hosts with the cables of a file, and a folder that they share."""

    def __init__(self, name, folder, hosts):
        self.joined, self.folder, self.hosts = functions_joined(name), folder, hosts
        self.plan = str(folder / "three-sparks")
        for file, text in FILES.items():
            (folder / file).write_text(text)

    def mpirun(self, *words, code=0):
        """Run a command on all hosts."""
        options = ("-x", f"GLOO_SOCKET_IFNAME={MANAGEMENT}")
        ran = self.hosts.run(*words, options=options, timeout_s=560)
        assert ran.code == code, ran.stderr
        return ran

    def on(self, host, *words, code=0):
        """Run a command on a host, which exits with `code`; return what it prints."""
        command = self.hosts.command(host, sys.executable, "-m", "tccl_py", *words)
        how = {"cwd": self.folder, "capture_output": True, "text": True, "timeout": 100}
        ran = subprocess.run(command, check=False, **how)
        assert ran.returncode == code, ran.stderr
        return ran.stdout

    def check_rings(self):
        """Check that the rings of the plan leave and enter by functions that a cable joins."""
        plan = load_plan(self.plan)
        assert plan.host_order == HOSTS
        names = {nic.index: nic.name for nic in plan.cluster.classes[0].machine.nics}
        for host, following in zip(plan.hosts, (*plan.hosts[1:], plan.hosts[0]), strict=True):
            chains = plan.paths[host.path].chains, plan.paths[following.path].chains
            for out, into in zip(*chains, strict=True):
                end = host.name, names[out.exit_nic]
                assert self.joined[end] == (following.name, names[into.entry_nic])


def walk(name, folder):
    joined = functions_joined(name)
    cables = tuple((*near, *far) for near, far in joined.items() if near < far)
    with namespaces_in(folder, hosts=HOSTS, link_gbps=0.1, cables=cables) as hosts:
        yield Walk(name, folder, hosts)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    yield from walk("cables.yaml", tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    yield from walk("mirrored.yaml", tmp_path_factory.mktemp("mirrored"))


def test_doctor_finds_nothing_that_hangs_on_any_host(three):
    for host in HOSTS:
        findings = json.loads(three.on(host, "doctor", "--json", code=1))["findings"]
        assert {one["check"] for one in findings if one["severity"] != "note"} == {"driver"}


def test_a_file_of_other_cables_than_the_addresses_tell_is_refused_by_name(three):
    file = str(three.folder / "mirrored.yaml")
    ran = three.mpirun(*PLAN, f"{three.plan}-no", "--switches", file, code=2)
    assert "joins N0 of spark1, which is 10.50." in ran.stderr


def test_the_subnets_tell_the_cables_and_rings_use_both_functions_of_a_port(three):
    told = json.loads(three.mpirun(*PLAN, three.plan).stdout)
    three.check_rings()
    assert len(told["rings"]) >= 2


def test_the_variables_that_the_page_explains_are_exported(three):
    said = three.on("spark2", "env", three.plan, "--host", "spark2", "--force")
    for variable in ("NCCL_ALGO=Ring", "NCCL_CROSS_NIC=1", "NCCL_IB_SUBNET_AWARE_ROUTING=1"):
        assert f"export {variable}" in said


def test_jobs_are_verified_and_the_cables_checked(three):
    words = ("--backend", "host", "--sizes", "4K", "--rounds", "6", "--seconds", "0.2", "--json")
    ran = three.hosts.run(
        *("verify", three.plan, *words),
        options=("-x", f"GLOO_SOCKET_IFNAME={MANAGEMENT}"),
        timeout_s=300,
    )
    assert ran.code in (0, 1), ran.stderr
    assert json.loads(ran.stdout)["hosts"] == list(HOSTS)
    ran = three.hosts.run("check", three.plan, timeout_s=300)
    assert ran.code in (0, 1), ran.stderr


def test_a_job_of_two_hosts_follows_from_the_plan(three):
    three.on("spark1", "export", three.plan, "--hosts", "spark1,spark2", "-o", "two-sparks")
    assert "for 2 hosts" in three.on("spark1", "show", "two-sparks")


def test_ports_that_face_their_like_are_planned_along_their_cables(mirrored):
    file = str(mirrored.folder / "mirrored.yaml")
    mirrored.mpirun(*PLAN, mirrored.plan, "--switches", file)
    mirrored.check_rings()
