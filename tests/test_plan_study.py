"""Plans in Python: their text, rows, graph, other orders, differences, and writing."""

import functools
import html
import json
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

import tccl_py
from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.model.transfer import parse_flow
from tccl_py.nccl.settings import environment
from tccl_py.plan.hop_rows import way
from tccl_py.plan.staging import MANIFEST_FILE
from tccl_py.planning.opening_hosts import simulated_cluster
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, read_description
from tccl_py.sources.journal import read_journal
from tccl_py.sources.profiled import MeasurementOptions
from tests.commands import tccl
from tests.planned import ASUS, FOUR_GPUS, SMALL, plan_of, replace_plan

NODE = "nvswitch-8gpu-8nic"


@functools.cache
def hosts_plan():
    model = load_bundled(NODE)
    cluster = simulated_cluster(model, 3, None, None, None)
    return tccl_py.make_cluster_plan(cluster, [tccl_py.Simulator(model)], budget=Budget(sets=60))


def test_a_plan_describes_itself_in_three_lines():
    for plan in (plan_of(SMALL), plan_of(ASUS)):
        lines = repr(plan).splitlines()
        assert len(lines) == 3
        assert plan.machine.name in lines[0]
        assert plan.advice == lines[1]
        assert f"{plan.rate_gbps:.2f}" in lines[2]


def test_rows_and_edges_are_the_hops():
    plan = plan_of(ASUS)
    rows = plan.hop_rows()
    hops = [hop for ring in plan.rings for hop in ring.hops]
    assert [(row["from"], row["to"], row["gbps"]) for row in rows] == [
        (hop.source, hop.target, hop.rate_gbps) for hop in hops
    ]
    graph = plan.to_networkx()
    assert graph.number_of_edges() == len(hops)
    for row in rows:
        assert row["links"][0] == f"G{row['from']}"
        assert row["links"][-1] == f"G{row['to']}"
        assert set(row["numa"]) <= {"C0", "C1"}


def test_a_plan_of_hosts_answers_what_a_plan_of_one_answers():
    plan = hosts_plan()
    assert tuple(ring.gpus for ring in plan.rings) == plan.orders
    assert min(ring.rate_gbps for ring in plan.rings) * plan.ring_count == plan.rate_gbps
    hops = [hop for ring in plan.rings for hop in ring.hops]
    hosts = {number: host.name for host in plan.hosts for number in plan.in_rings(host)[1].values()}
    for hop, row in zip(hops, plan.hop_rows(), strict=True):
        assert str(hop.flow.source.host) == hosts[hop.source]
        assert str(hop.flow.destination.host) == hosts[hop.target]
        assert (row["how"] == "network") == (hosts[hop.source] != hosts[hop.target])
        ends = [f"{hosts[gpu]}.G" for gpu in hop.ends]
        assert all(map(str.startswith, (row["links"][0], row["links"][-1]), ends))
    assert plan.to_networkx().number_of_edges() == len(hops)
    assert plan.subset(plan.orders[0]).rings == plan.orders
    assert plan.subset([0, 1]) is None


def test_a_plan_as_a_dictionary_is_what_commands_print(tmp_path):
    for number, plan in enumerate((plan_of(SMALL), hosts_plan())):
        plan.save(tmp_path / f"{number}.json")
        shown = tccl("show", str(tmp_path / f"{number}.json"), "--json")
        printed = json.loads(shown.stdout)
        assert printed | json.loads(json.dumps(plan.to_dict())) == printed


@pytest.mark.parametrize("made", [functools.partial(plan_of, ASUS), hosts_plan])
def test_a_choice_has_its_gain_its_environment_and_its_files(made, tmp_path):
    plan = made()
    for name, choice in plan.choices.items():
        assert choice.environment == environment(choice.settings)
        files = plan.files(name, tmp_path)
        assert all(
            f"{key}={value}" in files["nccl.conf"] for key, value in choice.environment.items()
        )
        assert any(file.endswith(".xml") for file in files) == (name == "graph")
        assert ("export NCCL_GRAPH_FILE" in files["env.sh"]) == (name == "graph")
    assert plan.gain("default") == 1.0


def test_the_way_of_a_flow_takes_nvlinks_and_the_bounces_memory():
    linked = load_bundled(SMALL).machine
    assert not any(device.startswith("C") for device in way({"": linked}, parse_flow("0:1")))
    assert "C0" in way({"": linked}, parse_flow("0:C0:1"))


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_each_choice_of_a_plan_is_rated_as_it_was_planned(name):
    plan = plan_of(name)
    assert plan.rate(plan.orders) == plan.rate(plan.channel_rings) == plan.rate_gbps
    for choice in plan.choices.values():
        if choice.rate_gbps is not None:
            assert plan.rate(choice.rings, choice.settings) == pytest.approx(choice.rate_gbps)


def test_a_ring_may_begin_anywhere_and_takes_all_channels_where_it_is_alone():
    plan = plan_of(ASUS)
    assert len(plan.orders) == 2
    first, second = plan.orders
    turned = (*first[3:], *first[:3])
    assert plan.rate([turned, second]) == plan.rate_gbps
    assert plan.rate(turned) == plan.rate([first]) == plan.rate([first, first]) < plan.rate_gbps
    assert plan.what_if(second, ring=1) == plan.what_if(first) == plan.rate_gbps
    assert plan.what_if(second) == plan.rate([second])


def test_rings_over_hosts_are_rated_on_the_slowest_host():
    plan, source = hosts_plan(), tccl_py.Simulator(load_bundled(NODE))
    assert plan.rate(plan.orders) == plan.what_if(plan.orders[0], [source]) == plan.rate_gbps
    first, *others = plan.orders
    count = len(plan.class_gpus[0])
    # One host's chain the other way round is entered far from its NIC.
    turned = (*first[:count][::-1], *first[count:])
    assert plan.rate([turned, *others], source=source) == plan.what_if(turned) < plan.rate_gbps
    assert plan.what_if((*turned[5:], *turned[:5])) == plan.what_if(turned)
    for wrong in ((*first[::-1],), (*first[1:2], first[0], *first[2:-1]), first[:count]):
        with pytest.raises(InputError, match="rings"):
            plan.rate(wrong)
    with pytest.raises(InputError, match="one for each class"):
        plan.rate(first, source=[source, source])


def test_rings_of_a_subset_of_gpus_are_rated_by_a_source_of_the_same_machine():
    model = load_bundled(SMALL)
    source = tccl_py.Simulator(model)
    plan = tccl_py.make_plan(model.machine, model.knowledge, source, gpus="0-2", ring_counts=[1])
    (order,) = plan.orders
    assert plan.what_if(order, source) == plan.rate(order, source=source) == plan.rate_gbps
    numbers = (0, 1), (0, 1, 3), (0, 1, 2, 2), ()
    for wrong in (*numbers, 3, None, [3.5], [[0, 1, 2], 3], "012", [[[0], 1, 2]]):
        with pytest.raises(InputError, match="rings"):
            plan.rate(wrong, source=source)
    with pytest.raises(InputError, match="the source simulates amd-v100"):
        plan.what_if(order, tccl_py.Simulator(load_bundled("amd-v100")))
    with pytest.raises(InputError, match="ring"):
        plan.what_if(order, source, ring=1)
    with pytest.raises(InputError, match="settings"):
        plan.rate(order, {"channels": 2})
    with pytest.raises(InputError, match="give the source"):
        msgspec.structs.replace(plan, simulated=False).rate(order)


def test_a_difference_names_what_changed_alone(tmp_path):
    plan = plan_of(SMALL)
    plan.write(tmp_path / "plan")
    assert tccl_py.diff(plan, tccl_py.load_plan(tmp_path / "plan")) == {}
    assert {"machines", "gpus", "rate_gbps"} <= set(tccl_py.diff(plan, plan_of(ASUS)))
    with pytest.raises(InputError):
        plan.write(tmp_path / "plan")


def test_a_difference_in_settings_of_either_choice_is_named():
    plan = plan_of(SMALL)
    settings = msgspec.structs.replace(plan.settings, channels=2 * plan.settings.channels)
    more = replace_plan(plan, settings=settings)
    assert list(tccl_py.diff(plan, more)) == ["channels"]
    settings = msgspec.structs.replace(plan.choices["variables"].settings, buffsize=1 << 20)
    variables = msgspec.structs.replace(plan.choices["variables"], settings=settings)
    other = replace_plan(plan, variables=variables)
    assert tccl_py.diff(plan, other) == {"variables": ({}, {"NCCL_BUFFSIZE": str(1 << 20)})}


def test_a_plan_writes_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tccl("plan", "command", "--simulate", SMALL).exit_code == 0
    model, written = load_bundled(SMALL), Path("python")
    written.mkdir()
    with tccl_py.open_source(model, journal=written / JOURNAL_FILE) as source:
        plan = tccl_py.make_plan(model.machine, model.knowledge, source)
        plan.write(written, source)
    contents = [
        {
            str(path.relative_to(place)): path.read_bytes().replace(str(place).encode(), b"DIR")
            for path in place.rglob("*")
            if path.is_file() and path.name != MANIFEST_FILE
        }
        for place in (Path("command"), written)
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("made", [functools.partial(plan_of, SMALL), hosts_plan])
def test_commands_read_what_a_plan_writes(made, tmp_path):
    place = tmp_path / "plan"
    place.mkdir()
    made().write(place)
    for words in (["show", "--why"], ["check"], ["show"], ["report"]):
        assert tccl(*words, str(place)).exit_code == 0


def test_a_plan_keeps_the_models_and_the_measurements_of_its_source(tmp_path):
    model = msgspec.structs.replace(load_bundled(SMALL), name="mine")
    machine = msgspec.structs.replace(model.machine, name="mine")
    model = msgspec.structs.replace(model, machine=machine)
    with tccl_py.open_source(model, noise=0.01, seed=3) as source:
        plan = tccl_py.make_plan(machine, model.knowledge, source)
    with pytest.raises(InputError, match="no bundled model"):
        plan.write(tmp_path / "plan")
    assert not (tmp_path / "plan").exists()
    plan.write(tmp_path / "plan", source)
    journal = read_journal(tmp_path / "plan" / JOURNAL_FILE)
    assert journal.header == source.header
    assert set(journal.measurements) == set(source.sets)
    assert read_description(tmp_path / "plan" / "machines" / "mine.json").model == model
    assert tccl("show", "--why", str(tmp_path / "plan")).exit_code == 0


def test_a_copied_plan_directory_is_a_source_that_answers_by_its_journal_alone(tmp_path):
    made, copied = tmp_path / "made", tmp_path / "copied"
    with tccl_py.open_source(SMALL, noise=0.01, seed=3) as source:
        plan = plan_of(SMALL)
        plan = tccl_py.make_plan(plan.machine, plan.knowledge, source)
        plan.write(made, source)
        told = tccl_py.explain(plan, source)
    shutil.copytree(made, copied)
    plan = tccl_py.load_plan(copied)
    with tccl_py.open_source(str(copied)) as source:
        assert (source.simulated, source.dry_run, source.model) == (True, False, None)
        assert source.header == read_journal(copied / JOURNAL_FILE).header
        assert plan.rate(plan.orders, source=source) == pytest.approx(plan.rate_gbps, rel=0.05)
        assert plan.what_if(plan.orders[0], source) == plan.rate(plan.orders, source=source)
        assert tccl_py.explain(plan, source).rings[0].rate_gbps == told.rings[0].rate_gbps
        with pytest.raises(MeasurementError, match=r"is not in .*measurements\.jsonl"):
            source.measure("G0->G0->G1 G0->G0->G2 G0->G0->G3 G1->G1->G2")
        assert source.times_measured == 0
    for given in ({"gpus": [0]}, {"noise": 0.1}, {"journal": made}, {"devices": 2}):
        with pytest.raises(InputError):
            tccl_py.open_source(copied, **given)
    with pytest.raises(InputError, match=r"measurements\.jsonl"):
        tccl_py.open_source(tmp_path)


@pytest.mark.parametrize(
    "opened", [tccl_py.open_source, lambda name: tccl_py.Simulator(load_bundled(name))]
)
def test_a_source_takes_sets_flows_and_texts_one_or_several(opened):
    source = opened(SMALL)
    forms = ("0:1", tccl_py.parse_flow("0:1"), tccl_py.parse_set("0:1"))
    alone = [answer for form in forms for answer in source.measure(form)]
    assert list(source.measure([forms[0]])) == alone[:1] == alone[1:2] == alone[2:]
    assert len(source.measure(iter([forms[1], "1:0+0:1"]))) == 2
    for wrong in ("0-1", [0], None, 3, [["0:1"]]):
        with pytest.raises(InputError):
            source.measure(wrong)


@pytest.mark.parametrize("form", [str, Path])
def test_a_path_may_be_text(form, tmp_path):
    journal, switches, plan = tmp_path / "j.jsonl", tmp_path / "topology.conf", tmp_path / "plan"
    with tccl_py.open_source(form(SMALL), journal=form(journal)) as source:
        source.measure("0:1")
    assert len(read_journal(journal).measurements) == 1
    switches.write_text("SwitchName=s Nodes=a,b\n")
    assert [*tccl_py.read_switches(form(switches)).switches.all_hosts] == ["a", "b"]
    plan.mkdir()
    tccl_py.write_plan(plan_of(SMALL), form(plan))
    assert tccl_py.load_plan(form(plan)) == plan_of(SMALL)


REFUSED = (
    {"gpus": [0, 99]},
    {"devices": 2},
    {"backend": "host"},
    {"options": MeasurementOptions()},
    {"seed": -1},
)


@pytest.mark.parametrize("given", REFUSED)
def test_a_source_of_a_model_refuses_what_the_model_lacks(given):
    with pytest.raises(InputError):
        tccl_py.open_source(SMALL, **given)
    assert tccl_py.open_source(SMALL, gpus=[0, 1]).simulated


def test_the_version_is_the_packages():
    assert tccl_py.__version__ == metadata.version("tccl-py")


def test_in_notebooks_machines_and_plans_are_drawn_whole(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", object())
    plan = plan_of(ASUS)
    model = tccl_py.load_machine(SMALL)
    shown = plan._repr_svg_()
    assert plan.advice in html.unescape(shown)
    hops = sum(len(ring.hops) for ring in plan.rings)
    # Default NCCL's ring is below the plan's.
    assert shown.count('class="head') == hops + len(plan.gpus)
    # The machine is drawn once, and its GPUs again for each further ring.
    assert shown.count('class="numa"') == len(plan.machine.numa_nodes)
    assert shown.count('class="gpu"') == len(plan.gpus) * (plan.ring_count + 1)
    box = ElementTree.fromstring(shown).attrib
    right, bottom = map(float, box["viewBox"].split()[2:])
    down = [float(y) for y in re.findall(r"translate\(0 ([\d.]+)\)", shown)]
    below = [float(y) for y in re.findall(r"V([\d.]+)H", shown)]
    assert max(down) + max(below[-len(plan.gpus) :]) < bottom
    assert max(float(x) for x in re.findall(r' x="([\d.]+)"', shown)) < right
    machine = plan.machine._repr_svg_()
    assert machine.count("<svg") == 1
    assert model._repr_svg_() == model.machine._repr_svg_()


def test_a_plan_is_explained_by_a_source():
    model = load_bundled("amd-v100")
    with tccl_py.open_source(model) as source:
        plan = tccl_py.make_plan(model.machine, model.knowledge, source)
        found = tccl_py.explain(plan, source)
    assert [ring.name for ring in found.rings] == ["plan", "default"]
    lines = repr(found).splitlines()
    assert "simulated" in lines[0]
    assert all(one.sentence in repr(found) for ring in found.rings for one in ring.findings)


def test_a_name_in_a_machine_is_text_in_its_drawing():
    machine = load_bundled(SMALL).machine
    evil = msgspec.structs.replace(machine, name='"></svg><script>alert(1)</script>')
    shown = tccl_py.drawing(evil)
    assert ElementTree.fromstring(shown).attrib["aria-label"] == evil.name
    assert "<script" not in shown
