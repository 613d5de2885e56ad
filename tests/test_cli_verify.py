"""`tccl verify`: what it refuses, prints, keeps and answers; jobs are stand-ins."""

import json
import shutil
import signal

import pytest

from tccl_py.experiments import plans as module
from tccl_py.experiments.record import Verification
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import lock_directory
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.workloads.workload import Workload, WorkloadRow, write_workload
from tests.commands import tccl
from tests.planned import as_only
from tests.test_json_page import same_keys
from tests.verified import FakeJobs, Interrupting, by_plan, by_variables, changed, without_gpus

NAME = "intel-v100"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned") / "plan"
    options = ("--simulate", NAME, "--max-sets", "20", "--rings", "1")
    assert tccl("plan", directory, *options).exit_code == 0
    return directory


@pytest.fixture
def place(planned, tmp_path):
    """The plan, in a directory of the test's own."""
    directory = tmp_path / "plan"
    directory.mkdir()
    shutil.copy(planned / "measurements.jsonl", directory)
    write_plan(load_plan(planned), directory, models=as_only(load_bundled(NAME)))
    return directory


@pytest.fixture
def jobs(monkeypatch):
    """Makes the command's jobs stand-ins."""

    def use(ratio, *, variables=lambda _: 1.0, **more):
        fake = FakeJobs(by_plan(ratio, variables=variables), **more)
        monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
        monkeypatch.setattr(module, "check_torch", lambda: None)
        return fake

    return use


def test_all_rows_are_shown(place, jobs):
    jobs(lambda _: 1.0, variables=lambda _: 1.3)
    words = ("--backend", "host", "--rounds", "6", "--all", "--sizes", "1M")
    found = json.loads(tccl("verify", place, *words, "--json").stdout)
    assert found["winner"] == "variables"
    for arm in found["arms"][:2]:
        assert {"broadcast", "all_to_all"} <= {row["collective"] for row in arm["transfers"]}
    shown = tccl("verify", place, *words).stdout
    assert "default: broadcast" not in shown and "variables: broadcast: 16 KiB 1." in shown


@pytest.fixture
def interrupt(jobs, monkeypatch):
    """Makes the command's jobs stand-ins of which one sends a signal."""

    def use(number, at, **more):
        jobs(lambda size: 1.0)
        fake = Interrupting(number=number, at=at, **more)
        monkeypatch.setattr(module, "LocalRunner", lambda server: fake)

    return use


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


# Three jobs check values, and a round of three arms has four.
@pytest.mark.parametrize("count", [1, 4, 24])
@pytest.mark.parametrize("more", [(), ("--tune",)])
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_verification_interrupted_before_it_has_a_table_says_so_and_changes_nothing(
    place, interrupt, count, more, number, code
):
    before = files_of(place)
    interrupt(number, lambda done: done == count)
    found = tccl("verify", place, "--backend", "host", *more)
    assert (found.exit_code, found.stdout) == (code, "")
    assert "interrupted before 7 rounds were complete, so there is no table" in found.stderr
    assert f"interrupted: nothing in {place} was changed" in found.stderr
    assert files_of(place) == before


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_complete_rounds_of_an_interrupted_verification_are_shown_and_not_kept(
    place, interrupt, number, code
):
    before = files_of(place)
    # Two jobs check values; then a round has three, of default NCCL twice. None is clear.
    interrupt(number, lambda count: count > 26, ratio=1.0, noise=0.1)
    words = ("verify", place, "--backend", "host", "--choice", "graph", "--sizes", "1G")
    found = tccl(*words, "--rounds", "20", "--json")
    assert found.exit_code == code, found.stderr
    shown = json.loads(found.stdout)
    assert shown["rounds"] == 8
    assert [arm["name"] for arm in shown["arms"]] == ["default", "graph"]
    assert "interrupted: these are the 8 complete rounds" in shown["notices"][-1]
    assert f"interrupted: nothing in {place} was changed" in found.stderr
    assert files_of(place) == before


def test_what_was_verified_is_kept_when_tuning_is_interrupted(place, interrupt, monkeypatch):
    before = (place / "plan.json").read_bytes()
    tuning = []
    interrupt(signal.SIGTERM, lambda count: bool(tuning))
    run = module.run_tuning
    monkeypatch.setattr(module, "run_tuning", lambda *a, **k: tuning.append(1) or run(*a, **k))
    found = tccl("verify", place, "--backend", "host", "--tune")
    assert found.exit_code == 143
    assert "interrupted: the plan is" in found.stderr
    assert "there is no table" not in found.stderr
    assert (place / "plan.json").read_bytes() == before
    assert Verification.load(place).winner == "graph"
    assert not list(place.glob(".*"))


def test_copy_engines_that_lose_at_a_size_are_not_recommended(tmp_path, jobs):
    place = tmp_path / "plan"
    options = ("--simulate", NAME, "--max-sets", "20", "--rings", "1", "--nccl", "2.28")
    assert tccl("plan", place, *options).exit_code == 0

    def seconds(size, told):
        default = 1e-4 + size / 1e10
        if "NCCL_SHM_USE_CUDA_MEMCPY" not in told:
            return default
        return default * (1.06 if size == 4096 else 0.5)

    fake = jobs(lambda _: 1.0, noise=0.001)
    fake.seconds = seconds
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M")
    kept = Verification.load(place)
    engines = [one for one in kept.tried if one.settings.shm_copy_engine]
    assert max(one.achieved_gbps for one in engines) > 1.5 * kept.tried[0].achieved_gbps
    after = load_plan(place)
    # They are offered for large messages, with a note on the small.
    assert (after.recommended, after.choices["variables"].settings.shm_copy_engine) == (
        "default",
        "both",
    )
    assert "4 KiB" in after.choices["variables"].note
    assert "tuned: default NCCL\n" in found.stderr


def test_a_plan_that_another_run_has_is_left_alone(place, jobs):
    fake = jobs(lambda size: 1.0)
    with lock_directory(place):
        found = tccl("verify", place, "--backend", "host")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "another run; wait for" in found.stderr and f"{place}" in found.stderr
    assert not fake.jobs
    assert not (place / "verify.json").exists()


def test_without_torch_the_sentence_names_it(place, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    found = tccl("verify", place, "--backend", "host")
    assert found.exit_code == 2
    assert "installed; `pip install torch`" in found.stderr


def test_plan_tunes_when_asked_to(tmp_path, jobs, monkeypatch):
    def seconds(size, told):
        faster = "NCCL_GRAPH_FILE" in told and told.get("NCCL_BUFFSIZE") == "262144"
        return (1e-4 + size / 1e10) / (1.3 if faster else 1.0)

    fake = jobs(lambda _: 1.0)
    fake.seconds = seconds
    # Where GPUs are missing: ranks are stand-ins, and so is their place.
    monkeypatch.setattr(module, "machine_launcher", without_gpus)
    monkeypatch.setattr(module, "check_tuning", lambda _: None)
    options = ("--simulate", NAME, "--max-sets", "20", "--rings", "1", "--tune", "--json")
    made = tccl("plan", tmp_path / "plan", *options)
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["settings"]["buffsize"] == 262144
    assert Verification.load(tmp_path / "plan").accepted
    assert "the graph file wins: 1." in made.stderr


def test_plan_refuses_to_tune_where_nothing_can_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measured_machine", lambda: None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    made = tccl("plan", tmp_path / "plan", "--simulate", NAME, "--tune")
    assert made.exit_code == 2
    assert "torch: is not installed" in made.stderr
    assert not (tmp_path / "plan").exists()
    made = tccl("plan", tmp_path / "plan", "--simulate", NAME, "--tune", "--nodes", "2")
    assert made.exit_code == 2
    assert "runs collectives on the hosts" in made.stderr


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes stand-ins count as jobs on GPUs."""

    def launcher(plan, directory, launcher):
        return changed(without_gpus(plan, directory, launcher), backend="cuda")

    monkeypatch.setattr(module, "machine_launcher", launcher)


def slowing(ratio):
    """How much longer send/recv and all-to-all take by variables that speed all rows up by 1.3."""
    return lambda told: 1.3 / ratio if by_variables(told) else 1.0


def files_of(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def first_row(found):
    return found["arms"][0]["rows"][0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.update(arms=[]),
        lambda found: found.update(arms=found["arms"][1:]),
        lambda found: found.update(arms=found["arms"][:1], winner="graph"),
        lambda found: found.update(arms=found["arms"][:1], chosen="variables"),
        lambda found: first_row(found).update(seconds=[]),
        lambda found: first_row(found).update(seconds=[0.0] * 7),
        lambda found: found["arms"][0].update(transfers=[]),
    ],
)
def test_a_verification_whose_parts_do_not_fit_is_refused_or_shown(place, jobs, damage):
    jobs(lambda _: 1.0)
    assert tccl("verify", place, "--sizes", "4K", "--backend", "host").exit_code == 0
    found = json.loads((place / "verify.json").read_text())
    damage(found)
    (place / "verify.json").write_text(json.dumps({**found, "backend": "cuda"}))
    for command in (("show",), ("show", "--json"), ("report",), ("env",)):
        done = tccl(command[0], place, *command[1:])
        assert done.exit_code in (0, 2), (command, done.exception)


@pytest.mark.usefixtures("on_gpus")
def test_the_communication_of_a_job_decides_for_that_job_alone(place, jobs, tmp_path):
    rows = [("all_reduce", ((0, 1, 2, 3),), 8.0), ("send_recv", ((0, 1), (2, 3)), 1.0)]
    made = Workload(
        name="my job",
        source="made by a test",
        ranks=4,
        rows=tuple(
            WorkloadRow(collective=kind, dtype="float16", bytes=3 << 20, groups=groups, calls=calls)
            for kind, groups, calls in rows
        ),
    )
    file, other = tmp_path / "job.json", tmp_path / "other.json"
    write_workload(made, file)
    write_workload(changed(made, rows=made.rows[:1]), other)
    fake = jobs(lambda _: 1.0, variables=lambda _: 1.3, transfers=slowing(0.75), noise=0.001)
    options = ("--sizes", "4K,64M", "--workload", file)
    found = tccl("verify", place, *options)
    assert found.exit_code == 0, found.stdout
    first = found.stdout.replace("\n", " ")
    assert first.startswith("your job's communication: ")
    assert "by variables only; send/recv, 11 % of it, is slower (0.75)" in first
    timed = {row for spec, _ in fake.jobs for row in spec.rows if row.dtype == "float16"}
    assert {(row.collective, row.groups) for row in timed} == {
        ("all_reduce", ()),
        ("send_recv", ((0, 1), (2, 3))),
    }
    # Other jobs of the host get what harms none.
    assert load_plan(place).recommended == "default"
    assert "export" not in tccl("env", place).stdout
    for name in (file, "my job"):
        shown = tccl("env", place, "--workload", name)
        assert "export NCCL_P2P_LEVEL=PHB" in shown.stdout, shown.stderr
    refused = tccl("env", place, "--workload", other)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "was not verified for it" in refused.stderr
    again = tccl("verify", place, "--json", *options)
    answer = json.loads(again.stdout)
    assert answer["workload"]["chosen"] == "variables"
    assert set(answer["workload"]["choices"]) == {"default", "variables"}
    assert same_keys("verify", answer)


def test_a_plan_in_the_place_of_another_leaves_no_record_of_the_others_workloads(place, jobs):
    jobs(lambda _: 1.0)
    words = ("--backend", "host", "--sizes", "4K", "--workload", "data-parallel")
    assert tccl("verify", place, *words).exit_code == 0
    assert (place / "workloads.json").exists()
    write_plan(load_plan(place), place)
    assert not (place / "workloads.json").exists()
