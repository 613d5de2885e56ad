"""Installing leaves others' lines as they are, and uninstalling leaves everything as it was."""

import json
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tccl_py.decision import StepTime
from tccl_py.delivery.job import Delivery
from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.communication import Communication, keep_communication
from tccl_py.experiments.comparison import Compared, RunBudget, Timed
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.plans import verify_plan
from tccl_py.experiments.record import ArmResult, Verification
from tccl_py.experiments.spec import WrongValue
from tccl_py.installation.blocks import with_block, without_block
from tccl_py.installation.install import (
    conf_body,
    install,
    load_record,
    state_directory,
    uninstall,
)
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.settings import Settings, env_conflicts, env_rules, environment
from tccl_py.nccl_conf import _reads_home, conf_lines, settings_of_files, why_no_default
from tccl_py.nccl_library import InstalledNccl
from tccl_py.plan.chains import Choice, FailingPair, Failure
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.statistics import Interval
from tests.cluster_plans import mixed
from tests.commands import tccl
from tests.planned import SMALL, needing_a_graph, plan_of, replace_plan
from tests.skips import mark_needs

SETTINGS = Settings(version="2.28", p2p_level="SYS", channels=8, buffsize=524288)
PLAN = Delivery(
    choice=Choice(name="graph", settings=SETTINGS),
    variables=environment(SETTINGS),
    provenance="measured",
)
PRINT = Fingerprint(
    gpu_uuids=("GPU-aa", "GPU-bb"), driver="580.159.04", numa_count=2, kernel="6.8.0"
)
BOX = "amd-v100"
# Pieces of files, markers' look-alikes among them.
PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\n", b"\r\n", b"NCCL_DEBUG=INFO\n", b"export A=b", b"# >>>", b"<<<", b"\0", b"#", b"--"]
    ),
)
# What mentions us without being our marker is refused, which other tests see.
FILES = st.lists(PIECES, max_size=12).map(b"".join).filter(lambda data: b"tccl-py" not in data)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """A home of the test's own, for the record too."""
    home = tmp_path / "home"
    (home / ".local" / "state").mkdir(parents=True)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(home)))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(home / ".nccl.conf"))
    _reads_home.cache_clear()
    yield
    _reads_home.cache_clear()


def everything(folder):
    """All files below a folder, with what they hold and may."""
    found = {}
    for path in sorted(folder.rglob("*")):
        held = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (stat.S_IMODE(held.st_mode), path.is_symlink(), content)
    return found


# our part of a file


@given(data=st.none() | FILES)
def test_a_part_that_is_taken_out_leaves_the_bytes_that_were_there(data):
    put = with_block(data, "A=b\n", where="f")
    assert put != data
    assert put.startswith(data or b"")
    assert without_block(put, where="f") == data


@given(data=st.none() | FILES)
def test_a_part_that_is_put_twice_is_there_once(data):
    first = with_block(data, "A=b\n", where="f")
    assert with_block(first, "A=b\n", where="f") == first
    other = with_block(first, "C=d\n", where="f")
    assert b"A=b\n# <<<" not in other
    assert without_block(other, where="f") == data


@given(data=st.none() | FILES, later=FILES, earlier=FILES)
def test_what_others_wrote_around_the_part_stays(data, later, earlier):
    assume(later)
    put = with_block(data, "A=b\n", where="f")
    earlier = earlier + b"\n" if earlier else b""
    rest = without_block(earlier + put + later, where="f")
    start = data or b""
    newline = b"\n" if start and not start.endswith(b"\n") else b""
    assert rest == earlier + start + newline + later


@given(data=FILES, cut=st.integers(min_value=1, max_value=200))
def test_damaged_markers_are_refused(data, cut):
    put = with_block(data, "A=b\n", where="f")
    assume(cut < len(put) - len(data))
    damaged = put[:-cut]
    try:
        without_block(damaged, where="f")
    except InputError as error:
        assert "damaged marker lines" in str(error)
        return
    # What is left has no marker, or lacks the newline behind the last one alone.
    assert without_block(damaged, where="f") == damaged or cut == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda put: put + put,
        lambda put: put.replace(b"(kept)", b"(lost)"),
        lambda put: put.replace(b"# >>>", b"# >> "),
        lambda put: put.replace(b"# <<<", b" # <<<"),
        lambda put: b"".join(reversed(put.splitlines(keepends=True))),
    ],
)
def test_markers_that_somebody_changed_are_refused_and_nothing_is_done(tmp_path, damage):
    path = tmp_path / "conf"
    path.write_bytes(b"NCCL_DEBUG=INFO\n")
    install(PLAN, path, dry_run=False)
    path.write_bytes(damage(path.read_bytes()))
    before = everything(tmp_path)
    for action in (uninstall, lambda: install(PLAN, path, dry_run=False)):
        with pytest.raises(InputError) as error:
            action()
        assert str(error.value).startswith(f"{path}: has damaged marker lines")
        assert everything(tmp_path) == before


@given(data=st.none() | FILES, others=st.lists(FILES, max_size=3), twice=st.booleans())
def test_lines_that_others_put_between_the_markers_stay_outside_of_them(data, others, twice):
    lines = [line.replace(b"\n", b"") + b"\n" for line in others]
    put = with_block(data, "A=b\nC=d\n", where="f")
    inside = b"C=d\n".join([b"".join([*lines[:1], b"A=b\n", *lines[1:2]]), b"".join(lines[2:])])
    edited = put.replace(b"A=b\nC=d\n", inside)
    again = with_block(edited, "C=d\nE=f\n", where="f")
    assert again == with_block(data, "C=d\nE=f\n", where="f") + b"".join(lines)
    rest = without_block(again if twice else edited, where="f")
    newline = b"\n" if data and not data.endswith(b"\n") else b""
    assert rest == ((data or b"") + newline + b"".join(lines) if lines else data)


# files on disk


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.none() | FILES, mode=st.sampled_from([0o600, 0o644, 0o755, 0o664]))
def test_installing_and_uninstalling_leaves_the_file_as_it_was(tmp_path, data, mode):
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "my conf"
    if data is not None:
        path.write_bytes(data)
        path.chmod(mode)
    before = everything(tmp_path)
    assert install(PLAN, path, dry_run=False).is_needed
    held = everything(folder)
    assert not install(PLAN, path, dry_run=False).is_needed
    assert everything(folder) == held
    assert path.read_bytes().startswith(data or b"")
    uninstall()
    assert everything(tmp_path) == before
    shutil.rmtree(folder)


def test_links_stay_links_and_what_they_lead_to_is_restored(tmp_path):
    real, link, nowhere = tmp_path / "real", tmp_path / "link", tmp_path / "nowhere"
    real.write_bytes(b"NCCL_DEBUG=WARN")
    real.chmod(0o600)
    link.symlink_to("real")
    nowhere.symlink_to("to-come")
    before = everything(tmp_path)
    install(PLAN, link, dry_run=False)
    install(PLAN, nowhere, dry_run=False)
    assert link.is_symlink()
    assert nowhere.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert b"NCCL_P2P_LEVEL=SYS" in real.read_bytes()
    assert (tmp_path / "to-come").is_file()
    found = uninstall()
    assert [change.is_needed for change in found] == [True, True]
    assert everything(tmp_path) == before


def test_a_file_that_became_a_link_meanwhile_is_restored_and_forgotten(tmp_path):
    path, moved = tmp_path / "conf", tmp_path / "moved"
    path.write_bytes(b"NCCL_DEBUG=WARN\n")
    install(PLAN, path, dry_run=False)
    path.rename(moved)
    path.symlink_to("moved")
    assert [change.path for change in uninstall()] == [moved]
    assert path.is_symlink() and moved.read_bytes() == b"NCCL_DEBUG=WARN\n"
    assert load_record(state_directory()) == () == uninstall()


def test_attributes_of_a_file_stay(tmp_path):
    path = tmp_path / "conf"
    path.write_bytes(b"")
    try:
        os.setxattr(path, "user.tccl", b"kept")
    except OSError:
        pytest.skip("this file system has no attributes")
    install(PLAN, path, dry_run=False)
    assert os.getxattr(path, "user.tccl") == b"kept"


def test_a_dry_run_changes_nothing(tmp_path):
    before = everything(tmp_path)
    change = install(PLAN, tmp_path / "conf", dry_run=True)
    assert change.is_needed
    assert everything(tmp_path) == before


def test_the_record_names_the_files_and_goes_with_the_last(tmp_path):
    install(PLAN, tmp_path / "conf", dry_run=False)
    install(PLAN, tmp_path / "module", dry_run=False)
    conf, module = str(tmp_path / "conf"), str(tmp_path / "module")
    assert load_record(state_directory()) == (conf, module)
    uninstall([tmp_path / "conf"])
    assert load_record(state_directory()) == (module,)
    uninstall()
    assert list((tmp_path / "home" / ".local" / "state").iterdir()) == []


def test_a_file_is_cleaned_without_a_record(tmp_path):
    install(PLAN, tmp_path / "conf", dry_run=False)
    shutil.rmtree(state_directory())
    assert uninstall(dry_run=True) == ()
    uninstall([tmp_path / "conf"])
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]
    assert list((tmp_path / "home" / ".local" / "state").iterdir()) == []


def test_a_file_that_somebody_deleted_is_forgotten(tmp_path):
    install(PLAN, tmp_path / "conf", dry_run=False)
    (tmp_path / "conf").unlink()
    found = uninstall()
    assert [(change.path, change.is_needed) for change in found] == [(tmp_path / "conf", False)]
    assert list((tmp_path / "home" / ".local" / "state").iterdir()) == []


def test_a_file_that_fails_stays_recorded_with_those_after_it(tmp_path, monkeypatch):
    first, other, last = (tmp_path / name for name in ("first", "other", "last"))
    other.write_bytes(b"NCCL_DEBUG=WARN")
    for path in (first, other, last):
        install(PLAN, path, dry_run=False)
    real = Path.replace

    def full(self, target):
        if Path(target) == other:
            raise OSError(28, "No space left on device")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(InputError) as error:
            uninstall()
    assert str(error.value).startswith(f"{other}: cannot be changed")
    assert not first.exists()
    assert load_record(state_directory()) == (str(other), str(last))
    uninstall()
    assert (other.read_bytes(), last.exists()) == (b"NCCL_DEBUG=WARN", False)


def test_a_file_that_cannot_be_written_is_not_recorded(tmp_path, monkeypatch):
    before = everything(tmp_path)
    real = Path.replace

    def full(self, target):
        if Path(target) == tmp_path / "conf":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="cannot be changed"):
        install(PLAN, tmp_path / "conf", dry_run=False)
    assert everything(tmp_path) == before


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "conf"
    path.write_bytes(b"A=1\n")
    real = with_block

    def slow(data, *words, **more):
        path.write_bytes(b"A=2\n")
        return real(data, *words, **more)

    monkeypatch.setattr("tccl_py.installation.install.with_block", slow)
    with pytest.raises(InputError, match="in the meantime"):
        install(PLAN, path, dry_run=False)
    assert path.read_bytes() == b"A=2\n"


# places that are refused


def refused(path):
    with pytest.raises(InputError) as error:
        install(PLAN, path, dry_run=False)
    assert not state_directory().exists()
    return str(error.value)


def test_places_that_cannot_be_are_refused(tmp_path):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    twin = tmp_path / "one"
    twin.write_bytes(b"")
    (tmp_path / "other").hardlink_to(twin)
    assert "is no directory" in refused(tmp_path / "none" / "conf")
    assert refused(tmp_path).startswith(f"{tmp_path}: is no regular file")
    assert refused(pipe).startswith(f"{pipe}: is no regular file")
    assert "hard links" in refused(twin)
    assert str(circle) in refused(circle)
    assert "has control characters" in refused(tmp_path / "a\nb")


@mark_needs("root")
def test_files_of_other_users_are_refused(tmp_path):
    path = tmp_path / "conf"
    path.write_bytes(b"A=b\n")
    os.chown(path, 12345, -1)
    assert refused(path).startswith(f"{path}: belongs to user 12345")
    assert path.read_bytes() == b"A=b\n"


def test_places_that_are_not_to_be_written_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "conf"
    path.write_bytes(b"A=b\n")
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) not in (path, locked))
    assert refused(path).startswith(f"{path}: cannot be written to; ")
    assert refused(locked / "conf").startswith(f"{locked}: cannot be written to; ")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\nNCCL_GRAPH_FILE=/a\n", ":2: sets NCCL_GRAPH_FILE"),
        (b"NCCL_BUFFSIZE=1048576\n", ":1: sets NCCL_BUFFSIZE=1048576"),
        (b"#\nNCCL_P2P_DISABLE=1", ":2: sets NCCL_P2P_DISABLE=1"),
    ],
)
def test_files_in_which_the_lines_would_do_harm_are_refused(tmp_path, data, said):
    path = tmp_path / "file"
    path.write_bytes(data)
    assert refused(path).startswith(f"{path}{said}")
    assert path.read_bytes() == data


LOADING = {"NCCL_ENV_PLUGIN": "/plan/lib.so", "TCCL_INDEX": "/plan/index", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("name", [*LOADING, "NCCL_BUFFSIZE"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_line_with_another_value_of_any_variable_of_the_plan_is_refused(tmp_path, name, equal):
    plan = msgspec.structs.replace(PLAN, variables=PLAN.variables | LOADING)
    value = plan.variables[name] if equal else plan.variables[name] + "0"
    path = tmp_path / "file"
    path.write_text(f"NCCL_DEBUG=INFO\n{name}={value}\n")
    before = path.read_bytes()
    if equal:
        assert install(plan, path, dry_run=True).is_needed
        return
    with pytest.raises(InputError, match=f"sets {name}=") as caught:
        install(plan, path, dry_run=False)
    assert (caught.value.where, path.read_bytes()) == (f"{path}:2", before)


def test_a_damaged_record_is_a_sentence(tmp_path):
    state_directory().mkdir(parents=True)
    (state_directory() / "installed.json").write_text('{"files": 1}')
    with pytest.raises(InputError, match="does not fit the record format"):
        uninstall()


# what the files say


def test_nccl_reads_the_plans_settings_and_no_graph_from_the_file(tmp_path):
    path = tmp_path / "conf"
    path.write_bytes(b"NCCL_DEBUG=WARN")
    install(PLAN, path, dry_run=False)
    found = {line.name: line.value for line in conf_lines(path.read_bytes(), where="f")}
    assert found == {
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_BUFFSIZE": "524288",
    }


def test_a_comment_of_nccls_file_is_never_taken_for_a_setting():
    marked = with_block(None, conf_body(PLAN), where="f")
    lines = [line for line in marked.decode().splitlines() if not line.startswith("NCCL_")]
    assert all(line.startswith("#") for line in lines)


def test_nccl_takes_the_environment_first_and_of_files_the_first_line(tmp_path):
    own, host = tmp_path / "own", tmp_path / "host"
    own.write_bytes(b"A=1\nA=2\n#B=1\nno line\nC==x\n")
    host.write_bytes(b"A=3\nB=4\nD=5\n")
    found = settings_of_files({"D": "6"}, files=(own, host))
    assert {name: line.value for name, line in found.items()} == {"A": "1", "B": "4", "C": "=x"}
    assert found["B"].where == f"{host}:2"


def test_settings_that_say_something_else_are_named():
    assert env_conflicts(SETTINGS, {"NCCL_BUFFSIZE": "524288", "NCCL_P2P_LEVEL": "SYS"}) == ()
    assert env_conflicts(SETTINGS, {"NCCL_SOCKET_IFNAME": "lo", "NCCL_ALGO": "Ring"}) == ()
    assert env_conflicts(SETTINGS, {"NCCL_SHM_LOCALITY": "1"}) == ("NCCL_SHM_LOCALITY",)
    assert env_conflicts(Settings(algo="Ring"), {"NCCL_ALGO": "Tree"}) == ("NCCL_ALGO",)


# the commands


@pytest.fixture
def measured(tmp_path):
    """A directory with a plan as if it had been measured on this host."""
    return measured_plan(tmp_path)


def measured_plan(tmp_path, **changes):
    plan = plan_of("amd-v100", **changes)
    plan = replace_plan(plan, simulated=False, assumed=False)
    directory = tmp_path / "plan"
    directory.mkdir()
    uuids = tuple(f"GPU-{number}" for number in range(4))
    write_plan(plan, directory, fingerprint=msgspec.structs.replace(PRINT, gpu_uuids=uuids))
    return directory


def test_a_plan_that_keeps_default_nccl_has_nothing_to_install(tmp_path):
    (directory := tmp_path / "plan").mkdir()
    write_plan(plan_of(SMALL), directory)
    before = everything(tmp_path)
    result = tccl("install", directory, "--force")
    assert result.exit_code == 0
    assert "nothing to install" in result.stderr
    assert everything(tmp_path) == before
    said = tccl("env", directory, "--gpus", "0,1").stdout
    assert "# default NCCL for GPUs 0,1: nothing to set" in said
    result = tccl("export", directory, "--runtime", "module", "--force")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing to set" in result.stderr
    # What another plan had installed is replaced.
    (other := tmp_path / "other").mkdir()
    write_plan(plan_of("amd-v100"), other)
    conf = tmp_path / "conf"
    assert tccl("install", other, "--force", "--conf", conf).exit_code == 0
    assert "NCCL_P2P_LEVEL=SYS" in conf.read_text()
    result = tccl("install", directory, "--force", "--conf", conf)
    assert result.exit_code == 0, result.stderr
    assert "NCCL_P2P_LEVEL" not in conf.read_text()


def verified(directory, digest=None, **changes):
    """Write what `tccl verify` writes: accepted, unless fields of the recommended arm say no."""
    plan = load_plan(directory)
    fields = {name: changes.pop(name) for name in ArmResult.__struct_fields__ if name in changes}
    name = fields.pop("name", plan.recommended)
    settings = plan.choices[name].settings
    same = {"rows": (msgspec.structs.replace(SAME, collective="all_reduce"),), "transfers": (SAME,)}
    fields = {**same, **fields}
    arm = ArmResult(name=name, settings=settings, environment={}, **fields)
    plain = plan.choices["default"].settings
    default = ArmResult(name="default", settings=plain, environment={}, **same)
    good = {
        "machine": plan.cluster.classes[0].machine.name,
        "gpus": plan.class_gpus[0],
        "backend": "cuda",
        "arms": (arm,) if name == "default" else (default, arm),
        "recommended": plan.recommended,
        "chosen": name,
        "winner": name,
        "simulated": False,
        "collective": "all_reduce",
        "left_out": (),
        "versions": {},
        "devices": ("GPU",) * len(plan.class_gpus[0]),
        "order": "AB",
        "raw": (),
        "seconds": 1.0,
    }
    found = Verification(**{**good, **changes}).keep(directory)
    if digest is not None:
        text = (directory / "verify.json").read_text()
        (directory / "verify.json").write_text(text.replace(found.plan_digest, digest))


WRONG = WrongValue(case="all_reduce float32 1", rank=0, what="sums differ")
WORSE = Timed(
    bytes=4096, seconds=(1.0,) * 6, compared=Compared(middle=0.9, low=0.8, high=0.95, p=0.01),
    verdict="worse", harm="loses",
)  # fmt: skip
SAME = Timed(
    collective="send_recv", bytes=4096, seconds=(1.0,) * 6, verdict="same", harm="none",
    compared=Compared(middle=1.0, low=1.0, high=1.0, p=1.0),
)  # fmt: skip
NOT = "was not accepted when it was verified"


@pytest.mark.parametrize(
    ("verification", "said"),
    [
        (None, "was not verified"),
        ({"rows": (WORSE,)}, f"{NOT}: all-reduce of 4 KiB (0.90) is slower than default"),
        ({"wrong": (WRONG,)}, f"{NOT}: 1 values are wrong"),
        ({"failure": "x"}, "failed when it was verified"),
        ({"name": "graph", "recommended": "variables"}, "was verified for the choice graph alone"),
        ({"backend": "host"}, "was verified without GPUs"),
        ({"digest": "0"}, "was planned again after it"),
        ({"format_version": 2}, "has a verification that is of no use: "),
    ],
)
def test_a_plan_that_was_not_verified_is_installed_only_by_force(measured, verification, said):
    if verification is not None:
        verified(measured, **verification)
    result = tccl("install", measured)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tccl: {measured}: {said}")
    assert "--force" in result.stderr
    assert not Path(os.environ["NCCL_CONF_FILE"]).exists()
    result = tccl("install", measured, "--force")
    assert result.exit_code == 0
    assert said in result.stderr
    assert "accepted because of --force" in result.stderr
    assert Path(os.environ["NCCL_CONF_FILE"]).exists()


def test_the_smallest_choice_that_runs_is_installed_without_jobs_where_default_nccl_fails(tmp_path):
    plan = plan_of("intel-v100")
    fails = Failure(verdict="hangs", pairs=(FailingPair(0, 1),))
    note = "nothing that GPU 1 writes arrives"
    stock = msgspec.structs.replace(
        plan.choices["default"], predicted_gbps=None, fails=fails, note=note
    )
    measured = {"simulated": False, "assumed": False, "large_buffers": None}
    plan = replace_plan(plan, default=stock, winner="default", **measured)
    assert plan.recommended == "variables"
    directory = tmp_path / "plan"
    directory.mkdir()
    uuids = tuple(f"GPU-{number}" for number in range(4))
    fingerprint = msgspec.structs.replace(PRINT, gpu_uuids=uuids)
    write_plan(plan, directory, fingerprint=fingerprint)
    result = tccl("install", directory)
    assert result.exit_code == 0
    assert f"default NCCL hangs here, since {note}" in result.stderr
    assert "NCCL_P2P_LEVEL=PHB" in Path(os.environ["NCCL_CONF_FILE"]).read_text()
    # What jobs have said counts more, and another choice needs them.
    verified(directory, failure="x")
    assert tccl("install", directory).exit_code == 2
    write_plan(msgspec.structs.replace(plan, winner="graph"), directory, fingerprint=fingerprint)
    assert tccl("install", directory).exit_code == 2


def test_a_choice_for_a_workload_is_installed_for_that_workload_alone(tmp_path):
    plan = plan_of("intel-v100")
    assert plan.choices["variables"].settings.p2p_level == "PHB"
    plan = replace_plan(plan, simulated=False, assumed=False, winner="default")
    directory = tmp_path / "plan"
    directory.mkdir()
    uuids = tuple(f"GPU-{number}" for number in range(4))
    write_plan(plan, directory, fingerprint=msgspec.structs.replace(PRINT, gpu_uuids=uuids))
    step = StepTime(seconds=1.0, low=1.0, high=1.0, speed=Interval(middle=1.0, low=1.0, high=1.0))
    for name in ("variables", "graph"):
        found = Communication(
            name=f"by {name}", digest=name, chosen=name, choices={"default": step, name: step},
            rows=(),
        )  # fmt: skip
        keep_communication(found, directory)
    conf = Path(os.environ["NCCL_CONF_FILE"])
    assert "was not verified" in tccl("install", directory).stderr
    assert "was not verified for it" in tccl("install", directory, "--workload", "other").stderr
    refused = tccl("install", directory, "--workload", "by graph")
    assert refused.exit_code == 2 and "tccl run --workload" in refused.stderr
    assert not conf.exists()
    result = tccl("install", directory, "--workload", "by variables")
    assert result.exit_code == 0, result.stderr
    assert "other jobs may lose" in result.stderr
    assert "NCCL_P2P_LEVEL=PHB" in conf.read_text()


@pytest.mark.parametrize(
    ("version", "planned", "read"),
    [
        ("2.29.7", "2.30", "home"),
        ("2.30.3", "2.29", "one"),
        (None, "2.29", "home"),
        (None, "2.30", "one"),
    ],
)
def test_record_and_file_stay_together_whatever_home_and_state_directory_are(
    tmp_path, monkeypatch, version, planned, read
):
    monkeypatch.delenv("NCCL_CONF_FILE")
    measured = measured_plan(tmp_path, version=planned)
    nccl = version and InstalledNccl(version=version, source="here")
    monkeypatch.setattr("tccl_py.nccl_conf.installed_nccl", lambda: nccl)
    (tmp_path / "one").mkdir()
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv("HOME", str(tmp_path / "one"))
        monkeypatch.setenv(name, str(tmp_path / "one"))
        conf = tmp_path / read / ".nccl.conf"
        assert f"made {conf}\n" in tccl("install", measured, "--force").stderr
        monkeypatch.setenv(name, str(tmp_path / "two"))
        assert tccl("uninstall").stderr == f"tccl: removed {conf}, which was new\n"
        assert not conf.exists()


@pytest.mark.parametrize(
    ("open_place", "words"), [("plan", "others can write /"), ("plan/plan.json", "write it; ")]
)
def test_a_plan_that_others_can_write_is_not_installed(measured, tmp_path, open_place, words):
    (tmp_path / open_place).chmod(0o777)
    result = tccl("install", measured, "--force", "--no-plugin")
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path(os.environ["NCCL_CONF_FILE"]).exists()


@mark_needs("root")
def test_a_plan_of_another_user_is_not_installed_nor_a_file_in_anothers_folder(measured, tmp_path):
    (folder := tmp_path / "others").mkdir()
    os.chown(folder, 12345, -1)
    said = f"{folder}: is not trusted: it belongs to user 12345"
    assert said in refused(folder / "nccl.conf")
    os.chown(measured / "plan.json", 12345, -1)
    result = tccl("install", measured, "--force", "--no-plugin")
    assert result.exit_code == 2
    assert "plan.json: is not trusted: it belongs to user 12345" in result.stderr
    assert not Path(os.environ["NCCL_CONF_FILE"]).exists()


def test_a_plan_of_another_machine_is_installed_only_by_force(measured, monkeypatch):
    verified(measured)
    monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", lambda: None)
    monkeypatch.setattr("tccl_py.delivery.fit.fingerprint_of", lambda facts: PRINT)
    result = tccl("install", measured)
    assert result.exit_code == 2
    assert "GPU 0 was GPU-0" in result.stderr
    facts = SimpleNamespace(gpus=load_plan(measured).machine.gpus)
    monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", lambda: facts)
    result = tccl("export", measured, "--runtime", "slurm-prolog", "--alike")
    assert result.exit_code == 0, result.stderr
    assert "export TCCL_ALIKE=1" in result.stdout
    assert "GPU-0" not in result.stdout


def test_the_plan_of_a_cluster_is_installed_on_its_hosts_alone(tmp_path, monkeypatch):
    plan, directory = mixed(simulated=False, assumed=False), tmp_path / "plan"
    directory.mkdir()
    write_plan(plan, directory)
    verified(directory)
    gpus = plan.cluster.classes[plan.cluster.host_classes["gpu2"]].machine.gpus
    monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    result = tccl("install", directory, "--no-plugin")
    assert (result.exit_code, "the plan has no such host" in result.stderr) == (2, True)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu2")
    assert tccl("install", directory, "--no-plugin").exit_code == 0


def test_an_nccl_later_than_those_tried_gets_the_plugin_on_request(tmp_path, monkeypatch):
    directory, conf = tmp_path / "plan", Path(os.environ["NCCL_CONF_FILE"])
    directory.mkdir()
    write_plan(needing_a_graph(plan_of(BOX)), directory)
    (directory / "nccl" / LIBRARY).touch()
    for module in ("delivery.job", "installation.install"):
        monkeypatch.setattr(f"tccl_py.{module}.planned_or_installed", lambda _: "2.33.1")
    assert "newer than 2.32" in tccl("install", directory, "--force").stderr
    assert b"NCCL_ENV_PLUGIN" not in conf.read_bytes()
    monkeypatch.setenv("TCCL_NEWER_NCCL", "yes")
    assert "TCCL_NEWER_NCCL: is 'yes'; the newest" in tccl("install", directory, "--force").stderr
    assert b"NCCL_ENV_PLUGIN" not in conf.read_bytes()
    monkeypatch.delenv("TCCL_NEWER_NCCL")

    def fail(*_):
        raise MeasurementError("NCCL asks no tuner")

    monkeypatch.setattr("tccl_py.installation.install.try_plugin", fail)
    said = tccl("install", directory, "--force", "--newer-nccl").stderr
    assert "trial with NCCL 2.33.1 failed: NCCL asks no tuner" in said
    assert b"NCCL_ENV_PLUGIN" not in conf.read_bytes()
    monkeypatch.setattr("tccl_py.installation.install.try_plugin", lambda *_: "2.33.1")
    assert tccl("install", directory, "--force", "--newer-nccl").exit_code == 0
    assert b"NCCL_ENV_PLUGIN" in conf.read_bytes()
    assert b"TCCL_NEWER_NCCL=2.33.1\n" in conf.read_bytes()


def test_the_plugin_is_loaded_where_nccl_has_plugins_and_a_library_is_there(tmp_path):
    directory, conf = tmp_path / "plan", Path(os.environ["NCCL_CONF_FILE"])
    directory.mkdir()
    plan = needing_a_graph(plan_of(BOX))
    write_plan(plan, directory)
    result = tccl("install", directory, "--force")
    assert "without the plugin" in result.stderr
    variables = {line.name for line in conf_lines(conf.read_bytes(), where="conf")}
    assert variables == environment(plan.settings).keys()
    (directory / "nccl" / LIBRARY).touch()
    before = conf.read_bytes()
    assert tccl("install", directory, "--force", "--no-plugin").exit_code == 0
    assert conf.read_bytes() == before
    assert tccl("install", directory, "--force").exit_code == 0
    lines = {line.name: line.value for line in conf_lines(conf.read_bytes(), where="conf")}
    assert lines == {
        "NCCL_ENV_PLUGIN": str(directory / "nccl" / LIBRARY),
        "TCCL_INDEX": str(directory / "nccl" / "plugin.index"),
        # NCCL reads it before a rank knows the others, so the plugin leaves it to nccl.conf.
        "NCCL_P2P_LEVEL": "SYS",
    }
    printed = json.loads(tccl("env", directory, "--plugin", "--json").stdout)
    assert (printed["environment"], printed["simulated"]) == (lines, True)
    result = tccl("env", directory, "--plugin", "--choice", "graph")
    assert (result.exit_code, "--choice" in result.stderr) == (2, True)
    directory.chmod(0o777)
    result = tccl("env", directory, "--plugin")
    assert (result.exit_code, "can write" in result.stderr) == (2, True)


@pytest.fixture
def with_library(tmp_path):
    """A plan with a file in the place of the plugin's library."""
    directory = tmp_path / "plan"
    directory.mkdir()
    write_plan(needing_a_graph(plan_of(BOX)), directory)
    (directory / "nccl" / LIBRARY).touch(mode=0o644)
    return directory


def test_a_library_that_others_can_replace_is_not_loaded(with_library):
    (with_library / "nccl" / LIBRARY).chmod(0o666)
    result = tccl("env", with_library, "--plugin")
    assert (result.exit_code, "others can write it" in result.stderr) == (2, True)
    assert "without the plugin" in tccl("install", with_library, "--force").stderr


def test_other_users_get_no_lines_that_name_files_closed_to_them(with_library):
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        plan, conf = place / "plan", place / "nccl.conf"
        shutil.copytree(with_library, plan)
        words, closed = ("install", plan, "--force", "--conf", conf), plan / "nccl" / LIBRARY
        for path, mode in ((plan, 0o700), (closed, 0o600)):
            before = path.stat().st_mode
            path.chmod(mode)
            result = tccl(*words)
            assert (result.exit_code, conf.exists()) == (2, False)
            assert f"others cannot {'search' if path.is_dir() else 'read'} {path}" in result.stderr
            path.chmod(before)
        mask = os.umask(0o077)
        try:
            assert tccl(*words).exit_code == 0
        finally:
            os.umask(mask)
        assert stat.S_IMODE(conf.stat().st_mode) == 0o644
        tccl("uninstall", conf)


def test_nothing_is_compared_with_default_nccl_where_all_jobs_get_an_installed_plan(
    with_library, tmp_path, monkeypatch
):
    conf = tmp_path / "of-the-host.conf"
    monkeypatch.setattr("tccl_py.nccl_conf.HOST_FILE", conf)
    assert why_no_default() == ""
    tccl("install", with_library, "--force", "--conf", conf)
    assert str(conf) in why_no_default()
    with pytest.raises(InputError, match="`tccl uninstall"):
        verify_plan(with_library, RunBudget(), Launcher(backend="cuda"))


def test_an_older_nccl_gets_variables_alone(tmp_path):
    directory = tmp_path / "plan"
    directory.mkdir()
    plan = plan_of(BOX, version="2.27")
    write_plan(plan, directory)
    (directory / "nccl" / LIBRARY).touch()
    result = tccl("install", directory, "--force")
    assert "2.27 has no environment plugins" in result.stderr
    assert "NCCL_P2P_LEVEL=SYS" in Path(os.environ["NCCL_CONF_FILE"]).read_text()
    result = tccl("env", directory, "--plugin")
    assert (result.exit_code, result.stdout) == (1, "unset NCCL_GRAPH_FILE\n")


@pytest.mark.parametrize(
    "chosen",
    [{}, {"p2p_level": "SYS"}, {"p2p_level": "LOC"}, {"min_channels": 8, "buffsize": 8192}],
)
@pytest.mark.parametrize("value", ["0", "1", "2", "8", "8192", "4194304", "SYS", "PHB"])
def test_the_table_of_rules_finds_every_conflict(chosen, value):
    plan = Settings(**chosen)
    must, forbid = env_rules(plan)
    for name in (*must, "NCCL_P2P_LEVEL", "NCCL_P2P_READ_ENABLE", "NCCL_DEBUG"):
        refused = name in forbid or must.get(name, value) != value
        assert refused or not env_conflicts(plan, {name: value}), name
