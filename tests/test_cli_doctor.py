"""`tccl doctor`: what it prints, exits with, and asks the driver."""

import contextlib
import json

from tccl_py.errors import InputError
from tccl_py.health import doctor as command
from tccl_py.readers.live import DriverFacts, GpuFacts
from tests.commands import tccl
from tests.recorded_hosts import write


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
