"""The best variables that leave the chunks of send/recv and all-to-all as they are."""

import json

import pytest

from tccl_py.cli.plan import until_jobs_decide
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.target import read_target
from tccl_py.files import pick
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import chunk_bytes
from tccl_py.nccl.view import view
from tccl_py.plan.chains import CHOICES
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.text import choice_words, diff
from tccl_py.planning.planner import make_plan
from tccl_py.report.verification import headline
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.commands import tccl
from tests.fakes import scaled
from tests.nccl_cases import machine
from tests.planned import PCIE, SMALL, as_only, replace_plan
from tests.verified import FakeJobs, changed, dry_run, run_verification, verify_by

KIB, MIB = 1 << 10, 1 << 20
NO_P2P = {"NCCL_P2P_DISABLE": "1"}
SPEED = {128: 1.0, 256: 0.97, 512: 0.94, 1024: 0.81, 2048: 0.7, 4096: 0.5}
"""Rates of bounces by KiB of a channel's FIFO, as on four H200 without P2P."""


class Caching:
    """Measures a machine whose host memory is faster through small FIFOs."""

    simulated = True

    def __init__(self, name):
        self._simulator = Simulator(load_bundled(name))

    def measure(self, sets):
        return [self._slowed(answer) for answer in self._simulator.measure(sets)]

    def _slowed(self, answer):
        fifos = [flow.fifo.bytes for flow in answer.transfers.flows if flow.is_bounce and flow.fifo]
        speed = SPEED[max(fifos) // KIB] if fifos else 1.0
        return scaled(answer, speed)


@pytest.fixture(scope="module")
def plan():
    model = load_bundled(SMALL)
    return make_plan(model.machine, model.knowledge, Caching(SMALL), pinned_env=NO_P2P)


@pytest.fixture
def place(plan, tmp_path):
    write_plan(plan, tmp_path, models=as_only(load_bundled(SMALL)))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "level", "kib", "chunk"),
    [
        (PCIE, None, 1024, 128),
        (PCIE, None, 512, 64),
        # Pairs of GPUs with NVLink have chunks of 512 KiB, and lose them without P2P.
        (SMALL, None, 4096, 512),
        (SMALL, None, 2048, 256),
        (SMALL, "LOC", 4096, 128),
        (SMALL, "LOC", 128, 16),
    ],
)
def test_chunks_are_an_eighth_of_the_buffers_where_that_is_less_than_by_default(
    name, level, kib, chunk
):
    model = load_bundled(name)
    settings = Settings(p2p_level=level, buffsize=kib * KIB)
    assert chunk_bytes(view(model.machine, model.knowledge, settings)) == chunk * KIB


@pytest.mark.parametrize(("gpus", "chunk"), [(None, 512), ((0, 1), 512), ((0, 2), 128)])
def test_one_pair_with_nvlink_is_enough_for_its_chunks(gpus, chunk):
    pairs = machine("d_8x3090_nvl.xml")  # NVLink joins GPUs by two
    assert chunk_bytes(view(pairs, Knowledge(), Settings(), gpus=gpus)) == chunk * KIB


def test_where_the_best_variables_cut_chunks_a_plan_has_the_best_that_do_not(plan):
    default, large, variables = (plan.choices[name] for name in CHOICES[:3])
    assert variables.settings.buffsize < MIB <= large.settings.buffsize
    assert default.rate_gbps * 1.01 < large.rate_gbps < variables.rate_gbps
    assert list(plan.choices) == list(CHOICES)
    # What large all-reduces alone would take is recommended until jobs have run.
    assert plan.recommended == "variables"


@pytest.mark.parametrize("pinned", [{}, NO_P2P])
def test_where_variables_leave_chunks_alone_there_is_no_such_choice(pinned):
    plan = make_plan(SMALL, pinned_env=pinned)
    assert plan.choices.get("large-buffers") is None
    assert list(plan.choices) == [name for name in CHOICES if name != "large-buffers"]


def test_a_measured_plan_says_which_choices_jobs_have_to_judge(plan, capsys):
    measured = changed(plan, simulated=False)
    assert until_jobs_decide(measured).recommended == "default"
    said = capsys.readouterr().err
    for name in ("large-buffers", "variables"):
        assert choice_words(name, plan.choices[name].settings) in said


def test_commands_print_and_deliver_the_choice(plan, place):
    assert load_plan(place) == plan
    variables = environment(plan.choices.get("large-buffers").settings)
    shown = tccl("show", place).stdout
    assert "large buffers" in shown
    assert "chunks of send/recv as by default" in " ".join(shown.split())
    given = json.loads(tccl("env", place, "--choice", "large-buffers", "--json").stdout)
    assert (given["choice"], given["environment"]) == ("large-buffers", variables)
    for words in (("report", place), ("show", place, place), ("show", place, "--json")):
        assert tccl(*words).exit_code == 0


@pytest.mark.parametrize(
    ("transferred", "winner"), [(0.99, "large-buffers"), (0.9, "default"), (None, "variables")]
)
def test_jobs_decide_whether_large_buffers_are_harmless(plan, place, transferred, winner):
    """`transferred` is the speed of send/recv with large buffers, None that it never changes."""

    def kib(environment):
        return int(environment.get("NCCL_BUFFSIZE", 4 * MIB)) // KIB

    def faster(environment):
        return SPEED[kib(environment)] / SPEED[4096]

    def seconds(size, environment):
        return (1e-4 + size / 1e10) / faster(environment)

    def transfers(environment):
        if kib(environment) == 4096:
            return 1.0
        small = 0.6 if kib(environment) < 1024 else transferred
        return faster(environment) / (1.0 if transferred is None else small)

    jobs = FakeJobs(seconds, noise=0.001, transfers=transfers)
    budget = RunBudget(sizes=(4096, 64 * MIB, 256 * MIB))
    found = run_verification(plan, place, dry_run(plan, jobs), budget)
    assert [arm.name for arm in found.arms] == list(CHOICES[:3])
    assert found.winner == winner
    settled = read_target(plan, place).settle(changed(found, backend="cuda")).plan
    assert settled.recommended == winner
    assert settled.job_settings == plan.choices[winner].settings
    # Nothing was tuned: what was measured still holds.
    kept = ("rate_gbps", "bound_gbps", "bound_assumptions", "limit_gbps", "notices", "paths")
    assert pick(settled, *kept) == pick(plan, *kept)
    noted = settled.choices.get("large-buffers").note, settled.choices["variables"].note
    assert tuple(map(bool, noted)) == (transferred == 0.9, transferred is not None)
    fair = FakeJobs(lambda size, _: 1e-4 + size / 1e10, noise=0.001)
    later = run_verification(settled, place, dry_run(settled, fair), budget)
    without = read_target(settled, place).settle(later).plan
    assert (without.choices.get("large-buffers").note, without.choices["variables"].note) == (
        "",
        "",
    )
    assert (
        settled.choices.get("large-buffers").achieved_gbps
        == found.arm("large-buffers").achieved_gbps
    )
    assert (
        headline(found)[0]
        .split(": ")[1]
        .startswith(
            {
                "large-buffers": "large buffers win",
                "default": "default NCCL stays",
                "variables": "variables win",
            }[winner]
        )
    )
    write_plan(settled, place, models=as_only(load_bundled(SMALL)))
    lines = (place / "nccl" / "nccl.conf").read_text()
    assert all(
        f"{name}={value}" in lines for name, value in environment(settled.job_settings).items()
    )
    assert tccl("show", place).exit_code == 0


def test_a_graph_file_that_promises_more_is_compared_as_well_and_by_itself_always(plan, place):
    jobs = FakeJobs(lambda size, _: 1e-4 + size / 1e10, noise=0.001)
    budget = RunBudget(sizes=(4096, 64 * MIB))
    alone = run_verification(plan, place, dry_run(plan, jobs), budget, choice="graph")
    assert [arm.name for arm in alone.arms] == ["default", "graph"]
    faster = replace_plan(plan, rate_gbps=2 * plan.rate_gbps, bound_gbps=None)
    found = run_verification(faster, place, dry_run(plan, jobs), budget)
    assert [arm.name for arm in found.arms] == list(CHOICES)
    assert len({found.order.count(letter) for letter in "ABCDE"}) == 1
    assert found.winner == "default"


def test_a_recommended_graph_file_is_compared_whatever_it_promises(plan, place):
    jobs = FakeJobs(lambda size, _: 1e-4 + size / 1e10, noise=0.001)
    budget = RunBudget(sizes=(4096, 64 * MIB))
    found = run_verification(changed(plan, winner="graph"), place, dry_run(plan, jobs), budget)
    assert (found.chosen, found.accepted) == ("graph", True)


def test_settings_that_equal_large_buffers_are_timed_as_these_and_keep_what_jobs_achieved(
    plan, place
):
    target = read_target(plan, place)
    equal = target.retune({"variables": plan.choices.get("large-buffers").settings})
    assert equal.arm("variables").name == "large-buffers"
    assert equal.arm("graph").name == "graph"
    rates = {"default": 15.0, "large-buffers": 24.0, "variables": 30.0}
    assert target.retune({}, rates).plan.rates["large-buffers"][0] == 24.0


def test_plans_that_differ_in_large_buffers_alone_differ(plan):
    assert diff(plan, replace_plan(plan, large_buffers=None)).keys() == {
        "large_buffers",
        "large_buffers_gbps",
    }


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.5])
@pytest.mark.parametrize("winner", [None, "variables"])
def test_a_graph_file_is_compared_beside_large_buffers_only_where_it_promises_more(
    plan, tmp_path, gain, winner
):
    rate = plan.choices["variables"].rate_gbps * gain
    made = replace_plan(plan, rate_gbps=rate, bound_gbps=None, proven=False, winner=winner)
    write_plan(made, tmp_path, models=as_only(load_bundled(SMALL)))
    jobs = FakeJobs(lambda size, environment: 1e-4)
    found = verify_by(made, tmp_path, jobs, sizes=(4096,))
    assert ("graph" in [arm.name for arm in found.arms]) == (gain > 1)
