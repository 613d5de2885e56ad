"""What the installed NCCL says: ranks that stand for NCCL's, and libraries that fail."""

import contextlib
import functools
import os
import subprocess
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.watch import GpuConditions, GpuProcess
from tccl_py.errors import MeasurementError
from tccl_py.files import decode_json, encode_json
from tccl_py.health.doctor import check_own_rings
from tccl_py.health.host import HostState
from tccl_py.nccl import asked
from tccl_py.nccl import asked as installed_rings
from tccl_py.nccl.asked import (
    InstalledRings,
    NcclAnswer,
    RefusedError,
    ask_each,
    ask_nccl,
    ask_together,
    judge_file,
)
from tccl_py.nccl.communicators import (
    CommunicatorLog,
    CommunicatorsSpec,
    Question,
    RankResult,
    logged_choices,
    same_rings,
    transport_of,
)
from tccl_py.nccl.graph_file import Channel, Graph, parse_graph_file
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.tuner import COLLECTIVES
from tccl_py.nccl.view import view
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.planning import installed_nccl as nccl_here
from tccl_py.planning.installed_nccl import rings_here
from tccl_py.planning.planner import make_plan
from tccl_py.rank_processes.tasks import RankOutput, RanksError
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.commands import tccl
from tests.nccl_cases import CASES, VERDICTS
from tests.planned import needing_a_graph, plan_of
from tests.skips import needs
from tests.test_cli_hardware import Fake, faked

pytestmark = pytest.mark.timeout(240)
GRAPH = (CASES / "h200x4-vm" / "graph.xml").read_text()
PLAIN = Settings(version="2.28")


def pair_graph(one, other):
    """A graph file for two GPUs: two channels of one ring."""
    channel = f'<channel><gpu dev="{one}"/><gpu dev="{other}"/></channel>'
    graph = (
        '<graph id="{}" pattern="{}" crossnic="0" nchannels="2" speedintra="20" speedinter="20" '
        'latencyinter="0" typeintra="NVL" typeinter="PIX" samechannels="1">{}</graph>'
    )
    graphs = [graph.format(number, pattern, channel * 2) for number, pattern in ((0, 4), (1, 1))]
    return f'<graphs version="1">{"".join(graphs)}</graphs>'


# A stand-in for the ranks of an NCCL


def from_first(ring, question):
    start = ring.index(question.gpus[0])
    return (*ring[start:], *ring[:start])


def ranks_of_2_28_9(monkeypatch, graphs=()):
    """Have ranks answer as NCCL 2.28.9 does: it runs a file's channels twice, or refuses the file.

    Without graph 0 in the file it searches, and takes the last of `graphs`.
    """

    def run(tasks, **_):
        return tuple(map(output, tasks))

    def output(task):
        spec = decode_json(task.spec, CommunicatorsSpec, where="the ranks' task")
        logs = [{} for _ in spec.gpus]
        for number, question in enumerate(spec.questions):
            text = next((t for t in (question.graph, *graphs) if t and 'id="0"' in t), "")
            rings = parse_graph_file(text, where="g.xml", version="2.28")[0].orders
            if strange := {gpu for ring in rings for gpu in ring} - set(question.gpus):
                why = f"XML Import Channel : dev {min(strange)} not found."
                raise RanksError([0], "ended with code 1", f"error: communicator {number}: {why}")
            said = "".join(
                f"h:1:1 [0] NCCL INFO Channel {channel:02}/{2 * len(rings):02} : "
                + " ".join(str(question.gpus.index(gpu)) for gpu in from_first(ring, question))
                + "\n"
                for channel, ring in enumerate(rings * 2)
            ) + "".join(
                f"h:1:1 [0] NCCL INFO {name.title().replace('_', '')}: {count} Bytes -> "
                "Algo RING proto LL channel{Lo..Hi}={0..1}\n"
                for name, _, count in question.calls
            )
            for gpu in question.gpus:
                first = gpu == question.gpus[0]
                logs[spec.gpus.index(gpu)][number] = CommunicatorLog(
                    log=said if first else "", dump=text if first else ""
                )
        results = tuple(encode_json(RankResult(version="2.28.9", logs=one)) for one in logs)
        return RankOutput(results=results, log="")

    monkeypatch.setattr(asked, "run_tasks", run)


@pytest.mark.parametrize(("room", "parts"), [(32, [1, 1, 1, 1]), (8, [1, 2, 1]), (5, [1, 3])])
def test_questions_of_a_job_are_parted_where_more_processes_have_room(monkeypatch, room, parts):
    ranks_of_2_28_9(monkeypatch, [pair_graph(0, 1)])
    tasks, run = [], asked.run_tasks

    def counted(each, **more):
        tasks.extend(decode_json(t.spec, CommunicatorsSpec, where="a task") for t in each)
        return run(each, **more)

    monkeypatch.setattr(asked, "run_tasks", counted)
    monkeypatch.setattr(asked, "MOST_RANKS", room)
    pairs = [(0, 1), (1, 2), (0, 2)]
    files = [Question(gpus=pair, graph=pair_graph(*pair)) for pair in pairs]
    plain, loaded = ask_together([({}, [Question(gpus=(0, 1))]), ({}, files)], connect=False)
    assert [of.gpus for of in (*plain, *loaded)] == [(0, 1), *pairs]
    assert [len(spec.questions) for spec in tasks] == parts


def test_graph_files_are_loaded_one_after_the_other_and_the_one_that_fails_is_named(monkeypatch):
    ranks_of_2_28_9(monkeypatch)
    questions = [
        Question(gpus=(0, 1), graph=pair_graph(0, 1)),
        Question(gpus=(1, 2), graph=pair_graph(1, 2)),
    ]
    found = ask_each({}, questions, connect=False)
    assert [one.gpus for one in found] == [(0, 1), (1, 2)]
    assert [len(one.rings) for one in found] == [4, 4]
    ranks_of_2_28_9(monkeypatch, [pair_graph(1, 2)])
    wrong = Question(gpus=(1, 2), graph=pair_graph(1, 3))
    with pytest.raises(RefusedError, match="dev 3 not found") as refused:
        ask_each({}, [questions[0], wrong], connect=False)
    assert (refused.value.question, refused.value.crash) == (1, False)


def test_a_file_without_rings_is_ignored(monkeypatch):
    ranks_of_2_28_9(monkeypatch, [pair_graph(0, 1)])
    text = pair_graph(0, 1).replace('id="0"', 'id="7"').replace('id="1"', 'id="8"')
    assert judge_file({}, [0, 1], text, where="g.xml").verdict == "ignored"


def test_default_nccl_of_a_real_machine_says_its_rings_channels_and_types():
    log = (CASES / "h200x4-vm" / "nccl-2.28.9-init.log").read_text()
    said = [CommunicatorLog(log=log, dump=GRAPH)]
    found = asked.read_answer(Question(gpus=(0, 1, 2, 3)), said, "2.28.9")
    assert (len(found.rings), found.fallback) == (24, False)
    assert (found.graph.nchannels, found.graph.typeintra) == (12, "NVL")
    assert set(map(transport_of, found.via.values())) <= {"P2P"}


# What commands make of it


@pytest.fixture
def gpus_here(monkeypatch):
    """Four idle GPUs, and NCCL 2.28.9 on them."""
    ranks_of_2_28_9(monkeypatch, [pair_graph(0, 1)])
    monkeypatch.setattr(nccl_here, "gpu_count", lambda: 4)
    monkeypatch.setattr(nccl_here, "why_not_asked", lambda gpus: "")


@pytest.mark.usefixtures("gpus_here")
def test_validate_asks_the_nccl_here(tmp_path):
    path = tmp_path / "graph.xml"
    path.write_text(pair_graph(2, 1))
    used = tccl("validate", path, "--gpus", "1,2")
    assert (used.exit_code, used.stderr) == (0, "")
    assert used.stdout.splitlines() == [
        f"{path}: used",
        "2 channels of the file, 4 in NCCL 2.28.9",
        "channels 0 1 2 3: 0 1",
    ]
    rejected = tccl("validate", path, "--gpus", "1,0")
    assert rejected.exit_code == 1
    assert "rejected" in rejected.stdout
    assert "dev 2 not found" in rejected.stdout


def test_validate_without_nccl_gpus_or_idle_gpus_says_so_in_one_sentence(monkeypatch, tmp_path):
    path = tmp_path / "graph.xml"
    path.write_text(GRAPH)
    monkeypatch.setattr(nccl_here, "gpu_count", lambda: 2)
    monkeypatch.setattr(nccl_here, "why_not_asked", lambda gpus: "process 7 (x) uses GPU 0")
    busy = tccl("validate", path)
    assert (busy.exit_code, busy.stdout) == (2, "")
    assert "process 7 (x) uses GPU 0" in busy.stderr
    monkeypatch.setattr(nccl_here, "why_not_asked", lambda gpus: "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnccl.so.2").touch()
    missing = tccl("validate", path)
    assert missing.exit_code == 2
    assert "does not load" in missing.stderr
    assert tccl("validate", path, "--gpus", "0,2").exit_code == 2
    assert "--machine" in tccl("validate", path, "--nodes", "2").stderr


@functools.cache
def small_plan():
    """A plan for two GPUs, by a model."""
    model = load_bundled("h200x4-vm")
    return make_plan(model.machine, model.knowledge, Simulator(model), gpus=(0, 1), version="2.28")


def test_every_graph_file_of_a_plan_is_loaded_before_it_is_written(monkeypatch):
    ranks_of_2_28_9(monkeypatch, [pair_graph(0, 1)])
    plan = needing_a_graph(small_plan())
    rings = InstalledRings(plan.machine, plan.knowledge, plan.gpus)
    assert nccl_here.with_answers(plan, rings).notices == plan.notices
    files = {**nccl_here.nccl_files(plan, Path()), "graph.xml": pair_graph(1, 2)}
    monkeypatch.setattr(nccl_here, "nccl_files", lambda plan, folder: files)
    with pytest.raises(MeasurementError, match=r"nccl/graph.xml: .* dev 2 not found"):
        nccl_here.with_answers(plan, rings)


def test_a_plan_has_nccls_choices_by_size_for_default_nccl_and_the_recommended_choice(monkeypatch):
    ranks_of_2_28_9(monkeypatch, [pair_graph(0, 1)])
    plan = needing_a_graph(small_plan())
    rings = InstalledRings(plan.machine, plan.knowledge, plan.gpus)
    jobs, run = [], asked.run_tasks

    def counted(tasks, **more):
        jobs.append(len(tasks))
        return run(tasks, **more)

    monkeypatch.setattr(asked, "run_tasks", counted)
    found = nccl_here.with_answers(plan, rings)
    assert jobs == [2]  # at the same time
    assert found.sizes.keys() == {"default", "graph"}
    assert {len(answer.rows) for answer in found.sizes.values()} == {5 * len(nccl_here.SIZES)}
    assert {(row.algorithm, row.channels) for row in found.sizes["graph"].rows} == {("ring", 2)}
    # What the first question of the plan has answered is not asked again.
    known = InstalledRings(plan.machine, plan.knowledge, plan.gpus, sizes=nccl_here.SIZES)
    plain = plan.choices["default"].settings
    assert known([plain, msgspec.structs.replace(plain, p2p_level="LOC")])
    assert nccl_here.with_answers(plan, known) == found
    default = msgspec.structs.replace(plan, winner="default")
    assert nccl_here.with_answers(default, known).sizes == {"default": found.sizes["default"]}
    assert jobs == [2, 2, 1]
    single = InstalledRings(plan.machine, plan.knowledge, plan.gpus, sizes=nccl_here.SIZES)
    assert single([plain])
    assert nccl_here.with_answers(default, single).sizes == {"default": found.sizes["default"]}
    assert jobs == [2, 2, 1, 1]
    del jobs[1:]
    # More processes than fit are asked one job after another.
    monkeypatch.setattr(asked, "MOST_RANKS", 3)
    assert nccl_here.with_answers(plan, rings) == found
    assert jobs == [2, 1, 1]
    rings.unable("GPU 0 is busy")
    assert nccl_here.with_answers(plan, rings) == plan


def test_of_many_subsets_one_of_each_size_is_loaded(monkeypatch):
    plan = plan_of("h200x4-vm", version="2.28")
    loaded = []

    def ask(jobs, **_):
        loaded.append([one.gpus for _, questions in jobs for one in questions if one.graph])
        raise MeasurementError("not by so many processes")

    def again(variables, questions, **_):
        raise MeasurementError("no memory is left")

    monkeypatch.setattr(nccl_here, "ask_together", ask)
    monkeypatch.setattr(nccl_here, "ask_each", again)
    rings = InstalledRings(plan.machine, plan.knowledge, plan.gpus)
    why = "NCCL's choices by message size are computed, as the NCCL here fails: no memory is left"
    default = msgspec.structs.replace(plan, winner="default")
    assert nccl_here.with_answers(default, rings).notices[-1] == why  # no job gets a file
    plan = needing_a_graph(plan)
    failed = nccl_here.with_answers(plan, rings)
    assert (failed.sizes, failed.notices[-1]) == ({}, f"{why}; the graph files were not tried")
    monkeypatch.setattr(nccl_here, "MOST_FILES", 11)
    nccl_here.with_answers(plan, rings)
    assert [len(one) for one in loaded] == [0, 3, 11]
    assert loaded[1] == [(0, 1, 2, 3), (2, 3), (1, 2, 3)]


def test_nccl_is_not_started_on_gpus_that_others_use(monkeypatch):
    seen = [GpuConditions(gpu=0), GpuConditions(gpu=1, other_processes=(GpuProcess(pid=7),))]

    def watched(gpus, own_pids):
        return contextlib.nullcontext(lambda: [one for one in seen if one.gpu in gpus])

    monkeypatch.setattr("tccl_profiler.watch.watching", watched)
    why = "process 7 (name unknown) uses GPU 1"
    assert (nccl_here.why_not_asked([0]), nccl_here.why_not_asked([0, 1])) == ("", why)
    place = Fake("h200x4-vm").place()
    rings = rings_here(place, (0, 1))
    assert (rings.able, len(rings.notices)) == (False, 1)
    assert rings_here(msgspec.structs.replace(place, backend="host"), (0, 1)) is None


def test_a_plan_says_that_what_is_installed_for_the_host_is_part_of_default_nccl(
    monkeypatch, tmp_path
):
    conf, place = tmp_path / "nccl.conf", Fake("h200x4-vm").place()
    monkeypatch.setattr(nccl_here, "HOST_FILE", conf)
    monkeypatch.setattr(nccl_here, "why_not_asked", lambda gpus: "")
    assert rings_here(place, (0, 1)).notices == []
    conf.write_text("NCCL_MIN_NCHANNELS=32\n")
    assert rings_here(place, (0, 1)).notices == [
        f"{conf} holds for all NCCL jobs here, default NCCL as well"
    ]


def test_a_measured_plan_has_nccls_own_rings_and_files_that_it_loads(monkeypatch, tmp_path, h200):
    faked(monkeypatch, Fake("h200x4-vm"))
    rings, asks = installed(monkeypatch, h200, answer([(0, 2, 1, 3)]))
    monkeypatch.setattr("tccl_py.planning.installed_nccl.rings_here", lambda *_: rings)

    def refused(variables, questions, **_):
        if questions[0].graph is None:
            return [answer([(0, 2, 1, 3)])]
        raise RefusedError(0, "dev 2 not found", crash=False)

    monkeypatch.setattr(nccl_here, "ask_each", refused)
    monkeypatch.setattr(Plan, "recommended", "graph")
    place = tmp_path / "plan"
    words = ("plan", place, "--nccl", "2.28", "--max-sets", "5")

    def tried(plan, _):
        return msgspec.structs.replace(plan, notices=(*plan.notices, "it was tried"))

    result = tccl(*words)
    assert result.exit_code == 2
    assert "nccl/graph.xml: NCCL here does not" in result.stderr
    assert [path.name for path in place.iterdir()] == ["measurements.jsonl"]
    monkeypatch.setattr("tccl_py.planning.installed_nccl.with_answers", tried)
    result = tccl(*words)
    assert result.exit_code == 0
    assert "planned for NCCL" not in result.stderr
    plan = load_plan(place)
    assert set(plan.choices["default"].rings) == {(0, 2, 1, 3)}
    assert any("the plan takes what it runs" in one for one in plan.notices)
    assert "it was tried" in plan.notices
    assert len(asks) == 2


def answer(rings, *, version="2.28.9", via="P2P/CUMEM", channels=12, fallback=False):
    """NCCL's answer: each channel of the search twice."""
    gpus = tuple(sorted(rings[0]))
    orders = [rings[n % len(rings)] for n in range(channels)]
    graph = Graph(
        id=0,
        pattern=4,
        crossnic=0,
        nchannels=channels,
        speedintra=30.0,
        speedinter=30.0,
        typeintra="NVL",
        typeinter="PIX",
        samechannels=1,
        channels=tuple(Channel(order) for order in orders),
    )
    hops = {hop for ring in rings for hop in zip(ring, (*ring[1:], ring[0]), strict=True)}
    return NcclAnswer(
        version=version,
        gpus=gpus,
        rings=tuple(orders * 2),
        graph=graph,
        via=dict.fromkeys(sorted(hops), via),
        fallback=fallback,
    )


@pytest.fixture
def h200():
    return load_bundled("h200x4-vm")


def installed(monkeypatch, model, found):
    """Rings of an NCCL that answers `found`, and what it was asked."""
    asks = []

    def ask(variables, gpus, **_):
        asks.append(variables)
        if isinstance(found, Exception):
            raise found
        return found

    def together(jobs, **_):
        raise MeasurementError("no memory is left")

    monkeypatch.setattr(installed_rings, "ask_nccl", ask)
    monkeypatch.setattr(installed_rings, "ask_together", together)
    return InstalledRings(model.machine, model.knowledge, model.machine.gpu_indices), asks


def test_where_nccl_does_as_its_rules_say_nothing_is_noted(monkeypatch, h200):
    rings, asks = installed(monkeypatch, h200, answer([(2, 3, 0, 1)]))
    emulated = default_rings(view(h200.machine, h200.knowledge, PLAIN))
    assert rings([PLAIN, PLAIN]) == 2 * rings([PLAIN]) == [emulated] * 2
    assert (asks, rings.notices) == ([{}], [])


def test_nccl_is_asked_under_several_settings_at_the_same_time_and_not_by_too_many(
    monkeypatch, h200
):
    ranks_of_2_28_9(monkeypatch, [GRAPH])
    jobs, run = [], asked.run_tasks

    def counted(tasks, **more):
        jobs.append(len(tasks))
        return run(tasks, **more)

    monkeypatch.setattr(asked, "run_tasks", counted)
    levels = [None, "SYS", "PHB", "LOC"]
    choices = [msgspec.structs.replace(PLAIN, p2p_level=level) for level in levels]
    rings = InstalledRings(h200.machine, h200.knowledge, h200.machine.gpu_indices)
    found = rings([*choices, PLAIN])
    assert (len(found), found[0], jobs) == (5, found[-1], [4])
    monkeypatch.setattr(asked, "MOST_RANKS", 8)
    again = InstalledRings(h200.machine, h200.knowledge, h200.machine.gpu_indices)
    assert again(choices) == found[:-1]
    assert jobs[1:] == [2, 2]


def test_where_nccl_does_otherwise_the_plan_takes_that_and_says_so(monkeypatch, h200):
    other = ((0, 2, 1, 3), (0, 1, 3, 2))
    rings, _ = installed(monkeypatch, h200, answer(other, channels=2))
    (found,) = rings([PLAIN])
    assert (found.rings, found.channels) == (other, 4)
    (notice,) = rings.notices
    assert "runs 4 channels over 0 2 1 3, 0 1 3 2" in notice
    plan = make_plan(
        h200.machine,
        h200.knowledge,
        Simulator(h200),
        version="2.28",
        own_rings=lambda choices: [found for _ in choices],
    )
    assert plan.choices["default"].rings == other


def test_all_choices_are_asked_for_before_anything_is_measured(h200):
    happened = []

    class Source(Simulator):
        def measure(self, sets):
            happened.append("measured")
            return super().measure(sets)

    def rings(choices):
        happened.extend("asked" for _ in set(choices) - known)
        known.update(choices)
        return [default_rings(view(h200.machine, h200.knowledge, one)) for one in choices]

    known = set()
    make_plan(h200.machine, h200.knowledge, Source(h200), version="2.28", own_rings=rings)
    assert happened.count("asked") == 2  # with P2P and without
    assert "asked" not in happened[happened.index("measured") :]


def test_hops_by_another_transport_are_named(monkeypatch, h200):
    rings, _ = installed(monkeypatch, h200, answer([(0, 1, 2, 3)], via="SHM/direct"))
    rings([PLAIN])
    (notice,) = rings.notices
    assert "connects GPU 0 -> 1 by SHM/direct, not P2P, " in notice
    assert " and 1 more: " in notice


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (MeasurementError("no library"), "no library"),
        (answer([(0, 1, 2, 3)], version="2.30.7"), "it is 2.30.7"),
    ],
)
def test_where_nccl_cannot_be_asked_its_rules_are_taken_and_it_is_asked_once(
    monkeypatch, h200, found, why
):
    rings, asks = installed(monkeypatch, h200, found)
    blocked = msgspec.structs.replace(PLAIN, p2p_level="LOC")
    choices = [PLAIN, blocked]
    views = [view(h200.machine, h200.knowledge, one) for one in choices]
    assert rings(choices) == [default_rings(one) for one in views]
    assert (len(asks), rings.able) == (1, False)
    (notice,) = rings.notices
    assert f": {why}" in notice
    plan = needing_a_graph(small_plan())
    assert nccl_here.with_answers(plan, rings) == plan


def test_the_doctor_says_which_rings_nccl_takes(monkeypatch):
    (found,) = check_own_rings(HostState(own_rings=answer([(0, 2, 1, 3)])))
    assert found.severity == "note"
    assert "24 channels over 0 2 1 3" in found.what
    assert "4 by P2P/CUMEM" in found.what
    (found,) = check_own_rings(HostState(own_rings=answer([(0, 1)], channels=1, fallback=True)))
    assert found.severity == "slow"
    assert "in its simple order" in found.what
    (unseen,) = check_own_rings(HostState(own_rings="process 7 (x) uses GPU 0"))
    assert unseen.why == "process 7 (x) uses GPU 0"
    assert not list(check_own_rings(HostState()))


# Libraries that fail


@pytest.fixture(scope="module")
def failing_library(tmp_path_factory):
    needs("a C compiler")
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("failing_nccl.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


@pytest.fixture
def failing(failing_library, monkeypatch, tmp_path):
    """Ask an NCCL that fails in some way; afterwards no process of it is left."""
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("TCCL_FAILING_NCCL_PIDS", str(pids))

    def ask(how, timeout=30.0, **more):
        monkeypatch.setenv("TCCL_FAILING_NCCL", how)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(failing_library.parent))
        monkeypatch.setattr(asked, "TIMEOUT_S", timeout)
        return ask_each({}, [Question(gpus=(0, 1), **more)])[0]

    yield ask
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refuse", "ncclCommInitRankConfig: internal error: it fails"),
        ("die", "rank 1 of NCCL was killed"),
        ("torn", "NCCL's log: shows 1 of 2 channels"),
    ],
)
def test_a_failing_nccl_is_no_answer_and_leaves_no_process(failing, how, why):
    with pytest.raises(MeasurementError, match=why):
        failing(how)


def test_collectives_run_and_show_nccls_choice_at_each_size(failing):
    sizes = (4096, 4 << 20)
    found = failing("choose", graph=pair_graph(0, 1), sizes=sizes).choices
    assert [(row.collective, row.bytes) for row in found] == list(product(COLLECTIVES, sizes))
    kinds = {(row.bytes, row.algorithm, row.protocol, row.channels) for row in found}
    assert kinds == {(4096, "ring", "ll", 1), (4 << 20, "ring", "simple", 4)}
    assert failing("choose", graph=pair_graph(0, 1)).choices == ()


CHOICE = "h:1:2 [0] NCCL INFO {}: 1024 Bytes -> Algo {} proto SIMPLE channel{{Lo..Hi}}={{0..15}}\n"
CALLS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def choices_log(algorithm="NVLS", calls=CALLS):
    lines = [CHOICE.format(name, algorithm) for name in calls]
    return (
        "".join(lines)
        .replace("AllGather: 1024", "AllGather: 512")
        .replace("ReduceScatter: 1024", "ReduceScatter: 512")
    )


def test_choices_that_the_cost_model_does_not_have_are_read_too():
    question = Question(gpus=(0, 1), sizes=(1024,))
    found = logged_choices(question, choices_log())
    assert {(row.bytes, row.algorithm, row.channels) for row in found} == {(1024, "nvls", 16)}


@pytest.mark.parametrize(
    "log", ["", choices_log(calls=CALLS[1:]), choices_log("MAGIC"), choices_log() * 2]
)
def test_of_a_log_with_other_collectives_no_choices_are_made(log):
    with pytest.raises(MeasurementError, match="NCCL's log"):
        logged_choices(Question(gpus=(0, 1), sizes=(1024,)), log)


def test_an_nccl_that_hangs_is_ended_in_time(failing):
    with pytest.raises(MeasurementError, match=r"did not end within 2 s"):
        failing("hang", timeout=2.0)


def test_a_file_is_not_blamed_where_nccl_fails_without_it(failing):
    with pytest.raises(MeasurementError, match="it fails") as error:
        failing("refuse", graph=pair_graph(0, 1))
    assert not isinstance(error.value, RefusedError)


def test_without_a_library_it_is_said_what_does_not_load(tmp_path, monkeypatch):
    (tmp_path / "libnccl.so.2").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(MeasurementError, match=r"NCCL's library does not load .*"):
        ask_nccl({}, [0, 1])


LOG = "".join(
    f"h:1:1 [0] NCCL INFO Channel {n:02}/04 : {ranks}\n"
    for n, ranks in enumerate(["0 1 2", "0 2 1"] * 2)
) + "".join(
    f"h:1:1 [0] NCCL INFO Channel {n:02}/0 : {one}[{one}] -> {other}[{other}] via P2P/CUMEM\n"
    for n in range(4)
    for one, other in ((0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0))
)
DUMP = (VERDICTS / "graphs" / "a_ok1.xml").read_text()


@given(st.integers(0, len(LOG)), st.integers(0, len(LOG)), st.integers(0, len(DUMP)))
@settings(max_examples=200, deadline=None)
def test_of_torn_logs_no_rings_are_made(start, end, dumped):
    said = [CommunicatorLog(log=LOG[start:end], dump=DUMP[:dumped])]
    question = Question(gpus=(4, 5, 7))
    try:
        found = asked.read_answer(question, said, "2.28.9")
    except MeasurementError:
        return
    assert all(
        same_rings(ring, order)
        for ring, order in zip(found.rings, [(4, 5, 7), (4, 7, 5)] * 2, strict=True)
    )
    assert all("P2P/CUMEM".startswith(via) for via in found.via.values())


def test_whole_logs_give_rings_and_transports():
    said = [CommunicatorLog(log=LOG, dump=DUMP)]
    found = asked.read_answer(Question(gpus=(4, 5, 7)), said, "2.28.9")
    assert found.rings == ((4, 5, 7), (4, 7, 5)) * 2
    assert len(found.via) == 6


def test_the_environment_of_ranks_has_none_of_the_callers_settings(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "HOME": "/h"}
    )
    found = asked.rank_environment({"NCCL_ALGO": "Ring"}, connect=True)
    assert "NCCL_P2P_DISABLE" not in found
    assert (found["NCCL_NVLS_ENABLE"], found["HOME"], found["NCCL_ALGO"]) == ("0", "/h", "Ring")
    assert found["NCCL_RUNTIME_CONNECT"] == "0"
    assert "NCCL_RUNTIME_CONNECT" not in asked.rank_environment({}, connect=False)
