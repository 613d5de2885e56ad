"""`tccl check`: by a model, by a stand-in for hardware, and by the host backend."""

import json
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tccl_py.errors import InputError
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.preflight import measure_plan_again
from tccl_py.files import encode_json, encode_line
from tccl_py.health.drift import Comparison, Effort, TooShortError
from tccl_py.model.machine import Fingerprint
from tccl_py.model.measurement import JournalHeader
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import parse_set, transfer_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled, model_from_json
from tccl_py.simulator.source import Simulator
from tccl_py.sources import opening
from tccl_py.sources.journal import read_journal
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import MeasuredMachine, MeasurementOptions, measured_machine
from tests.commands import tccl
from tests.drifting import with_slower_link
from tests.planned import plan_of, rebind, with_parts
from tests.test_preflight import Host, jobs
from tests.verified import changed, dry_run

NAME = "intel-v100"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A simulated plan with noise; tests copy it."""
    directory = tmp_path_factory.mktemp("plans") / "plan"
    options = ("--simulate", NAME, "--noise", "0.02", "--max-sets", "40", "--rings", "1")
    assert tccl("plan", directory, *options).exit_code == 0
    # Parts of rings, by which a slower link is told from those beside it.
    assert tccl("show", directory, "--why").exit_code == 0
    return directory


@pytest.fixture
def plan(made, tmp_path):
    return shutil.copytree(made, tmp_path / "plan")


def degrade(directory, device="G2", left=0.5, name=NAME):
    """Make the model of a plan one with a slower link."""
    path = directory / "machines" / f"{name}.json"
    model = model_from_json(path.read_text(), where=str(path))
    path.write_text(encode_json(with_slower_link(model, device, left)))
    rebind(directory)


def test_metrics_replace_the_file_of_the_collector(plan, tmp_path):
    target = tmp_path / "tccl.prom"
    target.write_text("old\n")
    result = tccl("check", plan, "--prometheus", "-o", target)
    assert (result.exit_code, result.stdout) == (0, "")
    text = target.read_text()
    assert text.startswith("# HELP tccl_check_drifted ")
    assert f'tccl_check_drifted{{machine="{NAME}",simulated="true"}} 0\n' in text
    assert [path.name for path in tmp_path.iterdir() if "prom" in path.name] == ["tccl.prom"]


# Hardware

UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
PRINT = Fingerprint(gpu_uuids=UUIDS, driver="570.1", numa_count=4, kernel="6.1")


class Session:
    """Stands for a session and its profiler, by a model whose figures say they are measured."""

    def __init__(self, model):
        self.simulator = Simulator(model, noise=0.01, seed=9)
        self.profiler, self.notices, self.conditions = self, [], ""
        self.measured = Counter()
        self.header = JournalHeader(
            machine=model.name, identity="GPUs a to d; cuda backend, windows", simulated=False
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.notices.append("GPU 0 is warmer than before")

    def measure(self, sets):
        self.measured.update(sets)
        (found,) = self.simulator.measure(sets)
        return [replace(found, simulated=False)]


@pytest.fixture
def session():
    return Session(load_bundled(NAME))


@pytest.fixture
def measured(plan, session, monkeypatch):
    """The plan as if GPUs had been measured, and a stand-in for them."""
    made, journal = load_plan(plan), read_journal(plan / "measurements.jsonl")
    write_plan(replace(made, simulated=False), plan, fingerprint=PRINT)
    rows = [one for found in journal.measurements.values() for one in found]
    lines = [session.header, *(replace(one, simulated=False) for one in rows)]
    text = b"".join(encode_line(line) for line in lines)
    (plan / "measurements.jsonl").write_bytes(text)
    monkeypatch.setattr(opening, "open_session", lambda *_: session)
    found_here(monkeypatch, PRINT)
    return plan


def found_here(monkeypatch, fingerprint):
    model = load_bundled(NAME)
    place = MeasuredMachine(
        backend="cuda", machine=model.machine, knowledge=model.knowledge, fingerprint=fingerprint
    )
    monkeypatch.setattr("tccl_py.planning.plan_sources.measured_machine", lambda *_: place)


def test_every_set_is_really_measured_three_times_on_hardware(measured, session):
    assert tccl("check", measured).exit_code == 0
    assert len(session.measured) == 24
    assert set(session.measured.values()) == {3}


def test_another_machine_cannot_be_checked(measured, monkeypatch):
    found_here(monkeypatch, replace(PRINT, driver="580.2"))
    result = tccl("check", measured)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(measured) in result.stderr and "the driver was 570.1" in result.stderr


def test_the_host_backend_is_checked_by_itself(plan):
    """A real run, of processes that copy memory; what it finds depends on this machine's load."""
    place = measured_machine("host", 2)
    made = load_plan(plan)
    hops = made.rings[0].hops[:2]
    flows = (direct_write(0, 1, blocks=1), direct_write(1, 0, blocks=1))
    pairs = ((0, 1), (1, 0))
    hops = tuple(
        replace(hop, source=i, target=j, flow=flow)
        for hop, flow, (i, j) in zip(hops, flows, pairs, strict=True)
    )
    ring = replace(made.rings[0], hops=hops)
    two = {"rings": ((0, 1),), "assumed": False}
    made = with_parts(
        made, machine=place.machine, knowledge=place.knowledge, gpus=(0, 1), rings=(ring,),
        simulated=False, assumed=False, dry_run=True, subsets=(),
        default=replace(made.choices["default"], **two),
        variables=replace(made.choices["variables"], **two),
        alternatives=(),
    )  # fmt: skip
    shutil.rmtree(plan)
    plan.mkdir()
    write_plan(made, plan, fingerprint=place.fingerprint)
    with (
        open_source(
            place,
            options=MeasurementOptions(target=0.5, repeats=6),
            journal=plan / "measurements.jsonl",
        ) as source,
    ):
        source.measure([transfer_set(flows)])
    result = tccl("check", plan, "--json", "--max-seconds", "25")
    assert result.exit_code in (0, 1)
    found = json.loads(result.stdout)
    assert not found["simulated"] and found["dry_run"]
    assert found["sets_compared"] + len(found["skipped"]) == 1
    assert "host backend" in result.stderr


def test_an_unchanged_cluster_is_as_it_was_and_a_slower_link_on_its_hosts_is_told(tmp_path):
    directory, name = tmp_path / "plan", "amd-v100"
    options = ("--simulate", name, "--nodes", "2", "--rings", "1", "--max-sets", "20")
    assert tccl("plan", directory, *options, "--noise", "0.01").exit_code == 0
    result = tccl("check", directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"2 hosts of {name}: no drift")
    degrade(directory, left=0.3, name=name)
    found = json.loads(tccl("check", directory, "--json").stdout)
    assert found["drifted"]
    assert "G2" in found["changes"][0]["flow"]


# The preflight; test_preflight.py has its parts


@pytest.fixture
def verified(measured, monkeypatch):
    """A measured plan that was verified, with jobs by formula; returns how long they take."""
    host, factor = Host(plan_of(NAME), measured), [1.0]
    host.verified.keep(measured)

    @contextmanager
    def launcher_of(made, directory, options):
        yield dry_run(made, jobs(lambda _: factor[0], seed=3))

    monkeypatch.setattr("tccl_py.experiments.preflight.launcher_of", launcher_of)
    return measured, factor


def test_too_little_time_for_transfers_is_no_verdict_unless_collectives_are_slower(
    verified, monkeypatch
):
    monkeypatch.setattr("tccl_py.experiments.preflight._LEAST_S", 0.0)
    directory, factor = verified
    words = ("check", directory, "--max-seconds", "0.001")
    short = "is too short to measure one set twice"
    sound = tccl(*words, "--preflight")
    assert (sound.exit_code, sound.stdout) == (2, "")
    assert "results of collectives compared, all right" in sound.stderr and short in sound.stderr
    factor[0] = 1.3
    slower = tccl(*words, "--preflight")
    assert slower.exit_code == 1
    assert slower.stdout.startswith("preflight failed")
    assert "no drift" not in slower.stdout and "no transfer is slower" not in slower.stdout
    assert f"not all transfers were judged: --max-seconds {short}" in slower.stderr
    found = json.loads(tccl(*words, "--preflight", "--json").stdout)
    assert (found["ok"], found["sets_compared"], len(found["skipped"])) == (False, 0, 24)
    assert tccl(*words).exit_code == 2


def test_a_class_of_hosts_without_time_is_no_pass_of_a_preflight_where_another_became_faster(
    verified, monkeypatch
):
    directory, _ = verified
    some = parse_set("G0->G0->G1")
    (flow,) = some.flows
    faster = Comparison(transfers=some, flow=flow, was_gbps=10.0, is_gbps=12.0, p=1e-9)
    short = TooShortError("confirm a change", [some], 1.0)
    short.drift = replace(short.drift, rows=(faster,), changes=(faster,))

    def drift(*_):
        raise short

    monkeypatch.setattr("tccl_py.health.drift.Remeasuring.drift", drift)
    passed = tccl("check", directory, "--preflight")
    assert (passed.exit_code, passed.stdout) == (2, "")
    assert tccl("check", directory).exit_code == 1


PATTERN = parse_set("G0->G0->G2{blocks=7} G1->G1->G3{blocks=7}")


@pytest.fixture
def lacking(verified, monkeypatch):
    """A plan whose journal lacks a pattern of writes above a switch."""
    monkeypatch.setattr("tccl_py.health.drift.collapse_patterns", lambda *_, **__: iter([PATTERN]))
    return verified[0]


def test_patterns_that_the_journal_lacks_are_learnt_once(lacking):
    first, second = (tccl("check", lacking, "--preflight") for _ in range(2))
    assert "later preflights compare" in first.stderr
    assert "later preflights compare" not in second.stderr
    assert len(read_journal(lacking / "measurements.jsonl").measurements[PATTERN]) == 3


def test_a_pattern_that_no_time_was_left_for_is_not_said_to_be_learnt(lacking):
    hurried = tccl("check", lacking, "--preflight", "--max-seconds", "0.001")
    assert "later preflights compare" not in hurried.stderr
    assert PATTERN not in read_journal(lacking / "measurements.jsonl").measurements


def test_a_preflight_over_hosts_by_a_program_of_one_host_is_no_fault_of_the_hosts(verified):
    launcher = Launcher(job=object(), nccl_tests=Path("all_reduce_perf"))
    given = load_plan(verified[0]), verified[0], Effort(), launcher
    with pytest.raises(InputError) as error:
        measure_plan_again(*given, preflight=True, watching=lambda: None)
    assert error.value.where == "`with_`"


def test_gpus_in_use_are_no_fault_of_the_node(verified, monkeypatch):
    directory, _ = verified
    busy = "process 7 (train) uses GPU 1"
    monkeypatch.setattr("tccl_py.experiments.preflight.users_of", lambda gpus: busy)
    made = changed(dry_run(plan_of(NAME), jobs()), backend="cuda")
    launcher_of = contextmanager(lambda *_: (one for one in [made]))
    monkeypatch.setattr("tccl_py.experiments.preflight.launcher_of", launcher_of)
    result = tccl("check", directory, "--preflight", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert busy in result.stderr


def test_an_equal_host_is_compared_with_the_planned_one_where_that_is_said(verified, monkeypatch):
    directory, _ = verified
    other = replace(PRINT, gpu_uuids=tuple("wxyz"))
    found_here(monkeypatch, other)
    before = (directory / "measurements.jsonl").read_bytes()
    for words in ((), ("--preflight",)):
        assert tccl("check", directory, *words).exit_code == 2
        result = tccl("check", directory, *words, "--alike")
        assert result.exit_code == 0, result.stderr
    assert (directory / "measurements.jsonl").read_bytes() == before
    found_here(monkeypatch, replace(other, driver="580.2"))
    result = tccl("check", directory, "--alike")
    assert result.exit_code == 2 and "the driver was 570.1" in result.stderr
