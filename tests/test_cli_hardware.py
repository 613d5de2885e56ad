"""`tccl measure` and `tccl plan` on hardware: fakes, and the host backend where a run is real."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tccl_py.errors import BudgetSpentError, InputError, MeasurementError
from tccl_py.health.host import HostState
from tccl_py.model.transfer import parse_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled, read_description
from tccl_py.simulator.source import Simulator
from tccl_py.sources import opening
from tccl_py.sources.journal import JournalFile, read_journal
from tccl_py.sources.profiled import MeasurementOptions, measured_machine, search_options
from tccl_py.statistics import median_interval
from tests.commands import tccl
from tests.planned import SMALL, WRX, replace_plan
from tests.sessions import PRINT, Fake, measures_by

KEYS = ["set", "gbps", "total_gbps", "simulated", "assumed", "dry_run"]
MEASURED_KEYS = [
    *KEYS,
    "skew_us",
    "skew_error_us",
    "overlap",
    "overlap_at_least",
    "spread",
    "repeats",
    "settled",
    "outliers",
]
BOUNCE = "G0->G0->C0->G1->G1"
SETS = ("G0->G0->G1", "G1->G1->G0", BOUNCE)


@pytest.fixture
def fake(monkeypatch):
    return faked(monkeypatch, Fake(SMALL))


def faked(monkeypatch, session):
    return measures_by(monkeypatch, session, "tccl_py.cli.measure", "tccl_py.sources.profiled")


# options


@pytest.mark.parametrize(
    "command", [("plan", "plan"), ("measure", "G0->G0->G1"), ("advise",)], ids=" ".join
)
def test_missing_cupy_is_said_before_a_worker_starts(command, monkeypatch, tmp_path):
    model = load_bundled(SMALL)
    print_ = msgspec.structs.replace(PRINT, gpu_uuids=("GPU-1", "GPU-2", "GPU-3", "GPU-4"))
    here = (model.machine, model.knowledge, print_)
    monkeypatch.setattr("tccl_py.readers.live.discover_machine", lambda: here)
    monkeypatch.setattr("tccl_py.readers.live.find_spec", lambda _: None)
    nvml = contextlib.nullcontext(SimpleNamespace(nvmlSystemGetCudaDriverVersion=lambda: 13010))
    monkeypatch.setattr("tccl_py.readers.live.opened_nvml", lambda _=None: nvml)
    monkeypatch.setattr("tccl_py.health.proving.this_host", HostState)
    monkeypatch.chdir(tmp_path)
    result = tccl(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    *_, last = result.stderr.splitlines()
    assert last.startswith("tccl: cupy-cuda13x: is not installed")
    assert "; `pip install '.[cuda13]'`" in last
    assert not list(tmp_path.iterdir())


def test_options_of_measuring_reach_the_session(fake, monkeypatch):
    given = []
    monkeypatch.setattr(opening, "open_session", lambda *more: given.append(more) or fake)
    done = tccl("measure", "G3->G3->G1", "--target", "0.2", "--meeting", "independent", "--check")
    assert done.exit_code == 0
    assert given == [
        (fake.place(), (1, 3), MeasurementOptions(target=0.2, meeting="independent", check=True))
    ]


def test_measurement_options_become_the_options_of_a_session():
    place = measured_machine("host", 2)
    session = opening.open_session(place, (0, 1), MeasurementOptions(target=0.2, check=True))
    assert session.options.stopping.target == 0.2
    assert (session.options.check, session.options.meeting) == (True, "pass-on")
    assert "core" in session.header.identity


def test_a_dry_run_is_repeated_less_unless_a_target_is_given():
    dry, gpus = search_options("host"), search_options("cuda")
    assert (dry.target > gpus.target, dry.repeats < gpus.repeats) == (True, True)
    assert search_options("host", 0.02).target == 0.02
    with pytest.raises(InputError):
        search_options("host", 0.0)


# measure, with a fake


def test_few_repeats_have_no_interval(fake, monkeypatch):
    fake.more = {"samples_gbps": ((1.0, 2.0),)}
    monkeypatch.setattr(fake, "measure", lambda sets: [answer_of(sets[0], ((1.0, 2.0),))])
    (entry,) = json.loads(tccl("measure", "G0->G0->G1", "--json").stdout)
    assert entry["spread"] == [None]
    assert " ? " in tccl("measure", "G0->G0->G1").stdout


def answer_of(transfers, samples, **more):
    (found,) = Simulator(load_bundled(SMALL)).measure([transfers])
    return msgspec.structs.replace(found, samples_gbps=samples, simulated=False, **more)


def test_doubtful_sets_are_named_in_plain_words(fake, monkeypatch):
    samples = ((10.0, 15.0, 5.0, 10.0, 11.0, 8.0, 10.0),)
    more = {"settled": False, "outliers": (1, 2), "overlap": 0.3, "overlap_at_least": True}
    monkeypatch.setattr(fake, "measure", lambda sets: [answer_of(sets[0], samples, **more)])
    errors = tccl("measure", "G0->G0->G1").stderr
    assert "after 7 repeats the 95 % interval" in errors
    assert "others: 2 of 7; they count" in errors
    assert "together for at least 30%" in errors


def test_flows_that_ran_apart_are_no_answer_and_not_kept(fake, monkeypatch, tmp_path):
    path = tmp_path / "journal.jsonl"
    more = {"overlap": 0.89, "skew_us": 632_000.0}
    monkeypatch.setattr(fake, "measure", lambda sets: [answer_of(sets[0], ((9.0,),), **more)])
    result = tccl("measure", "G0->G0->G1", "--journal", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ran together for only 89%" in result.stderr
    assert not read_journal(path).measurements


def test_a_journal_that_has_all_answers_starts_nothing(fake, tmp_path):
    path = tmp_path / "journal.jsonl"
    first = tccl("measure", *SETS, "--journal", path, "--json")
    assert sorted(fake.asked) == sorted(SETS)
    again = tccl("measure", *SETS, "--journal", path, "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert (fake.entered, len(fake.asked)) == (1, 3)
    contents = read_journal(path)
    assert (contents.header, len(contents.measurements)) == (fake.header, 3)


def test_the_json_has_whole_widths_of_intervals_as_its_page_says(fake, tmp_path):
    path = tmp_path / "journal.jsonl"
    result = tccl("measure", "G0->G0->G1", "--journal", path, "--json")
    (measurements,) = read_journal(path).measurements.values()
    rate = median_interval(measurements[0].samples_gbps[0])
    (row,) = json.loads(result.stdout)
    assert row["spread"] == [pytest.approx((rate.high - rate.low) / rate.middle)]
    schema = Path(__file__).parent.parent / "docs" / "schemas" / "measure.json"
    properties = json.loads(schema.read_text())["$defs"]["Measured"]["properties"]
    assert properties["spread"]["description"] == "width of the 95 % interval"


def test_an_interruption_keeps_what_was_measured(fake, tmp_path):
    def impatient(transfers):
        if len(fake.asked) == 3:
            raise KeyboardInterrupt

    fake.before = impatient
    path = tmp_path / "journal.jsonl"
    result = tccl("measure", *SETS, "--journal", path)
    assert (result.exit_code, result.stdout) == (130, "")
    assert f"kept in {path}: 2 of 3" in result.stderr
    assert fake.left == 1
    assert len(read_journal(path).measurements) == 2


def test_a_set_that_a_full_disk_did_not_take_is_not_said_to_be_kept(fake, tmp_path, monkeypatch):
    append = JournalFile.append

    def full(self, record):
        if len(fake.asked) == 3:
            raise InputError("the journal", "cannot be written", "it needs space")
        append(self, record)

    monkeypatch.setattr(JournalFile, "append", full)
    path = tmp_path / "journal.jsonl"
    result = tccl("measure", *SETS, "--journal", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"kept in {path}: 2 of 3" in result.stderr
    assert len(read_journal(path).measurements) == 2


def test_what_cannot_be_measured_ends_measure_with_its_sentence(fake):
    fake.alive = False
    result = tccl("measure", "G0->G0->G1")
    assert (result.exit_code, result.stdout, fake.left) == (2, "", 1)
    assert "tccl: G0->G0->G1" in result.stderr


# plan, with a fake


def planned(directory, *more):
    words = ("--nccl", "2.30", "--rings", "1", "--max-sets", "200")
    return tccl("plan", directory, *words, *more)


def test_a_measured_plan_says_so_everywhere(fake, tmp_path):
    result = planned(tmp_path / "plan")
    assert result.exit_code == 0, result.output
    plan = load_plan(tmp_path / "plan")
    assert (plan.simulated, plan.provenance) == (False, "measured")
    assert "GPUs 0,1,2,3: measured\n" in result.stdout
    assert "simulated" not in result.stdout
    assert plan.notices[-2:] == (
        "G0 is warmer than before",
        "while it was measured: G0 and G1 at 1980 MHz",
    )
    for path in (tmp_path / "plan" / "nccl").rglob("*.*"):
        assert "simulated" not in path.read_text()
    described = read_description(tmp_path / "plan" / "machines" / "h200x4-vm.json")
    assert (described.machine, described.knowledge) == (plan.machine, plan.knowledge)
    assert PRINT.driver in (tmp_path / "plan" / "machines" / "h200x4-vm.json").read_text()
    assert tccl("env", tmp_path / "plan").stdout.startswith("# tccl-py, rates measured\n")
    assert tccl("env", tmp_path / "plan", "--gpus", "0,1").exit_code == 0
    # NCCL's hops are never by copy engines; bare copies, for the limit, are.
    assert sum("->D" in text for text in fake.asked) == 1


def test_a_plan_that_goes_on_measures_nothing_twice(fake, tmp_path):
    planned(tmp_path / "whole")
    whole, count = load_plan(tmp_path / "whole"), len(fake.asked)

    def impatient(transfers):
        if len(fake.asked) == count + 30:
            raise KeyboardInterrupt

    fake.before = impatient
    cut = planned(tmp_path / "cut")
    assert cut.exit_code == 130
    assert load_plan(tmp_path / "cut").cancelled
    fake.before = lambda transfers: None
    assert planned(tmp_path / "cut").exit_code == 0
    # The set in flight was asked for twice.
    assert len(fake.asked) == 2 * count + 1
    resumed = load_plan(tmp_path / "cut")
    counts = {"sets_measured": 0, "sets_remembered": 0}
    assert msgspec.structs.replace(resumed, **counts) == msgspec.structs.replace(whole, **counts)


def test_settings_whose_sets_cannot_be_measured_are_left_out_by_name(fake, tmp_path):
    def choosy(transfers):
        if any(flow.is_bounce for flow in transfers.flows):
            raise MeasurementError("C0: no pinned memory")

    fake.before = choosy
    assert planned(tmp_path / "plan").exit_code == 0
    plan = load_plan(tmp_path / "plan")
    assert any("left out: C0: no pinned memory" in text for text in plan.notices)
    assert not any(hop.flow.is_bounce for hop in plan.rings[0].hops)


def test_a_plan_of_rates_that_vary_says_so(fake, tmp_path):
    fake.more = {"settled": False}
    planned(tmp_path / "plan", "--target", "0.02")
    count = load_plan(tmp_path / "plan").sets_measured
    said = load_plan(tmp_path / "plan").notices[-1]
    assert f"{count} of {count} sets" in said and "target of 0.02" in said


def test_a_plan_of_sets_that_may_have_run_apart_says_so(fake, tmp_path):
    fake.more = {"overlap": 0.46, "overlap_at_least": True}
    assert planned(tmp_path / "plan").exit_code == 0
    told = [one for one in load_plan(tmp_path / "plan").notices if "at least 46% of the" in one]
    assert 1 <= len(told) <= 5
    assert all(one.startswith("G0->") for one in told)


def test_more_devices_than_cores_are_warned_of_once():
    cores = len(os.sched_getaffinity(0))
    assert len(measured_machine("host", min(2, cores)).notices) == 1 + (cores < 2)
    (_, shared) = measured_machine("host", cores + 1).notices
    assert "the host backend share" in shared and f"{cores}" in shared


def test_a_plan_whose_first_set_cannot_be_measured_ends_with_its_sentence(fake, tmp_path):
    fake.alive = False
    result = planned(tmp_path / "plan")
    assert (result.exit_code, result.stdout) == (2, "")
    assert " the worker of G1" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plan_is_written_from_what_was_measured_when_the_time_cuts_a_set(fake, tmp_path):
    deadlines = []

    def cut(transfers):
        deadlines.append(fake.deadline)
        if len(deadlines) > 3:
            raise BudgetSpentError("over")

    fake.before = cut
    result = planned(tmp_path / "plan", "--max-seconds", "1000")
    assert result.exit_code == 0
    assert "; cut short\n" in result.stdout
    assert len(read_journal(tmp_path / "plan" / "measurements.jsonl").measurements) == 3
    # Without a set there would be no plan.
    assert deadlines[0] == math.inf > deadlines[1] == deadlines[-1]


def test_a_machine_that_is_lost_ends_the_plan_by_name_and_keeps_the_journal(fake, tmp_path):
    def breaking(transfers):
        fake.alive = len(fake.asked) < 10

    fake.before = breaking
    result = planned(tmp_path / "plan")
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first.endswith(f"resumes from {tmp_path / 'plan'}")
    assert "G1 was killed; nor" in second
    assert second.endswith(" be measured any more")
    assert len(read_journal(tmp_path / "plan" / "measurements.jsonl").measurements) == 9


def test_env_says_how_a_measured_plan_gets_rings_for_some_of_many_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", lambda: None)
    monkeypatch.setattr("tccl_py.delivery.fit.fingerprint_of", lambda facts: PRINT)
    reference = load_plan(Path(__file__).parent.parent / "plans" / f"{WRX}.json")
    plan = replace_plan(reference, simulated=False, assumed=False)
    write_plan(plan, tmp_path, fingerprint=PRINT)
    result = tccl("env", tmp_path, "--gpus", "0,3", "--choice", "graph")
    assert result.exit_code == 1
    assert "graph file for GPUs 0,3" in result.stderr
    assert "plan DIR --gpus 0,3`" in result.stderr


# the host backend, for real

QUICK = """
import tccl_py.sources.opening as opening
import tccl_py.planning.planner as planner
import tccl_py.planning.settings_search as settings_search
from tccl_profiler.profiler import Options
from tccl_profiler.session import Session
from tccl_profiler.precision import Stopping
from tccl_profiler.precision import WindowLimits
from tccl_py.cli.main import main

def open_session(place, gpus, _):
    options = Options(
        stopping=Stopping(target=9.0, minimum=1, limit=1),
        # On busy cores less may pass without anything moving.
        limits=WindowLimits(minimum_ms=30, maximum_ms=400),
    )
    return Session(
        place.machine, place.fingerprint, backend=place.backend, gpus=gpus, options=options
    )

opening.open_session = open_session
settings_search.CHANNELS, settings_search.BUFFSIZES = (1, 2), (4 << 20, 1 << 20)
main()
"""
ON_HOST = ("--backend", "host", "--devices", "2")
REHEARSAL = "measured by the host backend: copies in host memory"


class Child:
    """A run of `tccl` in a process of its own, whose own processes can be found."""

    def __init__(self, *arguments):
        self.mark = f"TCCL_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", QUICK, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )

    def finished(self):
        output, errors = self.process.communicate(timeout=120)
        return self.process.returncode, output, errors

    def until(self, lines, journal):
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.read_text().count("\n") >= lines):
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def left_behind(self):
        """Processes of this run that are still there after a while."""
        deadline = time.monotonic() + 60
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _alive(self):
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found


def on_host(*arguments):
    child = Child(*arguments)
    code, output, errors = child.finished()
    assert code == 0, errors
    assert not child.left_behind()
    return output, errors


def test_the_host_backend_measures_and_its_journal_answers_a_second_run(tmp_path):
    path = tmp_path / "journal.jsonl"
    sets = (BOUNCE, "G0->G0->G1{blocks=2} G1->G1->G0{blocks=2}")
    command = ("measure", *ON_HOST, *sets, "--journal", path, "--json")
    output, errors = on_host(*command)
    assert f"tccl: {REHEARSAL}" in errors
    found = json.loads(output)
    assert [list(entry) for entry in found] == [MEASURED_KEYS] * 2
    assert all(rate > 0 for entry in found for rate in entry["gbps"])
    assert all(entry["repeats"] == 1 and entry["dry_run"] for entry in found)
    kept = path.read_text()
    path.write_text(kept + '{"transfers":')
    output, errors = on_host(*command)
    assert json.loads(output) == found
    assert "last line of 13 characters" in errors
    assert path.read_text() == kept


def kept_in(path):
    return {str(one): list(found) for one, found in read_journal(path).measurements.items()}


SERIES = tuple(f"G0->G0->G1{{blocks=1,fifo={i}K}}" for i in range(64, 123))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_no_process_and_is_gone_on_from(how, tmp_path):
    path = tmp_path / "journal.jsonl"
    child = Child("measure", *ON_HOST, *SERIES, "--journal", path)
    child.until(4, path)
    child.process.send_signal(how)
    code, output, errors = child.finished()
    assert (code, output) == (130 if how == signal.SIGINT else -9, "")
    assert "Traceback" not in errors
    assert not child.left_behind()
    before = kept_in(path)
    assert 3 <= len(before) < len(SERIES)
    if how == signal.SIGINT:
        assert f"kept in {path}: {len(before)} of 59" in errors
    known = [text for text in SERIES if str(parse_set(text)) in before]
    output, _ = on_host("measure", *ON_HOST, *known, "--journal", path, "--json")
    assert [entry["set"] for entry in json.loads(output)] == known
    assert kept_in(path) == before


def test_a_plan_over_the_host_backend_is_a_rehearsal_and_says_so(tmp_path):
    place = tmp_path / "plan"
    command = ("plan", *ON_HOST, place, "--rings", "1", "--max-sets", "4", "--target", "0.3")
    output, _ = on_host(*command)
    assert "host-2, GPUs 0,1: measured in a DRY RUN" in output.partition("\n")[0]
    assert "DRY RUN: no advice" in output
    shown = json.loads(tccl("show", place, "--json").stdout)
    assert (shown["simulated"], shown["machine"]) == (False, "host-2")
    assert any(REHEARSAL in text for text in shown["notices"])
    assert shown["dry_run"]
    exports = tccl("env", place, "--choice", "graph", "--force").stdout
    assert exports.startswith("# tccl-py, rates measured in a DRY RUN\n")
    assert f"NCCL_GRAPH_FILE={place}/nccl/graph.xml" in exports
    journal = read_journal(place / "measurements.jsonl")
    assert not journal.header.simulated and journal.header.dry_run
    # The plan's file is gone: its journal answers all that a new plan asks, and nothing starts.
    kept = (place / "measurements.jsonl").read_text()
    again, _ = on_host(*command, "--force", "--json")
    assert json.loads(again)["sets_measured"] == 0
    assert (place / "measurements.jsonl").read_text() == kept
