"""`tccl doctor`: what it prints, exits with, and asks the driver."""

import contextlib
import json

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.errors import InputError
from tccl_py.health import doctor as command
from tccl_py.readers.live import DriverFacts, GpuFacts
from tests.recorded_hosts import recorded, write


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_host_in_order_is_said_to_be_so(tmp_path):
    recorded("clean", tmp_path)
    result = tccl("doctor", "--root", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Found: nothing that hangs" in result.stdout.splitlines()[-1]
    assert "host has no driver" in result.stdout


def test_findings_are_read_by_people(tmp_path):
    recorded("container", tmp_path)
    result = tccl("doctor", "--root", tmp_path)
    assert result.exit_code == 1
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "64 MiB, expected at least 147" in lines[0]
    assert lines[1].split() == ["at", "/dev/shm"]
    assert lines[2].split()[0] == "why"
    assert any(line.split()[:1] == ["fix"] and "--shm-size=1g" in line for line in lines)
    assert "Found: 2 may hang NCCL, 2" in lines[-1]


def test_notes_alone_are_no_failure(tmp_path):
    recorded("intel-vm", tmp_path)
    result = tccl("doctor", "--root", tmp_path)
    assert result.exit_code == 0
    assert "Found: nothing that hangs" in result.stdout.splitlines()[-1]


def test_json_has_the_same_and_says_who_says_so(tmp_path):
    recorded("amd-as-it-came", tmp_path)
    result = tccl("doctor", "--root", tmp_path, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, list(found)) == (1, ["host", "findings", "unseen", "links", "facts"])
    keys = ["severity", "check", "what", "where", "measured", "expected", "why", "source", "fix"]
    assert all(list(one) == keys for one in found["findings"])
    assert all(one["why"] and one["source"] for one in found["findings"])
    assert all(list(one) == ["check", "what", "why"] for one in found["unseen"])


def test_a_root_that_is_no_directory_is_refused(tmp_path):
    result = tccl("doctor", "--root", tmp_path / "no")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "directory with sys" in result.stderr and f"{tmp_path}" in result.stderr


def test_a_root_without_a_systems_folders_is_refused(tmp_path):
    result = tccl("doctor", "--root", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "sys, proc or etc in it" in result.stderr


def test_nothing_from_a_file_reaches_the_terminal_as_it_is(tmp_path):
    write(tmp_path, "etc/nccl.conf", "NCCL_ALGO=\x1b[31m\x07\n")
    result = tccl("doctor", "--root", tmp_path)
    assert r"NCCL_ALGO=\x1b[31m\x07" in result.stdout
    assert all(line.isprintable() for line in result.stdout.splitlines())


def test_this_host_is_looked_at_without_a_driver(monkeypatch):
    def none():
        raise InputError("this machine", "no NVIDIA driver answers (why)", "read a file")

    monkeypatch.setattr(command, "driver_facts", none)
    result = tccl("doctor", "--json")
    assert result.exit_code == 1
    (finding,) = (one for one in json.loads(result.stdout)["findings"] if one["check"] == "driver")
    assert (finding["severity"], finding["what"]) == ("hang", "no NVIDIA driver answers (why)")
    assert "nothing that hangs" not in tccl("doctor").stdout


def watching(gpus, own_pids):
    """Stands for the profiler's watch: GPUs without persistence mode, narrow."""
    from tccl_profiler.watch import GpuConditions  # noqa: PLC0415

    narrow = {"persistence": False, "pcie_width": 8, "pcie_width_max": 16}
    return contextlib.nullcontext(lambda: tuple(GpuConditions(gpu=gpu, **narrow) for gpu in gpus))


def test_the_driver_is_asked_for_conditions(monkeypatch):
    gpu = GpuFacts(
        index=0, bus_id="0000:03:00.0", uuid="GPU-a", name="L40S", sm=89, links={}, c2c_links=0
    )
    facts = DriverFacts(driver="570.1", gpus=(gpu,), peer_access=())
    monkeypatch.setattr(command, "driver_facts", lambda: facts)
    monkeypatch.setattr("tccl_profiler.watch.watching", watching)
    driver = command.this_host().driver
    ((state, (complaint,)),) = driver.conditions
    assert (driver.gpus, state.gpu, state.persistence) == ((gpu,), 0, False)
    assert "x16; check its slot" in complaint


@pytest.mark.parametrize("command_", ["doctor", "check"])
def test_help_has_examples_and_keys(command_):
    text = tccl(command_, "--help").stdout
    assert f"tccl {command_}" in text.split("Examples", 1)[1]
    assert "Exit codes" in text
