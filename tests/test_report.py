"""The report's parts: layout and lanes, tables of rates, scales, and the page made of them."""

import itertools
import random
import re

import msgspec
import pytest
from msgspec import structs

from tccl_py.errors import InputError
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.target import target_of
from tccl_py.experiments.verify import verify_target
from tccl_py.explanation.findings import Explanation, Finding, RingExplanation
from tccl_py.explanation.paths import Paths
from tccl_py.health.checks import links_now
from tccl_py.health.host import HostState
from tccl_py.model.machine import Fingerprint, Knowledge, NvLink, PciLink, check
from tccl_py.model.measurement import Measurement
from tccl_py.model.rings import bounce
from tccl_py.model.transfer import parse_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.size_choices import size_notes
from tccl_py.plan.text import limit_text
from tccl_py.report.drawing import (
    LinkLoad,
    cause_words,
    drawing,
    flow_hop,
    heat_map,
    hops_view,
    link_loads,
    node_view,
    viridis,
)
from tccl_py.report.machine import LANE, lay_out, nvlinks, wires
from tccl_py.report.page import rate_bars, read_contents, report_html
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.pairs import pair_flow
from tests.cluster_plans import mixed
from tests.commands import tccl
from tests.effort import calls_at_most
from tests.planned import ASUS, PCIE, SMALL, WRX
from tests.report_pages import EVIL, PLANS, Page, all_singles_and_pairs, plan_directory, renamed
from tests.toy import toy_machine
from tests.verified import FakeJobs, by_plan, dry_run, verify_by

MACHINES = sorted(path.stem for path in PLANS.glob("*.json"))


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    """Sixteen GPUs with every pair measured alone and a thousand pairs of them together."""
    sets = all_singles_and_pairs(range(16), [0], pairs=1000)
    return plan_directory(tmp_path_factory.mktemp("sixteen") / "plan", WRX, sets=sets)


def page_of(directory):
    return Page(report_html(read_contents(directory)))


def journal(*lines):
    """A journal of sets, each with the rate of every flow."""
    return {
        parse_set(text): [
            Measurement(
                transfers=parse_set(text), samples_gbps=tuple((r,) for r in rates), simulated=False
            )
        ]
        for text, *rates in lines
    }


# layout and lanes


@pytest.mark.parametrize("name", MACHINES)
def test_boxes_lie_within_what_they_hang_from_and_never_on_each_other(name):
    machine = load_plan(PLANS / f"{name}.json").machine
    layout = lay_out(machine)
    for device, parent in machine.parents.items():
        box, above = layout.boxes[device], layout.boxes[parent]
        assert above.x <= box.x and box.x + box.width <= above.x + above.width
        assert above.bottom < box.y
    for one, other in itertools.combinations(layout.boxes.values(), 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart or one.bottom <= other.y or other.bottom <= one.y
    assert all(box.x + box.width <= layout.width for box in layout.boxes.values())
    assert {gpu.id for gpu in machine.gpus} <= set(layout.boxes)


@pytest.mark.parametrize("gpus", [2, 3, 8, 16, 64])
def test_no_label_of_a_ring_lies_on_a_line_or_on_another_label(gpus):
    layout = lay_out(toy_machine(gpus=gpus, numa_nodes=2, per_switch=4))
    middles = [layout.boxes[f"G{i}"].middle for i in range(gpus)]
    gaps = layout.gaps("gpu")
    for seed in range(20):
        order = random.Random(seed).sample(range(gpus), gpus)
        hops = zip(order, [*order[1:], order[0]], strict=True)
        found = wires([(middles[i] + 9, middles[j] - 9) for i, j in hops], gaps)
        half = len("99.99") * 11.5 * 0.6 / 2
        for wire in found:
            for other in found:
                assert not wire.label_x - half < other.start < wire.label_x + half
                assert not wire.label_x - half < other.end < wire.label_x + half
        for one, other in itertools.combinations(found, 2):
            spans = [sorted((w.start, w.end)) for w in (one, other)]
            apart = spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]
            assert one.lane != other.lane or apart
    assert LANE > 2 * 11.5  # a rate above the line and a word below it


def test_a_lane_is_as_low_as_it_must_be():
    assert [wire.lane for wire in wires([(0, 10), (20, 30), (0, 30)], [5, 25])] == [0, 0, 1]


# rates from the journal


def test_a_pair_alone_has_its_fastest_flow():
    rates = journal(
        ("G0->G0->G1", 20.0),
        ("G0->G1->G1", 25.0),
        ("G0->G0->C0->G1->G1", 9.0),
        ("G0->G0->C0", 40.0),
        ("G0->G0->G9", 40.0),
        ("G1->G1->G0 G0->G0->G1", 5.0, 6.0),
    )
    found = heat_map(rates, (0, 1)).rates
    assert {key: (str(flow), gbps) for key, (flow, gbps) in found.items()} == {
        (0, 1): ("G0->G1->G1", 25.0)
    }


def test_a_set_measured_twice_has_the_median_of_all_samples():
    one = parse_set("G0->G0->G1")
    once, again = (journal((str(one), rate))[one] for rate in (10.0, 20.0))
    assert heat_map({one: once + again}, (0, 1)).rates[0, 1][1] == 15.0


def test_pairs_of_the_most_usual_number_of_channels_are_shown():
    found = journal(("0:1", 9), ("0:1,blocks=4", 5), ("1:0,blocks=4", 6), ("1:2,blocks=8", 7))
    shown = heat_map(found, (0, 1, 2))
    assert {ends: gbps for ends, (_, gbps) in shown.rates.items()} == {(0, 1): 5.0, (1, 0): 6.0}
    assert "tccl measure --journal" in shown.caption


# scales and words


def test_colours_get_lighter_with_the_rate():
    light = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (viridis(n / 50) for n in range(51))]
    assert light == sorted(light)
    assert viridis(-1) == viridis(0)
    assert viridis(2) == viridis(1)


def test_hops_are_marked_slowest_only_where_others_are_faster():
    plan = load_plan(PLANS / f"{ASUS}.json")
    ring = plan.rings[0]
    layout = lay_out(plan.machine)

    def slowest(hops):
        drawn = [flow_hop(plan.machine, hop.flow, hop.rate_gbps) for hop in hops]
        return [hop.slowest for hop in hops_view(drawn, layout).hops]

    assert slowest(ring.hops) == [False] * 8
    first, *others = ring.hops
    assert slowest((msgspec.structs.replace(first, rate_gbps=1.0), *others)) == [True] + [False] * 7


# the page


@pytest.mark.parametrize("name", MACHINES)
def test_the_page_of_every_reference_plan_is_whole_and_says_what_the_plan_says(name, tmp_path):
    plan = load_plan(PLANS / f"{name}.json")
    page = page_of(plan_directory(tmp_path / "plan", name))
    page.assert_accessible()
    words = page.words
    assert words.startswith(f"{plan.provenance} {plan.machine.name}"), words[:80]
    assert f"{plan.rate_gbps:.2f} GB/s" in words
    assert f"{plan.choices['default'].rate_gbps:.2f} GB/s" in words
    assert f"{plan.limit_gbps:.2f}" in words
    assert limit_text(plan) in words
    assert ("NCCL's choices by message size" in words) == any(size_notes(plan))
    for hop in (hop for ring in plan.rings for hop in ring.hops):
        assert str(hop.flow) in words
    assert "fails at its creation with" in words
    assert not re.search(r"\w\.\.(?!\.)", words)
    assert words.count("None was simulated.") == 1  # the journal is empty


def test_the_policy_of_the_page_lets_nothing_load_or_run(tmp_path):
    page = page_of(plan_directory(tmp_path / "plan", SMALL))
    (policy,) = (a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_sixteen_gpus_make_a_small_page_with_few_calls(sixteen):
    with calls_at_most(2_000_000):
        text = report_html(read_contents(sixteen))
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    page.assert_accessible()
    assert "240 rates as a table" in page.words


def test_cells_without_a_figure_stay_blank(tmp_path):
    sets = list(all_singles_and_pairs(range(4), [0], pairs=0))[:3]
    text = report_html(read_contents(plan_directory(tmp_path / "plan", SMALL, sets=sets)))
    assert "3 rates as a table" in text
    assert text.count('class="blank"') == 4 * 4 - 4 - 3
    assert "a blank cell was not simulated" in text


def test_one_mark_at_the_top_says_that_all_rates_are_simulated(sixteen):
    text = report_html(read_contents(sixteen))
    body = text[text.index("<body>") :]
    assert body.count('class="badge simulated"') == 1
    assert body.index('class="badge simulated"') < body.index("<h1>")
    assert Page(text).words.startswith("simulated wrx90-16gpu-4switch")


def test_a_measured_plan_is_called_measured(tmp_path):
    place = plan_directory(tmp_path / "plan", PCIE, simulated=False, assumed=False)
    page = page_of(place)
    assert page.words.startswith("measured amd-3090")
    assert "measurements.jsonl is left out" in page.words
    assert "Nothing here was measured" not in page.words


def test_names_from_files_are_shown_and_never_act(tmp_path):
    machine = renamed(load_plan(PLANS / f"{PCIE}.json").machine, EVIL)
    place = tmp_path / "<b>plan & $(x)"
    plan_directory(place, PCIE, machine=machine, notices=(EVIL,))
    text = report_html(read_contents(place))
    page = Page(text)
    page.assert_accessible()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert '<script>alert("x")</script>\\x1b[31m\\u202e&amp;' in page.words
    assert f"tccl env '{place}'" in page.words


def test_some_gpus_of_a_machine_are_drawn_faint(tmp_path):
    plan = load_plan(PLANS / f"{PCIE}.json")
    ring = plan.rings[0]
    hops = (
        msgspec.structs.replace(ring.hops[0], source=0, target=1, flow=bounce(0, 1, 0)),
        msgspec.structs.replace(ring.hops[0], source=1, target=0, flow=bounce(1, 0, 0)),
    )
    place = plan_directory(
        tmp_path / "plan",
        PCIE,
        gpus=(0, 1),
        rings=(msgspec.structs.replace(ring, hops=hops),),
        default=msgspec.structs.replace(plan.choices["default"], rings=((0, 1),)),
        variables=msgspec.structs.replace(plan.choices["variables"], rings=((0, 1),)),
        subsets=(),
        alternatives=(),
    )
    text = report_html(read_contents(place))
    # Below the machine default NCCL's ring has a row of GPUs.
    assert text.count('class="unused"') == 2 * 2
    assert "2 of 4 (0-1)" in text
    assert "are faint" in text


def test_nvlinks_between_gpus_and_to_cpus_are_drawn():
    links = [(i, j) for i in range(4) for j in range(4) if i != j]
    machine = toy_machine(gpus=4, numa_nodes=2)
    machine = msgspec.structs.replace(
        machine,
        nvlinks=(
            *(NvLink(source=f"G{i}", target=f"G{j}", count=2) for i, j in links),
            NvLink(source="G0", target="C0", count=1, kind="c2c"),
        ),
    )
    found = nvlinks(check(machine, where="test"), lay_out(machine))
    assert [count for _, count in found.wires] == [2] * 6
    assert [line.kind for line in found.lines] == ["nvlink"]


def test_an_explanation_is_shown_and_one_of_an_earlier_plan_is_not(tmp_path):
    place = plan_directory(tmp_path / "plan", SMALL)
    explanation("Two <i>writes</i> share a link.").keep(place)
    words = page_of(place).words
    assert "Two <i>writes</i> share a link." in words
    assert "There is no explanation" not in words
    # Another plan takes it away; whoever brings it back brings what is not of this plan.
    earlier = (place / "explanation.json").read_bytes()
    plan_directory(place, SMALL, notices=("planned again",))
    assert not (place / "explanation.json").exists()
    (place / "explanation.json").write_bytes(earlier)
    words = page_of(place).words
    assert "Two <i>writes</i>" not in words
    assert "explanation.json is left out: it is of an earlier plan" in words
    (place / "explanation.json").write_text("{}")
    assert "explanation.json is left out: it does not fit" in page_of(place).words


def test_a_finding_counts_mechanisms_and_says_whose_rate_it_has():
    finding = msgspec.structs.replace(
        explanation("").rings[0].findings[0],
        flows=parse_set("G0->G0->G1 G2->G2->G1").flows,
        each_gbps=(5.0, 5.0),
    )
    assert "2 x direct write: 5.00 GB/s each, 10.00 alone" in cause_words(finding)
    other = msgspec.structs.replace(finding, each_gbps=(5.0, 8.0))
    assert "5.00 GB/s at least, 10.00 alone" in cause_words(other)


def explanation(sentence):
    finding = Finding(
        flows=parse_set("G0->G0->G1").flows,
        gbps=5.0,
        alone_gbps=10.0,
        slowdown=2.0,
        each_gbps=(5.0,),
        each_alone_gbps=(10.0,),
        error=0.0,
        shares=(),
        kinds=(),
        sentence=sentence,
    )
    ring = RingExplanation(
        name="plan",
        rings=1,
        rate_gbps=5.0,
        slowest=finding,
        findings=(finding,),
        unexplained="",
        sentence="Something hurts.",
    )
    return Explanation(
        machine=SMALL,
        simulated=True,
        assumed=False,
        rings=(ring,),
        pitfalls=(),
        sets_measured=0,
    )


def test_achieved_rates_are_shown_where_they_were_verified(tmp_path):
    place = plan_directory(tmp_path / "plan", SMALL)
    assert "graph file, achieved" not in page_of(place).words
    jobs = FakeJobs(by_plan(lambda _: 1.0))
    plan = load_plan(place)
    found = verify_by(plan, place, jobs, sizes=(4096,))
    found.keep(place)
    assert "verify.json is left out" in page_of(place).words
    default, graph = (
        msgspec.structs.replace(arm, achieved_gbps=gbps)
        for arm, gbps in zip(found.arms, (222.25, 301.5), strict=True)
    )
    on_gpus = msgspec.structs.replace(found, backend="cuda", arms=(default, graph))
    on_gpus.keep(place)
    words = page_of(place).words
    assert "Verified:" in words.partition("Choices")[0]
    assert 'class="verdict good"' in report_html(read_contents(place))
    assert "301.50" in words
    assert "222.25" in words
    assert words.count(", achieved") >= 2
    failed = msgspec.structs.replace(graph, achieved_gbps=None, failure="rank 1 ended with code 1")
    asked = msgspec.structs.replace(on_gpus, arms=(default, failed), chosen="graph")
    asked.keep(place)
    assert "rank 1 ended" in page_of(place).words
    assert 'class="verdict bad"' in report_html(read_contents(place))
    (place / "verify.json").write_text('{"something": "else"}')
    assert "verify.json is left out" in page_of(place).words


def test_findings_that_do_not_fit_together_are_left_out_with_the_reason(tmp_path):
    place = plan_directory(tmp_path / "plan", SMALL)
    plan, jobs = load_plan(place), FakeJobs(by_plan(lambda _: 1.0))
    found = verify_by(plan, place, jobs, sizes=(4096, 1 << 26))
    default, graph = found.arms
    row, *others = graph.rows
    negative, untimed = structs.replace(row, bytes=-1), "has rows without times or devices"
    few = structs.replace(row, seconds=row.seconds[:1])
    for changes, reason in (
        ({"arms": ()}, "lacks an arm"),
        ({"arms": (graph,), "winner": "graph", "chosen": "graph"}, "lacks an arm"),
        ({"winner": "variables"}, "lacks an arm"),
        (
            {"arms": (default, structs.replace(graph, rows=(*others,)))},
            "has arms of different sizes",
        ),
        *(
            ({"arms": (default, structs.replace(graph, rows=(changed, *others)))}, untimed)
            for changed in (structs.replace(row, seconds=()), structs.replace(row, seconds=(0.0,)))
        ),
        (
            {"arms": (default, structs.replace(graph, rows=(few, *others)))},
            "has not the same 6 to 40 rounds of all arms",
        ),
        ({"arms": (default, structs.replace(graph, transfers=(negative,)))}, untimed),
        ({"devices": ()}, untimed),
    ):
        structs.replace(found, backend="cuda", **changes).keep(place)
        assert f"verify.json is left out: it {reason}" in page_of(place).words
        shown = [tccl("show", str(place), *more) for more in ((), ("--json",))]
        assert [one.exit_code for one in shown] == [0, 0]
    (ring,) = explanation("").rings
    for changed in (
        structs.replace(ring, rings=0),
        *(
            structs.replace(ring, findings=(structs.replace(ring.findings[0], **change),))
            for change in ({"flows": ()}, {"each_gbps": ()}, {"each_alone_gbps": (1.0, 2.0)})
        ),
    ):
        structs.replace(explanation(""), rings=(changed,)).keep(place)
        assert "explanation.json is left out" in page_of(place).words


def test_a_damaged_journal_is_refused_by_its_line(tmp_path):
    place = plan_directory(tmp_path / "plan", SMALL)
    with (place / "measurements.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(
        InputError, match=r"measurements\.jsonl:2: does not fit the measurement format"
    ):
        read_contents(place)


def test_a_missing_journal_is_said(tmp_path):
    place = plan_directory(tmp_path / "plan", SMALL)
    (place / "measurements.jsonl").unlink()
    assert "measurements.jsonl is not there" in page_of(place).words


def test_the_page_recommends_the_plans_choice_first_and_shows_how_to_set_it(tmp_path):
    words = page_of(plan_directory(tmp_path / "plan", "amd-v100")).words
    verdict = words.partition("Choices")[0]
    assert "Set NCCL_P2P_LEVEL=SYS: 2.68x default NCCL" in verdict
    assert "variables only, NCCL_P2P_LEVEL=SYS" in verdict and "channel" not in verdict
    assert "Not verified yet" in verdict
    assert "tccl env" in verdict
    assert "recommended; 2.68x default NCCL" in words
    assert "export NCCL_P2P_LEVEL=SYS" in words


def test_the_top_says_of_which_hardware_and_software_the_page_is(tmp_path):
    words = page_of(plan_directory(tmp_path / "plan", "amd-v100")).words.partition("Choices")[0]
    for fact in (
        "4 of 4 (0-3), V100 PCIe",
        "family 25, model 1",
        "1 x 100 Gb/s",
        "4 x Gen4 x16",
        "2.30",
    ):
        assert fact in words
    assert re.search(r"planned: 20[0-9]{2}-[0-9]{2}-[0-9]{2} report by: tccl-py [0-9]", words)


def test_an_unknown_speed_of_a_nic_is_not_called_0(tmp_path):
    contents = read_contents(plan_directory(tmp_path / "plan", "amd-v100"))
    (nic,) = contents.plan.machine.nics
    (part,) = contents.plan.cluster.classes
    machine = structs.replace(part.machine, nics=(structs.replace(nic, speed_mbps=0),))
    cluster = structs.replace(
        contents.plan.cluster, classes=(structs.replace(part, machine=machine),)
    )
    plan = structs.replace(contents.plan, cluster=cluster)
    words = Page(report_html(structs.replace(contents, plan=plan))).words
    assert "1 x speed not reported" in words and "0 Gb/s" not in words


def test_default_nccls_ring_is_drawn_beside_the_plans(tmp_path):
    page = page_of(plan_directory(tmp_path / "plan", "amd-v100"))
    assert "Default NCCL's ring" in page.words


def test_a_page_has_the_drawing_of_notebooks_and_of_the_readme(tmp_path):
    place = plan_directory(tmp_path / "plan", "amd-v100")
    texts = report_html(read_contents(place)), drawing(load_plan(place))
    # The file has lines of text above, and so its parts are lower.
    page, file = (re.sub(r"\s+|translate\(0 [\d.]+\)", "", text) for text in texts)
    (parts,) = re.findall(r"<gtransform=.*(?=</svg>)", file)
    assert parts in page


def test_a_page_of_default_nccl_has_nothing_to_paste_and_others_an_absolute_path(tmp_path):
    nothing = page_of(plan_directory(tmp_path / "default", "h200x4-vm"))
    assert "Nothing to do." in nothing.words
    assert "eval" not in nothing.words
    words = page_of(plan_directory(tmp_path / "plan", "amd-v100")).words
    assert f'eval "$(tccl env {tmp_path / "plan"} --gpus 0-3)"' in words
    assert "Nothing to do." not in words
    changes = {"simulated": False, "assumed": False, "dry_run": True}
    words = page_of(plan_directory(tmp_path / "dry", "amd-v100", **changes)).words
    assert "Nothing is to be set." in words and "eval" not in words


def test_bare_copies_above_the_bound_say_why():
    plan = load_plan(PLANS / "amd-v100.json")
    bare, bound = rate_bars(plan, {})[-2:]
    assert bare.gbps > bound.gbps
    assert bare.note.startswith("no bound")


def test_where_jobs_ran_choices_have_achieved_rates_and_hops_have_predictions(tmp_path):
    contents = read_contents(plan_directory(tmp_path / "plan", SMALL))
    jobs = FakeJobs(by_plan(lambda _: 1.3), noise=0.001)
    target = target_of(contents.plan, tmp_path / "plan")
    found = verify_target(target, dry_run(contents.plan, jobs), RunBudget(sizes=(4096,)))
    plan = target.settle(structs.replace(found, backend="cuda")).plan
    assert (contents.plan.jobs_ran, plan.jobs_ran) == (False, True)
    words = Page(report_html(structs.replace(contents, plan=plan))).words
    assert "graph file, achieved by jobs" in words
    assert f"Rings, hops and bounds: {plan.provenance}, a prediction of bus bandwidth" in words


def test_equal_rates_are_a_sentence_and_no_map(tmp_path):
    sets = all_singles_and_pairs(range(4), [0, 1, 2, 3], pairs=0)
    page = page_of(plan_directory(tmp_path / "plan", "h200x4-vm", sets=list(sets)[:12]))
    assert "All the same: " in page.words


def test_rates_that_the_table_below_tells_apart_are_not_called_the_same(tmp_path):
    contents = read_contents(plan_directory(tmp_path / "plan", SMALL))
    pairs = itertools.permutations(range(4), 2)
    near = journal(*((f"G{a}->G{a}->G{b}", 0.78 if a else 0.80) for a, b in pairs))
    recorded = structs.replace(contents.journal, measurements=near)
    words = Page(report_html(structs.replace(contents, journal=recorded, pairs={}))).words
    assert "0.78" in words and "0.80" in words and "All the same" not in words


def test_loads_of_links_are_the_sums_of_the_flows_that_cross_them():
    machine = toy_machine(gpus=4, numa_nodes=2, per_switch=2)
    flows = ["G0->G0->G1", "G0->G0->G2", "G3->G3->C0->G1->G1"]
    rates = [3.0, 5.0, 2.0]
    loads = link_loads(
        Paths(machine, Knowledge()),
        [(parse_set(text).flows[0], gbps) for text, gbps in zip(flows, rates, strict=True)],
    )
    uplink = {gpu: machine.parents[f"G{gpu}"] for gpu in range(4)}
    assert loads["G0"].gbps == 8.0  # out of it; nothing comes in
    assert loads["G1"].gbps == 5.0
    assert loads["G2"].gbps == 5.0
    assert loads["G3"].gbps == 2.0
    assert uplink[0] == uplink[1]
    assert loads[uplink[0]].gbps == 5.0  # one flow goes up, the bounce comes down with 2
    assert sum(load.slowest for load in loads.values()) == 1


def test_links_have_the_colour_of_their_load_and_none_where_their_capacity_is_not_known():
    loads = [LinkLoad(gbps=gbps, capacity=10.0) for gbps in (4.0, 6.0, 9.0)]
    assert [load.level for load in loads] == ["0", "1", "2"]
    assert LinkLoad(gbps=4.0, capacity=None).level == "unknown"


@pytest.mark.parametrize("name", [ASUS, PCIE])
def test_the_link_that_is_marked_is_on_the_path_of_the_hop_that_the_text_names(name):
    plan = load_plan(PLANS / f"{name}.json")
    passed = Paths(plan.machine, plan.knowledge).passes(plan.bottleneck[1].flow)
    marked = {
        device for device, load in node_view(plan.machine, plan).loads.items() if load.slowest
    }
    assert len(marked) == 1
    assert marked <= {way.part.device for way in passed}


def test_links_as_they_are_now_are_shown_on_the_machine_of_the_plan_only(tmp_path):
    machine = load_plan(PLANS / f"{PCIE}.json").machine
    uuids = tuple(f"GPU-{index}" for index in machine.gpu_indices)
    known = Fingerprint(gpu_uuids=uuids, driver="580.1", numa_count=1, kernel="6.1")
    for gpu, uuid in zip(machine.gpus, uuids, strict=True):
        for name, text in (("speed", "16.0 GT/s PCIe"), ("width", "8")):
            place = tmp_path / f"sys/bus/pci/devices/{gpu.bus_id}/current_link_{name}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{text}\n")
        place = tmp_path / f"proc/driver/nvidia/gpus/{gpu.bus_id}/information"
        place.parent.mkdir(parents=True)
        place.write_text(f"GPU UUID: {uuid}\n")
    found = links_now(machine, known, HostState(root=tmp_path))
    assert {found[gpu.id] for gpu in machine.gpus} == {PciLink(speed_gts=16.0, width=8)}
    other = msgspec.structs.replace(known, gpu_uuids=("GPU-9", *uuids[1:]))
    assert links_now(machine, other, HostState(root=tmp_path)) == {}


def test_a_clusters_page_has_its_hosts_and_the_chains_of_each_class(tmp_path):
    plan = mixed()
    write_plan(plan, tmp_path)
    page = page_of(tmp_path)
    page.assert_accessible()
    names = [part.name for part in plan.cluster.classes]
    pictures = {a.get("aria-labelledby", "").partition("-title")[0] for a in page.all("svg")}
    assert {f"machine-{number}" for number in range(len(names))} <= pictures
    for host in plan.hosts:
        assert host.name in page.words
    for hop in (hop for path in plan.paths for chain in path.chains for hop in chain.hops):
        assert str(hop.flow) in page.words
    assert "N0 → " in page.words
    assert "nccl/order" in page.words
    assert "tccl env" not in page.words


@pytest.mark.parametrize("name", [SMALL, "amd-3090"])
def test_the_map_of_a_simulated_plan_is_complete_with_equal_channels(name, tmp_path):
    plan, model = load_plan(PLANS / f"{name}.json"), load_bundled(name)
    write_plan(plan, tmp_path, models={name: model})
    contents = read_contents(tmp_path)
    found = heat_map(contents.pairs, plan.gpus)
    assert found.is_complete and "blank cell" not in report_html(contents)
    for ends, (flow, gbps) in found.rates.items():
        assert flow == pair_flow(model.machine, model.knowledge, *ends)
        (alone,) = Simulator(model).measure([parse_set(str(flow))])
        assert gbps == pytest.approx(alone.total_gbps) and flow.blocks is None
