"""The topology file of a plan: what NCCL's own search does by it, and that nobody loses."""

import itertools
import json
import re
from functools import cache
from pathlib import Path, PurePosixPath

import msgspec
import pytest
from typer.testing import CliRunner

from tccl_py.cli.export import for_version
from tccl_py.cli.main import app
from tccl_py.errors import InputError
from tccl_py.installation.texts import Installed, form_of
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import PciLink, toy_machine
from tccl_py.nccl.conf import job_environment
from tccl_py.nccl.default_rings import stock_choice
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import view
from tccl_py.nccl.versions import pci_gbps
from tccl_py.plan.beliefs import beliefs, nearest_link
from tccl_py.plan.calibration import (
    ALL_SETS_UP_TO,
    calibrated,
    order_kept,
    sieve,
    subsets_to_check,
)
from tccl_py.plan.directory import nccl_files, topology_text, write_plan
from tccl_py.plan.files import conf_text
from tccl_py.plan.plan import load_plan
from tccl_py.plan.planner import make_plan
from tccl_py.plan.stock_judge import OutOfSetsError, StockJudge
from tccl_py.readers.nccl_topology import parse_nccl_topology, read_nccl_topology
from tccl_py.report.tables import plan_files, read_contents
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.generic import model_for
from tccl_py.simulator.source import Simulator
from tests.test_topology_xml import CASES


def falling_back(gpus=4):
    """A machine on which NCCL finds no ring: GPUs of sm 120 on two AMD sockets (16 < 18 GB/s)."""
    machine = toy_machine(gpus=gpus, numa_nodes=2, per_switch=2, name="two-sockets")
    newer = tuple(msgspec.structs.replace(gpu, sm=120) for gpu in machine.gpus)
    fast = PciLink(speed_gts=32.0, width=16)
    return msgspec.structs.replace(
        machine,
        gpus=tuple(msgspec.structs.replace(gpu, link=fast) for gpu in newer),
        bridges=tuple(msgspec.structs.replace(one, link=fast) for one in machine.bridges),
    )


@cache
def planned():
    """The plan of that machine, calibrated, with the source it was judged by."""
    model = model_for(falling_back(), Knowledge())
    source = Simulator(model)
    plan = make_plan(model.machine, model.knowledge, source)
    return calibrated(plan, source), model


def test_the_fallback_is_lifted_for_every_set_of_gpus():
    plan, _ = planned()
    assert stock_choice(plan.machine, plan.knowledge, plan.settings).fallback
    assert plan.topology is not None
    assert plan.topology.fallbacks_ended > 0
    for size in range(2, 5):
        for gpus in itertools.combinations(plan.gpus, size):
            choice = stock_choice(plan.topology.machine, plan.knowledge, plan.settings, gpus=gpus)
            assert not choice.fallback
            assert choice.bw_intra >= 18


def test_no_set_of_gpus_loses():
    plan, model = planned()
    judge = StockJudge(plan.knowledge, plan.settings, Simulator(model))
    for gpus in subsets_to_check(plan.machine, plan.gpus):
        own = judge.worth(plan.machine, gpus)
        other = judge.worth(plan.topology.machine, gpus)
        assert other.rate_gbps >= own.rate_gbps * 0.998


@pytest.mark.parametrize("name", ["asus-esc8000a-e13p", "dual-turin-direct"])
@pytest.mark.parametrize("level", ["SYS", None])
def test_a_named_cpu_ends_the_recorded_fallbacks(name, level):
    machine = read_nccl_topology(CASES / "topologies" / f"{name}.xml")
    settings = Settings(p2p_level=level)
    assert stock_choice(machine, Knowledge(), settings).fallback
    named = next(one for one in beliefs(machine, {}) if "GenuineIntel 6/207" in str(one.changes))
    read_back = parse_nccl_topology(topology_text_of(named.machine), where=f"{machine.name}.xml")
    choice = stock_choice(read_back, Knowledge(), settings)
    assert not choice.fallback
    assert choice.nchannels * choice.bw_intra >= 36


def topology_text_of(machine):
    plan, _ = planned()
    return topology_text(plan, msgspec.structs.replace(plan.topology, machine=machine))


def test_the_file_says_what_is_not_so_and_what_it_cannot_say(tmp_path):
    plan, _ = planned()
    text = nccl_files(plan, tmp_path)["topo.xml"]
    assert "told otherwise than it is: " in text
    assert "cannot say which transfers slow each other down" in text
    assert parse_nccl_topology(text, where="two-sockets") == msgspec.structs.replace(
        plan.topology.machine, name="two-sockets"
    )
    (notice,) = [one for one in plan.notices if one.startswith("topology file: ")]
    assert plan.topology.summary in notice


def test_every_job_of_the_host_gets_the_file(tmp_path):
    plan, model = planned()
    write_plan(plan, tmp_path, model=model)
    line = f"NCCL_TOPO_FILE={tmp_path}/nccl/topo.xml"
    assert line in (tmp_path / "nccl" / "nccl.conf").read_text().splitlines()
    assert f"export {line}" in (tmp_path / "nccl" / "env.sh").read_text().splitlines()
    assert load_plan(tmp_path) == plan


def test_show_and_the_report_name_it(tmp_path):
    plan, model = planned()
    write_plan(plan, tmp_path, model=model)
    assert "topo.xml, for all communicators of a job" in shown("show", tmp_path)
    summary = json.loads(shown("show", tmp_path, "--json"))["topology_file"]
    assert summary == plan.topology.summary
    (file,) = [one for one in plan_files(read_contents(tmp_path)) if one.name == "nccl/topo.xml"]
    assert file.there
    assert file.purpose.endswith(plan.topology.summary)


def shown(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_path_with_a_space_stays_out_of_nccl_conf():
    path = PurePosixPath("/a b/topo.xml")
    text = conf_text(Settings(), provenance="measured", topology=path)
    assert "NCCL_TOPO_FILE=" not in text
    assert "needs quotes" in text
    assert job_environment(Settings(), topology=path) == {"NCCL_TOPO_FILE": "/a b/topo.xml"}


def test_an_installed_plan_sets_it_in_every_form():
    path = PurePosixPath("/plans/box/nccl/topo.xml")
    plan = Installed(
        directory=Path("/plans/box"), settings=Settings(), provenance="measured", topology=path
    )
    for kind in ("conf", "slurm-prolog", "module"):
        assert str(path) in form_of(plan, kind, Path("x")).body
    without = msgspec.structs.replace(plan, topology=None)
    for kind in ("conf", "slurm-prolog", "module"):
        assert "NCCL_TOPO_FILE" not in form_of(without, kind, Path("x")).body


@pytest.mark.parametrize(
    "name", ["asus-esc8000a-e13p", "h200x4-vm", "supermicro-h12dsg-8x3090", "amd-v100"]
)
def test_graph_files_tell_the_tuner_what_was_measured(name, tmp_path):
    plan = load_plan(f"plans/{name}.json")
    text = nccl_files(plan, tmp_path)["graph.xml"]
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
    farthest = max(
        seen.paths[f"G{hop.source}", f"G{hop.target}"].type
        for ring in plan.rings
        for hop in ring.hops
    )
    heads = re.findall(r'nchannels="(\d+)" speedintra="([0-9.]+)".* typeintra="(\w+)"', text)
    # The tuner multiplies channels and speed; ring and tree run over the same hops.
    assert len(heads) == 2
    for channels, speed, kind in heads:
        assert int(channels) * float(speed) == pytest.approx(plan.rate_gbps, rel=1e-4)
        assert kind == farthest.name
        assert int(channels) == plan.settings.channels


def test_a_plan_without_one_names_none(tmp_path):
    plan, _ = planned()
    files = nccl_files(msgspec.structs.replace(plan, topology=None), tmp_path)
    assert "topo.xml" not in files
    assert not any("NCCL_TOPO_FILE" in text for text in files.values())


def test_a_damaged_plan_with_a_file_of_another_machine_is_refused(tmp_path):
    plan, _ = planned()
    other = msgspec.structs.replace(plan.topology, machine=toy_machine(gpus=3))
    msgspec.structs.replace(plan, topology=other).save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="topology file of other gpus"):
        load_plan(tmp_path / "plan.json")


def test_for_another_version_the_file_is_left_out():
    plan, _ = planned()
    assert for_version(plan, plan.settings.version).topology is not None
    older = for_version(plan, "2.28.9")
    assert older.topology is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("h200x4-vm", "all GPUs are joined by NVLink"),
        ("nvswitch-8gpu-8nic", "all GPUs are joined by NVLink"),
        ("intel-v100", "no description that it can hold makes NCCL's own choice better"),
    ],
)
def test_where_nothing_better_can_be_said_there_is_no_file_and_a_reason(name, why):
    plan = load_plan(f"plans/{name}.json")
    made = calibrated(plan, Simulator(load_bundled(name)))
    assert made.topology is None
    assert why in made.notices[-1]


def test_a_version_whose_reading_was_not_checked_gets_no_file():
    plan, model = planned()
    older = msgspec.structs.replace(plan.settings, version="2.18.3")
    made = calibrated(
        msgspec.structs.replace(plan, settings=older, topology=None), Simulator(model)
    )
    assert made.topology is None
    assert "checked for versions 2.28 and 2.30 only" in made.notices[-1]


def test_a_cpu_that_nobody_knows_gets_no_file():
    plan, model = planned()
    nodes = tuple(msgspec.structs.replace(one, vendor="") for one in plan.machine.numa_nodes)
    machine = msgspec.structs.replace(plan.machine, numa_nodes=nodes)
    made = calibrated(
        msgspec.structs.replace(plan, machine=machine, topology=None), Simulator(model)
    )
    assert "nobody knows what CPUs" in made.notices[-1]


class _Interrupted:
    simulated = True

    def measure(self, sets):
        raise KeyboardInterrupt


def test_an_interruption_leaves_the_plan_marked():
    plan, _ = planned()
    plain = msgspec.structs.replace(plan, topology=None)
    made = calibrated(plain, _Interrupted())
    assert made == msgspec.structs.replace(plain, cancelled=True)


def test_hardware_is_asked_a_bounded_number_of_times():
    plan, model = planned()
    judge = StockJudge(plan.knowledge, plan.settings, Simulator(model), sets=1)
    judge.worth(plan.machine, (0, 1))
    judge.worth(plan.machine, (0, 1))
    with pytest.raises(OutOfSetsError):
        judge.worth(plan.machine, (0, 2))


@pytest.mark.parametrize("gbps", [0.5, 3.0, 6.4, 12.0, 13.2, 26.5, 50.65])
def test_links_are_told_within_an_eighth(gbps):
    link = nearest_link(PciLink(speed_gts=32.0, width=16), gbps)
    assert pci_gbps(link) == pytest.approx(gbps, rel=0.13)


def test_the_order_of_bandwidths_is_counted():
    machine = toy_machine(gpus=4, numa_nodes=2)
    seen = view(machine, Knowledge(), Settings())
    near, far = (0, 1), (0, 2)
    assert order_kept(seen, {near: 20.0, far: 10.0}) == 1.0
    assert order_kept(seen, {near: 10.0, far: 20.0}) == 0.0
    assert order_kept(seen, {near: 20.0, (2, 3): 10.0}) == 0.5
    assert order_kept(seen, {near: 20.0, far: 20.1}) == 1.0


def test_all_sets_of_few_gpus_are_checked_and_some_of_many():
    few = toy_machine(gpus=5)
    assert len(subsets_to_check(few, few.gpu_indices)) == 2**5 - 1 - 5
    many = toy_machine(gpus=16, numa_nodes=2, per_switch=4)
    sets = subsets_to_check(many, many.gpu_indices)
    assert sets[0] == many.gpu_indices
    assert tuple(range(4)) in sets
    assert tuple(range(8)) in sets
    assert all(len(one) <= ALL_SETS_UP_TO for one in sets[1:])
    assert sieve(sets)[0] == many.gpu_indices


def test_the_command_writes_it_where_it_is_asked_for(tmp_path, monkeypatch):
    from tests.test_cli_plan import tccl as run  # noqa: PLC0415

    machine = tmp_path / "machine.json"
    machine.write_bytes(msgspec.json.encode(falling_back()))
    made = run("plan", "-o", tmp_path / "one", "--simulate", machine, "--topology-file")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "one" / "nccl" / "topo.xml").is_file()
    answer = run("env", tmp_path / "one", "--json")
    variables = json.loads(answer.stdout)["environment"]
    assert variables["NCCL_TOPO_FILE"].endswith("/one/nccl/topo.xml")
    words = ("plan", "-o", tmp_path / "two", "--simulate", machine)
    assert run(*words).exit_code == 0
    assert not (tmp_path / "two" / "nccl" / "topo.xml").exists()
    assert not re.search("NCCL_TOPO_FILE", (tmp_path / "two" / "nccl" / "env.sh").read_text())
