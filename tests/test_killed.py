"""A run that is killed at any of its changes of files hinders none that comes after it."""

import os
import shutil
import stat
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tccl_py.delivery.job import Delivery
from tccl_py.errors import InputError
from tccl_py.experiments.target import Target
from tccl_py.installation.install import install, uninstall
from tccl_py.plan.directory import write_nccl_files, write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import MANIFEST_FILE, REPLACING, check_files, lock_directory, settle
from tccl_py.planning.output import output_directory
from tccl_py.simulator.descriptions import load_bundled
from tests.cluster_plans import equal_hosts, mixed
from tests.commands import tccl
from tests.killed import killed_at, killed_at_each
from tests.planned import PCIE, SMALL, as_only, plan_of, replace_plan

FINDING = "verify.json"
MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path():
    """A folder in memory where there is some: disks take milliseconds to remove a file."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tccl-test-", dir=place) as folder:
        yield Path(folder)


def names(place):
    return {one.name for one in place.iterdir()}


def planned(plan, write, place, *, force):
    """What `tccl plan` does with files; whether it found a plan that it may not replace."""
    try:
        with output_directory(place, force=force) as journal:
            journal.touch()
            write(plan, place)
    except InputError as error:
        assert error.what == "already holds a plan"
        return False
    return True


def few_files(name):
    """The plan of a machine without rings for subsets, each of which has a file."""
    return msgspec.structs.replace(plan_of(name), subsets=())


KINDS = {
    "machine": (partial(few_files, PCIE), partial(few_files, SMALL), write_plan, load_plan),
    "cluster": (partial(equal_hosts, 2), mixed, write_plan, load_plan),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """An old plan, a new one, and how such are written and read."""
    old, new, write, load = KINDS[request.param]
    return old(), new(), write, load


def test_a_killed_run_is_gone_on_from_by_the_same_command(kind, tmp_path):
    _, plan, write, load = kind
    place = tmp_path / "a" / "plan"
    begin = partial(shutil.rmtree, tmp_path / "a", ignore_errors=True)
    whole = 0
    for _ in killed_at_each(begin, lambda: planned(plan, write, place, force=False)):
        # Only a run that was killed after its last step has left a plan.
        whole += not planned(plan, write, place, force=False)
        assert load(place) == plan
        check_files(place)
        assert names(place) == {
            "plan.json",
            MANIFEST_FILE,
            "measurements.jsonl",
            "nccl",
            "machines",
        }
    assert whole <= 2


def test_a_run_that_is_killed_leaves_the_old_plan_or_the_new_one(kind, tmp_path):
    old, new, write, load = kind
    place = tmp_path / "plan"

    def begin():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write(old, place)
        (place / FINDING).write_text("of the old plan")
        (place / "notes.txt").write_text("mine")

    seen = set()
    for _ in killed_at_each(begin, lambda: planned(new, write, place, force=True)):
        found = load(place)
        assert found in (old, new)
        check_files(place)
        assert (place / FINDING).exists() == (found == old)
        seen.add(found == old)
        assert planned(new, write, place, force=True)
        assert load(place) == new
        check_files(place)
        assert names(place) - {"measurements.jsonl"} == {
            *("plan.json", MANIFEST_FILE, "nccl", "machines", "notes.txt")
        }
    assert seen == {True, False}


def test_tuning_that_is_killed_leaves_the_plan_as_it_was_or_tuned(tmp_path):
    plan = few_files(SMALL)
    tuned = replace_plan(plan, achieved_gbps=plan.rate_gbps)
    place = tmp_path / "plan"

    def begin():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write_plan(plan, place, models=as_only(load_bundled(SMALL)))

    for _ in killed_at_each(begin, Target(plan=tuned, directory=place, graphs={}).write):
        with lock_directory(place):
            assert names(place) == {"plan.json", MANIFEST_FILE, "nccl", "machines"}
            assert load_plan(place) in (plan, tuned)
            check_files(place)
            Target(plan=tuned, directory=place, graphs={}).write()
        assert load_plan(place) == tuned


def test_putting_back_an_old_plan_may_be_killed_as_well(tmp_path):
    old, new = few_files(PCIE), few_files(SMALL)
    half, place = tmp_path / "half", tmp_path / "plan"

    def begin_half():
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        write_plan(old, half)

    def begin():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(half, place)

    for _ in killed_at_each(begin_half, lambda: write_plan(new, half)):
        if (half / REPLACING / "old-plan.json").exists():
            break
    count = 0
    for _ in killed_at_each(begin, lambda: settle(place)):
        assert load_plan(place) == old
        check_files(place)
        count += 1
    assert count > 5


def test_the_command_goes_on_after_it_was_killed(tmp_path):
    place = tmp_path / "plan"
    command = ["plan", str(place), "--simulate", SMALL, "--max-sets", "5", "--rings", "1"]

    def run(*more):
        return tccl(*command, *more, catch_exceptions=False)

    for number in (0, 1, 20, 33, 36, 39):
        shutil.rmtree(place, ignore_errors=True)
        if killed_at(number, run):
            result = run()
            assert result.exit_code == 0 or "already holds a plan" in result.stderr
        shown = tccl("show", str(place))
        assert shown.exit_code == 0, shown.stderr
        assert tccl("env", str(place)).exit_code == 0


@pytest.mark.parametrize("others", ["", "theirs"])
def test_somebodys_folder_is_not_taken_for_a_killed_runs(others, tmp_path):
    plan = few_files(SMALL)
    write_plan(plan, tmp_path)
    (tmp_path / REPLACING / others).mkdir(parents=True)
    assert load_plan(tmp_path) == plan
    check_files(tmp_path)
    if others:
        with pytest.raises(InputError, match="Directory not empty"):
            write_plan(plan, tmp_path)
        assert (tmp_path / REPLACING / others).is_dir()
    else:
        write_plan(plan, tmp_path)
    assert load_plan(tmp_path) == plan


def test_exports_that_are_killed_leave_nothing_for_good(tmp_path):
    plan, place = few_files(SMALL), tmp_path / "out"
    begin = partial(shutil.rmtree, place, ignore_errors=True)
    for _ in killed_at_each(begin, lambda: write_nccl_files(plan, place)):
        if place.exists():
            shutil.rmtree(place)
        write_nccl_files(plan, place)
        assert names(tmp_path) == {"out"}
        assert names(place) == {"nccl"}


def test_installing_and_taking_out_may_be_killed(tmp_path, monkeypatch):
    state, files = tmp_path / "state", tmp_path / "files"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    delivery = Delivery(choice=plan_of(SMALL).choices["graph"], provenance="measured")

    def begin():
        shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)
        files.mkdir()
        state.mkdir()
        (files / "nccl.conf").write_text("NCCL_DEBUG=INFO\n")
        (files / "nccl.conf").chmod(0o640)

    def install_all():
        for name in ("nccl.conf", "new.conf", "other.conf"):
            install(delivery, files / name, dry_run=False)

    def check_gone():
        uninstall()
        assert names(files) == {"nccl.conf"}
        assert (files / "nccl.conf").read_text() == "NCCL_DEBUG=INFO\n"
        assert stat.S_IMODE((files / "nccl.conf").stat().st_mode) == 0o640
        assert not names(state)

    for _ in killed_at_each(begin, install_all):
        check_gone()
    for _ in killed_at_each(begin, install_all):
        install_all()
        assert names(files) == {"nccl.conf", "new.conf", "other.conf"}
        assert names(state / "tccl") == {"installed.json"}
        check_gone()

    def begin_installed():
        begin()
        install_all()

    for _ in killed_at_each(begin_installed, uninstall):
        check_gone()
