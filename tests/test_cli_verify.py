"""`tccl verify`: what it refuses, prints, keeps and answers; jobs are stand-ins."""

import json
import re
import shutil
import signal
from itertools import chain

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.experiments import plans as module
from tccl_py.experiments.record import Verification, why_not_verified
from tccl_py.experiments.rounds import RunBudget, budget_of
from tccl_py.experiments.spec import WrongValue
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import lock_directory
from tccl_py.plan.text import advice
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.workloads.workload import Workload, WorkloadRow, write_workload
from tests.planned import as_only
from tests.test_json_page import same_keys
from tests.verified import FakeJobs, Interrupting, by_plan, by_variables, changed, without_gpus

NAME = "intel-v100"
KEYS = [
    "machine", "accepted", "winner", "recommended", "chosen", "arms", "workload", "trade_offs",
    "simulated", "dry_run", "tried", "rounds", "seconds", "hosts", "backend", "collective",
    "devices", "versions", "notices", "default_fails", "tunings",
]  # fmt: skip
ARM_KEYS = [
    "name", "accepted", "objections", "gbps", "ratio", "low", "high", "predicted_gbps",
    "environment", "settings", "sizes", "groups", "training", "transfers", "not_recommended",
    "checked", "wrong", "rings", "failure",
]  # fmt: skip
ROW_KEYS = [
    "collective", "bytes", "mode", "groups", "beside_gemm", "us", "gbps", "ratio", "low", "high",
    "verdict", "harm",
]  # fmt: skip


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned") / "plan"
    options = ("--simulate", NAME, "--max-sets", "20", "--rings", "1")
    assert tccl("plan", "-o", directory, *options).exit_code == 0
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


def test_an_answer_under_variables_of_the_caller_is_said_to_be_for_jobs_with_these(
    place, jobs, monkeypatch
):
    jobs(lambda _: 1.0, variables=lambda _: 1.3)
    brief = ("verify", place, "--backend", "host", "--sizes", "4K,1M")
    for name in ("NCCL_IB_TIMEOUT", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "1")
    assert "jobs with" not in tccl(*brief).stderr
    monkeypatch.setenv("NCCL_P2P_LEVEL", "LOC")
    # What the host has is that of every job, and the plan's choices have a level of their own.
    names = ("NCCL_IB_TIMEOUT", "NCCL_NVLS_ENABLE", "NCCL_P2P_LEVEL")
    found = tccl(*brief, *chain.from_iterable(("--pin-env", name) for name in names))
    said = " ".join(found.stderr.split())
    assert "the answer is for jobs with NCCL_IB_TIMEOUT=1, which the plan does not set" in said
    assert Verification.load(place).notices[-1].startswith("the answer is for jobs with")


def test_a_dry_run_has_sizes_and_seconds_for_a_laptop(place, jobs):
    jobs(lambda _: 1.0)
    assert tccl("verify", place, "--backend", "host").exit_code == 0
    kept = Verification.load(place)
    assert (kept.arms[0].sizes[0].bytes, kept.arms[0].sizes[-1].bytes) == (1024, 4 << 20)
    assert {row.bytes for row in kept.arms[1].transfers} == {64 << 10, 1 << 20}
    assert (budget_of("host").seconds, budget_of(None)) == (30.0, RunBudget())


def test_all_rows_are_shown(place, jobs):
    jobs(lambda _: 1.0, variables=lambda _: 1.3)
    words = ("--backend", "host", "--rounds", "6", "--all", "--sizes", "1M")
    found = json.loads(tccl("verify", place, *words, "--json").stdout)
    assert found["winner"] == "variables"
    for arm in found["arms"][:2]:
        rows = {(row["collective"], row["beside_gemm"]) for row in arm["transfers"]}
        assert {("send_recv", True), ("send_recv", False), ("all_reduce", True)} <= rows
    shown = tccl("verify", place, *words).stdout
    assert "default: all-reduce beside a GEMM: 1 MiB" in shown
    assert "variables: all-reduce beside a GEMM: 1 MiB 1." in shown


def test_json_has_the_keys_that_the_help_lists(place, jobs):
    jobs(lambda _: 1.0, variables=lambda _: 0.9)
    result = tccl("verify", place, "--backend", "host", "--sizes", "64M,4K", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, list(found)) == (1, KEYS)
    arms = {one["name"]: one for one in found["arms"]}
    assert list(arms) == ["default", "variables", "graph"]
    for arm in arms.values():
        assert list(arm) == ARM_KEYS
        assert len(arm["sizes"]) == 2
        for kind in ("sizes", "transfers", "groups"):
            assert all(list(row) == ROW_KEYS for row in arm[kind])
    assert [len(one["groups"]) for one in arms.values()] == [4, 4, 0]
    assert (found["accepted"], found["winner"]) == (False, "default")
    assert arms["variables"]["not_recommended"] == [4096, 64 << 20]
    assert same_keys("verify", found)


@pytest.mark.parametrize(
    ("ratio", "more", "sentence"),
    [
        (0.9, {}, "No to graph file"),
        (
            1.5,
            {"wrong": (WrongValue(case="scatter, int32 x 3", rank=1, what="1 of 3"),)},
            "the chosen choice: 1 values are wrong",
        ),
        (
            1.0,
            {"fails": lambda told: "dev 2 not found" * ("NCCL_GRAPH_FILE" in told)},
            "the chosen choice: its job failed",
        ),
    ],
)
def test_a_no_says_why_and_is_exit_code_1(place, jobs, ratio, more, sentence):
    jobs(lambda _: ratio, **more)
    found = tccl("verify", place, "--backend", "host", "--sizes", "4K", "--choice", "graph")
    assert found.exit_code == 1
    assert sentence in " ".join(found.stdout.split())


def test_a_default_nccl_that_fails_is_no_answer(place, jobs):
    jobs(lambda _: 1.0, fails=lambda _: "rank 0 ended with code 1: no device")
    found = tccl("verify", place, "--backend", "host")
    assert found.exit_code == 2
    assert "rank 0 ended with code 1" in found.stderr
    assert not (place / "verify.json").exists()


def test_tuning_rewrites_a_plan_where_other_settings_are_faster(place, jobs):
    def seconds(size, told):
        default = 1e-4 + size / 1e10
        if "NCCL_GRAPH_FILE" not in told:
            return default
        small = told.get("NCCL_BUFFSIZE") == "524288"
        return default / (1.4 if small else 0.8)

    fake = jobs(lambda _: 1.0)
    fake.seconds = seconds
    before = load_plan(place)
    found = tccl("verify", place, "--backend", "host", "--tune")
    assert found.exit_code == 0, found.stdout
    after = load_plan(place)
    assert (before.settings.buffsize, after.settings.buffsize) == (4 << 20, 512 << 10)
    assert (before.recommended, after.recommended) == ("variables", "graph")
    assert "tuned" in after.notices[-1]
    assert after.jobs_ran
    assert tccl("report", place).exit_code == 0
    page = (place / "report.html").read_text()
    assert "variables only, achieved by jobs" in page
    assert "graph file, achieved by jobs" in page
    assert "graph file, predicted" not in page
    assert "NCCL_BUFFSIZE=524288" in (place / "nccl" / "env.sh").read_text()
    kept = Verification.load(place)
    assert (kept.winner, kept.judged.settings) == ("graph", after.settings)
    # All rates are from jobs of the same rounds.
    rates = {name: one.achieved_gbps for name, one in after.choices.items()}
    assert rates == {one.name: one.gbps for one in kept.arms}
    assert kept.tried[0].arm == "default"
    assert {one.arm for one in kept.tried} == {"default", "variables", "graph"}
    assert kept.judged.environment["NCCL_GRAPH_FILE"] == str(place / "nccl" / "graph.xml")
    assert tccl("show", place).exit_code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_verification_changes_nothing(place, jobs, monkeypatch, number, code):
    jobs(lambda size: 1.0)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    fake = Interrupting(number=number, at=lambda count: count == 4)
    monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
    found = tccl("verify", place, "--backend", "host", "--tune")
    assert (found.exit_code, found.stdout) == (code, "")
    assert f"interrupted: nothing in {place} was changed" in found.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


# Three jobs check values, and a round of three arms has four.
@pytest.mark.parametrize("count", [1, 4, 24])
@pytest.mark.parametrize("more", [(), ("--tune",)])
def test_a_verification_interrupted_before_it_has_a_table_says_so(
    place, jobs, monkeypatch, count, more
):
    jobs(lambda size: 1.0)
    fake = Interrupting(number=signal.SIGINT, at=lambda done: done == count)
    monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
    found = tccl("verify", place, "--backend", "host", *more)
    assert (found.exit_code, found.stdout) == (130, "")
    assert "interrupted before 7 rounds were complete, so there is no table" in found.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_complete_rounds_of_an_interrupted_verification_are_shown_and_not_kept(
    place, jobs, monkeypatch, number, code
):
    jobs(lambda size: 1.0)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    # Two jobs check values; then a round has three, of default NCCL twice. None is clear.
    fake = Interrupting(number=number, at=lambda count: count > 26, ratio=1.0, noise=0.1)
    monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
    words = ("verify", place, "--backend", "host", "--choice", "graph", "--sizes", "1G")
    found = tccl(*words, "--rounds", "20", "--json")
    assert found.exit_code == code, found.stderr
    shown = json.loads(found.stdout)
    assert shown["rounds"] == 8
    assert [arm["name"] for arm in shown["arms"]] == ["default", "graph"]
    assert "interrupted: these are the 8 complete rounds" in shown["notices"][-1]
    assert f"interrupted: nothing in {place} was changed" in found.stderr
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_what_was_verified_is_kept_when_tuning_is_interrupted(place, jobs, monkeypatch):
    jobs(lambda size: 1.0)
    before = (place / "plan.json").read_bytes()
    tuning = []
    fake = Interrupting(number=signal.SIGTERM, at=lambda count: bool(tuning))
    monkeypatch.setattr(module, "LocalRunner", lambda server: fake)
    run = module.run_tuning
    monkeypatch.setattr(module, "run_tuning", lambda *a, **k: tuning.append(1) or run(*a, **k))
    found = tccl("verify", place, "--backend", "host", "--tune")
    assert found.exit_code == 143
    assert "interrupted: the plan is" in found.stderr
    assert "there is no table" not in found.stderr
    assert (place / "plan.json").read_bytes() == before
    assert Verification.load(place).winner == "graph"
    assert not list(place.glob(".*"))


def small_fifos(second):
    """Seconds, and factors of send/recv: FIFOs of 256 and 512 KiB, as two H200 without P2P."""
    gains = {"262144": 1.4, "524288": second}

    def seconds(size, told):
        gain = gains.get(told.get("NCCL_BUFFSIZE"), 1.0)
        return (1e-4 + size / 1e10) / gain

    def transfers(told):
        ratio = {"262144": 0.75, "524288": 0.99}.get(told.get("NCCL_BUFFSIZE"), 1.0)
        return gains.get(told.get("NCCL_BUFFSIZE"), 1.0) / ratio

    return seconds, transfers


@pytest.mark.parametrize(
    ("second", "buffsize", "recommended"), [(1.2, 512, "variables"), (1.0, 256, "default")]
)
def test_of_settings_that_gain_those_that_slow_no_send_recv_are_taken_first(
    place, jobs, second, buffsize, recommended
):
    seconds, transfers = small_fifos(second)
    fake = jobs(lambda _: 1.0, transfers=transfers, noise=0.001)
    fake.seconds = seconds
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M", "--json")
    assert found.exit_code == 0, found.stderr
    after = load_plan(place)
    assert (after.recommended, after.choices["variables"].settings.buffsize) == (
        recommended,
        buffsize << 10,
    )
    # What gains and slows send/recv is offered, with what it slows.
    assert ("send/recv of 64 KiB, 1 MiB, 64 MiB (0.75)" in advice(after)) == (buffsize == 256)
    answer = json.loads(found.stdout)
    tried = {one["settings"].get("buffsize"): one["transfer_ratio"] for one in answer["tried"]}
    assert tried[256 << 10] == pytest.approx(0.75, rel=0.02)


def test_tuning_takes_variables_where_they_are_as_fast_as_a_graph_file(place, jobs):
    def seconds(size, told):
        default = 1e-4 + size / 1e10
        fast = told.get("NCCL_BUFFSIZE") == "524288"
        many = "NCCL_GRAPH_FILE" in told or told.get("NCCL_MIN_NCHANNELS") == "16"
        return default / (1.4 if fast and many else 1.0)

    fake = jobs(lambda _: 1.0)
    fake.seconds = seconds
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M")
    assert found.exit_code == 0, found.stdout
    after = load_plan(place)
    assert after.recommended == "variables"
    settings = after.choices["variables"].settings
    assert (settings.min_channels, settings.buffsize) == (16, 512 << 10)
    assert "NCCL_MIN_NCHANNELS=16" in found.stderr
    assert after.gain("variables") == pytest.approx(1.4, rel=0.02)
    kept = Verification.load(place)
    assert (kept.winner, kept.accepted) == ("variables", True)
    # What gloo achieved says nothing about GPUs.
    assert after.dry_run and "NCCL_BUFFSIZE" not in tccl("env", place).stdout
    assert "export NCCL_BUFFSIZE=524288" in tccl("env", place, "--force").stdout
    levels = {one.settings.p2p_level for one in kept.tried if one.arm == "variables"}
    assert levels == {None, "SYS", "PHB"}


def test_copy_engines_that_lose_at_a_size_are_not_recommended(tmp_path, jobs):
    place = tmp_path / "plan"
    options = ("--simulate", NAME, "--max-sets", "20", "--rings", "1", "--nccl", "2.28")
    assert tccl("plan", "-o", place, *options).exit_code == 0

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
    assert max(one.gbps for one in engines) > 1.5 * kept.tried[0].gbps
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


def test_tuning_leaves_a_plan_that_nothing_beats(place, jobs):
    before = (place / "plan.json").read_bytes()
    jobs(lambda _: 0.95, variables=lambda _: 1.3, noise=0.001)
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M")
    assert found.exit_code == 0
    assert "tried by one job" in found.stdout
    assert (place / "plan.json").read_bytes() == before


def test_tuning_recommends_default_nccl_where_nothing_beats_it(place, jobs):
    jobs(lambda _: 0.95, variables=lambda _: 0.95, noise=0.002)
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M")
    assert found.exit_code == 0
    after = load_plan(place)
    assert after.recommended == "default"
    assert after.gain("graph") == pytest.approx(0.95, abs=0.01)
    # A graph file without variables is told by its channels.
    assert re.search("tuned, not used: graph file, .*[0-9] channels?: 0.9", found.stderr)


def test_settings_under_which_the_job_fails_are_told(place, jobs):
    jobs(
        lambda _: 1.0,
        fails=lambda told: "out of memory" if told.get("NCCL_BUFFSIZE") == "1048576" else "",
    )
    found = tccl("verify", place, "--backend", "host", "--tune", "--sizes", "4K,64M")
    assert found.exit_code == 0
    assert "failed: out of memory" in found.stdout


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
    made = tccl("plan", "-o", tmp_path / "plan", *options)
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["settings"]["buffsize"] == 262144
    assert Verification.load(tmp_path / "plan").accepted
    assert "the graph file wins: 1." in made.stderr


def test_plan_refuses_to_tune_where_nothing_can_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measured_machine", lambda: None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    made = tccl("plan", "-o", tmp_path / "plan", "--simulate", NAME, "--tune")
    assert made.exit_code == 2
    assert "torch: is not installed" in made.stderr
    assert not (tmp_path / "plan").exists()
    made = tccl("plan", "-o", tmp_path / "plan", "--simulate", NAME, "--tune", "--nodes", "2")
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


@pytest.mark.usefixtures("on_gpus")
def test_jobs_narrow_and_widen_what_the_plan_recommends(place, jobs):
    options = ("verify", place, "--sizes", "4K,64M")
    jobs(lambda _: 1.0, variables=lambda _: 1.3, transfers=slowing(0.75), noise=0.001)
    found = tccl(*options)
    assert found.exit_code == 1
    assert "No to variables only" in found.stdout and "send/recv of 64 KiB" in found.stdout
    assert "the plan recommends default NCCL now" in found.stderr
    after = load_plan(place)
    assert (after.recommended, after.gain("variables")) == ("default", pytest.approx(1.3, rel=0.01))
    assert why_not_verified(place) == ""
    assert "export" not in tccl("env", place).stdout
    # Of a host where nothing loses, the plan recommends more, and that is a yes.
    jobs(lambda _: 1.0, variables=lambda _: 1.3, noise=0.001)
    found = tccl(*options)
    assert found.exit_code == 0, found.stdout
    assert "Yes to variables only" in found.stdout
    assert load_plan(place).recommended == "variables"
    assert why_not_verified(place) == ""
    assert "export NCCL_P2P_LEVEL=PHB" in tccl("env", place).stdout
    # Nothing is written again where nothing changes.
    before = (place / "plan.json").stat().st_mtime_ns
    assert tccl(*options).exit_code == 0
    assert (place / "plan.json").stat().st_mtime_ns == before


def test_a_dry_run_takes_the_place_of_no_verification_on_gpus(place, jobs, monkeypatch):
    options = ("verify", place, "--sizes", "4K,64M", "--workload", "data-parallel")
    jobs(lambda _: 1.0, variables=lambda _: 1.3, noise=0.001)
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(
            module, "machine_launcher", lambda *of: changed(without_gpus(*of), backend="cuda")
        )
        assert tccl(*options).exit_code == 0
    before = [(place / name).read_bytes() for name in ("verify.json", "workloads.json")]
    found = tccl(*options, "--backend", "host")
    assert found.exit_code == 0 and "DRY RUN" in found.stdout
    assert "verify.json is of jobs on GPUs" in found.stderr
    assert before == [(place / name).read_bytes() for name in ("verify.json", "workloads.json")]


def files_of(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_a_dry_run_tunes_no_plan_that_jobs_on_gpus_verified(place, jobs, monkeypatch):
    options = ("verify", place, "--sizes", "4K,64M")
    fake = jobs(lambda _: 1.0, variables=lambda _: 1.3, noise=0.001)
    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(
            module, "machine_launcher", lambda *of: changed(without_gpus(*of), backend="cuda")
        )
        assert tccl(*options).exit_code == 0
    before = files_of(place)
    fake.seconds = lambda size, told: (
        (1e-4 + size / 1e10) / (1.4 if told.get("NCCL_BUFFSIZE") == "524288" else 1.0)
    )
    found = tccl(*options, "--backend", "host", "--tune")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "--tune: is a dry run" in found.stderr
    assert files_of(place) == before


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"dry_run": True, "assumed": False}, "measured in a DRY RUN"),
        ({"assumed": True}, "measured, the network assumed"),
        ({"assumed": False}, "measured"),
        ({"simulated": True, "assumed": True}, "simulated from assumed values"),
    ],
)
def test_a_prediction_is_marked_as_its_plan_is(place, jobs, changes, kind):
    jobs(lambda _: 1.0)
    made = changed(load_plan(place), **{"simulated": False, **changes})
    write_plan(made, place, models=as_only(load_bundled(NAME)))
    found = tccl("verify", place, "--sizes", "4K", "--backend", "host")
    assert f"predicted ({kind})" in " ".join(found.stdout.split())


def test_a_dry_run_tunes_no_plan_that_was_measured_on_gpus(place, jobs):
    jobs(lambda _: 1.0)
    measured = changed(load_plan(place), simulated=False)
    write_plan(measured, place, models=as_only(load_bundled(NAME)))
    found = tccl("verify", place, "--sizes", "4K,64M", "--backend", "host", "--tune")
    assert found.exit_code == 2
    assert "--tune: is a dry run" in found.stderr


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


def test_a_workload_of_another_number_of_ranks_or_no_file_is_refused(place, jobs, tmp_path):
    fake = jobs(lambda _: 1.0)
    row = WorkloadRow(collective="all_reduce", dtype="int8", bytes=1, groups=((0, 1),), calls=1)
    file = tmp_path / "job.json"
    write_workload(Workload(name="two", source="", ranks=2, rows=(row,)), file)
    none = tmp_path / ("folder" * 20) / "none"
    for name, fault in ((file, "2 ranks, and jobs here have 4"), (none, f"{none}'")):
        found = tccl("verify", place, "--backend", "host", "--workload", name)
        assert (found.exit_code, found.stdout) == (2, "")
        assert fault in found.stderr
    assert not fake.jobs and not (place / "verify.json").exists()
