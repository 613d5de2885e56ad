"""The files of a plan are bound to it: what was changed, or is none of it, is handed to no job."""

import json
import os
import stat

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.results import plan_digest
from tccl_py.plan.staging import MANIFEST_FILE, check_files, read_manifest
from tccl_py.simulator.descriptions import load_bundled
from tests.cluster_plans import mixed
from tests.commands import tccl
from tests.planned import SMALL, as_only, plan_of, rebind


@pytest.fixture
def place(tmp_path):
    """The directory of a simulated plan with subsets."""
    directory = tmp_path / "plan"
    directory.mkdir()
    write_plan(plan_of(SMALL), directory, models=as_only(load_bundled(SMALL)))
    return directory


READERS = {
    "env": lambda place: tccl("env", place),
    "install": lambda place: tccl("install", place, "--force", "--dry-run"),
    "verify": lambda place: tccl("verify", place, "--backend", "host"),
}
FILES = [
    *("plan.json", "nccl/graph.xml", "nccl/nccl.conf", "nccl/env.sh"),
    *("nccl/subsets/graph-0-1.xml", f"machines/{SMALL}.json"),
]


def change(path, how):
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_text("")
    elif how == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("name", FILES)
def test_no_job_gets_a_file_that_was_changed(name, place):
    change(place / name, "one byte")
    for reader in READERS.values():
        result = reader(place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(place / name) in result.stderr
        assert result.stderr.count("\n") == 1
    with pytest.raises(InputError) as error:
        check_files(place)
    assert str(place / name) in str(error.value)


@pytest.mark.parametrize("how", ["missing", "empty", "fifo", "folder", "device"])
@pytest.mark.parametrize("name", ["nccl/graph.xml", MANIFEST_FILE])
def test_whatever_stands_in_a_files_place_is_one_sentence(how, name, place):
    change(place / name, how)
    for reader in READERS.values():
        result = reader(place)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert name.rpartition("/")[2] in result.stderr
    with pytest.raises(InputError):
        check_files(place)


def test_a_manifest_that_names_other_places_is_refused(place):
    found = json.loads((place / MANIFEST_FILE).read_text())
    for name in ("../x", "/etc/passwd", "nccl/../../x"):
        (place / MANIFEST_FILE).write_text(json.dumps(found | {"files": {name: "0"}}))
        with pytest.raises(InputError, match="which is elsewhere; plan again"):
            check_files(place)


def test_a_directory_without_a_manifest_says_how_to_get_one(tmp_path):
    place = tmp_path / "plan"
    quick = ("--simulate", SMALL, "--max-sets", "5", "--rings", "1")
    assert tccl("plan", place, *quick).exit_code == 0
    (place / MANIFEST_FILE).unlink()
    assert "plan again by `tccl plan DIR --force`" in tccl("env", place).stderr
    for words in (("show",), ("report",), ("show", "--why")):
        assert tccl(*words, place).exit_code == 0, words
    assert tccl("plan", place, *quick, "--force").exit_code == 0
    assert load_plan(place).sets_measured == 0
    assert tccl("env", place).exit_code == 0


def test_a_graph_file_that_is_not_the_plans_is_never_used(tmp_path):
    plan = msgspec.structs.replace(plan_of(SMALL), subsets=())
    write_plan(plan, tmp_path)
    theirs = tmp_path / "nccl" / "subsets" / "graph-0-1.xml"
    theirs.parent.mkdir()
    theirs.write_text("<graphs/>")
    result = tccl("env", tmp_path, "--gpus", "0,1", "--choice", "graph")
    assert result.exit_code == 1
    assert "NCCL_GRAPH_FILE=" not in result.stdout
    assert "nccl/subsets/graph-0-1.xml" not in check_files(tmp_path).files


def test_what_was_verified_holds_for_all_files(tmp_path):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path, models=as_only(load_bundled(SMALL)))
    identity = read_manifest(tmp_path).identity
    assert plan_digest(tmp_path) == identity
    (tmp_path / "nccl" / "graph.xml").write_text("another")
    rebind(tmp_path)
    assert read_manifest(tmp_path).identity != identity


def test_a_hosts_file_that_was_changed_is_refused(tmp_path):
    write_plan(mixed(), tmp_path)
    path = tmp_path / "nccl" / "hosts" / "gpu1.xml"
    change(path, "one byte")
    for arguments in (("env", tmp_path, "--host", "gpu2"), ("install", tmp_path, "--dry-run")):
        result = tccl(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{path}: was changed since the plan" in result.stderr


def test_a_rank_refuses_its_own_hosts_file_if_that_was_changed(tmp_path):
    write_plan(mixed(), tmp_path)
    change(tmp_path / "nccl" / "hosts" / "gpu1.xml", "one byte")
    check_files(tmp_path, ["nccl/hosts/gpu2.xml"])
    with pytest.raises(InputError, match=r"gpu1\.xml: was changed"):
        check_files(tmp_path, ["nccl/hosts/gpu1.xml"])


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002, 0])
def test_files_and_folders_get_what_the_umask_leaves_and_only_the_owner_writes_a_plan(
    umask, tmp_path
):
    before = os.umask(umask)
    try:
        place = tmp_path / "plan"
        quick = ("--simulate", SMALL, "--max-sets", "5", "--rings", "1")
        assert tccl("plan", place, *quick).exit_code == 0
        assert tccl("report", place).exit_code == 0
        assert tccl("export", place, "-o", tmp_path / "out").exit_code == 0
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        # NCCL's plugin trusts no file, and no folder above it, that a group can write.
        full = 0o755 if path.is_dir() else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


def test_a_file_that_is_written_anew_keeps_its_permissions(place):
    assert tccl("report", place).exit_code == 0
    (place / "report.html").chmod(0o600)
    assert tccl("report", place).exit_code == 0
    assert stat.S_IMODE((place / "report.html").stat().st_mode) == 0o600
