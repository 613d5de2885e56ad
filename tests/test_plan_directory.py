"""A plan's directory: whole or not there, and nobody else's files are lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tccl_py.delivery.plugin import plugin_exports
from tccl_py.errors import InputError, visible
from tccl_py.files import encode_json
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import INDEX_FILE, INDEX_HEAD
from tccl_py.plan.directory import machine_file, write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.results import plan_in
from tccl_py.planning.output import output_directory
from tccl_py.planning.plan_sources import planned_model
from tccl_py.simulator.descriptions import load_bundled, read_description
from tccl_py.sources.journal import read_journal
from tests.commands import refused, tccl
from tests.planned import PCIE, SMALL, plan_of, rebind

QUICK = ("--max-sets", "100", "--rings", "1")


def planned_to(place, machine=SMALL, *more):
    return tccl("plan", place, "--simulate", machine, *QUICK, *more)


def held(place):
    return {str(one.relative_to(place)): one.stat().st_mtime_ns for one in place.rglob("*")}


def test_a_simulated_plan_keeps_the_model_that_it_comes_from(tmp_path):
    planned_to(tmp_path / "plan")
    plan = load_plan(tmp_path / "plan")
    assert planned_model(plan, tmp_path / "plan") == load_bundled(SMALL)
    assert read_description(machine_file(plan, tmp_path / "plan")).machine == plan.machine


def test_another_machine_in_the_plans_directory_is_refused(tmp_path):
    plan = plan_of(PCIE)
    write_plan(plan, tmp_path)
    machine_file(plan, tmp_path).write_text(encode_json(load_bundled(SMALL)))
    with pytest.raises(InputError, match=r"was changed since the plan"):
        planned_model(plan, tmp_path)
    rebind(tmp_path)
    with pytest.raises(InputError, match=r"is not the plan's machine"):
        planned_model(plan, tmp_path)


def test_force_replaces_a_plan_even_by_one_of_another_machine(tmp_path):
    planned_to(tmp_path / "plan")
    replaced = planned_to(tmp_path / "plan", PCIE, "--force")
    assert (replaced.exit_code, replaced.stderr.count("measurements.jsonl.old")) == (0, 1)
    assert load_plan(tmp_path / "plan").machine == load_bundled(PCIE).machine
    assert [one.name for one in (tmp_path / "plan" / "machines").iterdir()] == [f"{PCIE}.json"]
    assert read_journal(tmp_path / "plan" / "measurements.jsonl").header.machine == PCIE
    old = read_journal(tmp_path / "plan" / "measurements.jsonl.old")
    assert old.header.machine == SMALL
    assert old.measurements


def test_what_a_killed_run_left_is_no_hindrance(tmp_path):
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc" / "plan.json").write_text("{")
    assert planned_to(tmp_path).exit_code == 0
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("read", [load_plan, plan_in])
def test_a_name_that_no_system_takes_is_refused_as_a_plan(read):
    with pytest.raises(InputError, match="too long"):
        read(Path("a" * 5000))


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def test_results_are_printed_of_a_plan_whose_directory_cannot_be_written(tmp_path):
    place = tmp_path / "plan"
    assert tccl("plan", place, "--simulate", SMALL, *QUICK).exit_code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    words = [sys.executable, "-m", "tccl_py", "show", "--why", place]
    if os.geteuid() == 0:
        # Nothing but the mount keeps root from writing.
        words = ["unshare", "--mount", "sh", "-c", READ_ONLY, place, *words]
    else:
        for path in (place, *place.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr or "mount: " in done.stderr:
        pytest.skip("root may not mount here")
    assert (done.returncode, done.stdout.count("\n") > 2) == (0, True), done.stderr
    assert done.stderr.count("tccl: ") == 1
    assert done.stderr.startswith("tccl: nothing was kept: ")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_no_permission_is_refused_for_root_as_well(tmp_path, monkeypatch):
    def denied(path, *more, **others):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    refused(planned_to(tmp_path / "a" / "b"), "cannot be made (Permission denied)")
    assert not held(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\x9b31mb"])
def test_a_directory_with_control_characters_is_refused_before_anything_is_measured(name, tmp_path):
    refused(planned_to(tmp_path / name), "has control characters")
    assert not held(tmp_path)


def test_a_directory_that_is_not_utf_8_is_refused(tmp_path):
    refused(planned_to(tmp_path / os.fsdecode(b"a\xff")), "is not UTF-8")
    assert not held(tmp_path)


@pytest.mark.parametrize("parts", [("plan",), ("a", "b", "plan")])
def test_a_failed_run_takes_away_the_directories_that_it_made(parts, tmp_path):
    sentence = "'magic': is not known; there are best-first"
    refused(planned_to(tmp_path.joinpath(*parts), SMALL, "--strategy", "magic"), sentence)
    assert not held(tmp_path)


def test_a_failed_run_leaves_a_directory_that_was_there(tmp_path):
    planned_to(tmp_path, SMALL, "--strategy", "magic")
    assert set(held(tmp_path)) <= {"measurements.jsonl"}


@pytest.mark.parametrize("error", [ValueError, RuntimeError, InputError("a", "b", "c")])
def test_any_error_takes_away_the_directory_that_was_made(error, tmp_path):
    with pytest.raises(Exception), output_directory(tmp_path / "a" / "b", force=False):  # noqa: B017
        raise error
    assert not held(tmp_path)


def test_an_interruption_leaves_the_directory(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        output_directory(tmp_path / "a", force=False) as journal,
    ):
        journal.write_text("kept")
        raise KeyboardInterrupt
    assert (tmp_path / "a" / "measurements.jsonl").read_text() == "kept"


def test_a_directory_in_use_is_refused_and_stays_as_it_is(tmp_path):
    with output_directory(tmp_path / "a", force=False) as journal:
        journal.write_text("kept")
        sentence = f"tccl: {tmp_path / 'a'}: is in use by another run; wait for its end, or name"
        refused(planned_to(tmp_path / "a"), sentence)
        refused(planned_to(tmp_path / "a", SMALL, "--force"), sentence)
        assert journal.read_text() == "kept"
    journal.unlink()
    assert planned_to(tmp_path / "a").exit_code == 0


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_a_plan_replaces_is_put_aside_before_it_is_deleted(kind, tmp_path, monkeypatch):
    place, removed = tmp_path / "plan", []
    planned_to(place)
    if kind != "folder":
        (place / "nccl").rename(tmp_path / "theirs")
        if kind == "link":
            (place / "nccl").symlink_to(tmp_path / "theirs")
        else:
            (place / "nccl").write_text("a file")
    before = held(tmp_path / "theirs") if kind != "folder" else {}
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        "shutil.rmtree", lambda path, **more: (removed.append(path.name), rmtree(path, **more))
    )
    assert planned_to(place, SMALL, "--force").exit_code == 0
    assert [name.startswith(".writing-") for name in removed] == [True]
    assert {"graph.xml", "nccl.conf", "env.sh", "plugin.index"} == {
        one.name for one in (place / "nccl").iterdir()
    }
    assert not (place / "nccl").is_symlink()
    assert kind == "folder" or held(tmp_path / "theirs") == before


def test_a_place_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def unable(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unable)
    assert planned_to(tmp_path / "a").exit_code == 0


def full_disk(at):
    """Lets the n-th file fail as a full disk does."""
    count = 0

    def fsync(descriptor):
        nonlocal count
        count += 1
        if count == at:
            raise OSError(28, "No space left on device")

    return fsync


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_full_disk_while_files_are_written_leaves_nothing(at, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", full_disk(at))
    sentence = "cannot be written (No space left on device); choose a writable place with free"
    refused(planned_to(tmp_path / "plan"), f"tccl: {tmp_path / 'plan'}: {sentence}")
    assert not held(tmp_path)


@pytest.fixture(params=["8k", "64k"])
def small_disk(request, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.call(command, stderr=subprocess.DEVNULL):
        pytest.skip("cannot mount a small disk here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full_is_one_sentence_and_nothing_half_written(small_disk):
    refused(planned_to(small_disk / "plan", PCIE), "(No space left on device); choose a writable")
    assert not held(small_disk)


@pytest.mark.parametrize(
    "name, safe",
    [
        ("../../x", "x"),
        ("/etc/passwd", "etc-passwd"),
        ("a\x00b\n\x1b[31m\x9b\x7f", "a-b-31m"),
        ("..", "node"),
        ("", "node"),
        ("x" * 500, "x" * 64),
        ("größe", "gr-e"),
    ],
)
def test_a_hostile_machine_name_stays_in_the_directory(name, safe, tmp_path):
    model = load_bundled(SMALL)
    machine = msgspec.structs.replace(model.machine, name=name)
    hostile = msgspec.structs.replace(model, machine=machine, name=name)
    (tmp_path / "model.json").write_text(encode_json(hostile))
    result = planned_to(tmp_path / "out" / "plan", tmp_path / "model.json")
    assert result.exit_code == 0
    assert not set("\x00\x1b\x7f\x9b") & set(result.output)
    assert f"Plan{visible(name)},GPUs".replace(" ", "") in "".join(result.stdout.split())
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", "out"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan"]
    machines = tmp_path / "out" / "plan" / "machines"
    assert [path.name for path in machines.iterdir()] == [f"{safe}.json"]
    assert load_plan(tmp_path / "out" / "plan").machine == machine
    show = tccl("show", tmp_path / "out" / "plan")
    assert show.exit_code == 0
    assert not set("\x00\x1b\x7f\x9b") & set(show.output)


def test_a_plan_without_a_model_or_of_measurements_has_none_to_simulate_by(tmp_path):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    measured = msgspec.structs.replace(plan, simulated=False)
    assert planned_model(measured, tmp_path) is None
    machine_file(plan, tmp_path).unlink()
    (tmp_path / "manifest.json").unlink()
    assert planned_model(plan, tmp_path) is None


def test_the_plugin_is_refused_without_its_files_by_older_files_and_in_paths_nccl_cannot_open(
    tmp_path,
):
    folder = tmp_path / "of, two" / "nccl"
    folder.mkdir(parents=True)
    for what, name, content in (
        (INDEX_FILE, INDEX_FILE, b"tccl-index 1\n"),
        ("library", LIBRARY, b""),
        ("another version", INDEX_FILE, INDEX_HEAD),
        ("cannot open", INDEX_FILE, b""),
    ):
        with pytest.raises(InputError) as caught:
            plugin_exports(plan_of(PCIE), folder.parent)
        assert what in caught.value.what
        (folder / name).write_bytes(content)
