"""`tccl verify --with all_reduce_perf`: nccl-tests' table, and verifications by a stand-in."""

import json
import sys

import pytest

import tccl_py.experiments.plans as module
from tccl_py.errors import InputError
from tccl_py.experiments.nccl_tests import find_program, read_table, size_options
from tccl_py.experiments.preflight import check_collectives
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import PROGRAMS
from tccl_py.experiments.target import read_target
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled
from tests.commands import tccl
from tests.planned import as_only, plan_of
from tests.verified import without_gpus

NAME = "intel-v100"
TABLE = """\
# nThread 1 nGpus 4 minBytes 1024 maxBytes 4194304 step: 64(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   4711 on       box device  0 [0000:3b:00] Tesla V100-PCIE-16GB
#  Rank  1 Group  0 Pid   4711 on       box device  1 [0000:5e:00] Tesla V100-PCIE-16GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    20.00    0.05    0.08      0    22.00    0.05    0.07      0
       65536         16384     float     sum      -1    60.50    1.08    1.62      3    59.50    1.10    1.65      1
     4194304       1048576     float     sum      -1   1200.0    3.50    5.24    N/A   1.3e+03    3.23    4.84    N/A
    33554432       8388608     float    none      -1    19.56  1715.44    0.00      0     0.78  43046.10    0.00    N/A
# Out of bounds values : 4 FAILED
# Avg bus bandwidth    : 2.3
#
"""  # noqa: E501 (a table as the programs print it)

PROGRAM = """\
#!{python}
import os, sys, re
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "fails" in {wrong!r}:
    print("box: Test NCCL failure common.cu:961 'unhandled system error'"); sys.exit(3)
open(os.environ["NCCL_DEBUG_FILE"].replace("%p", "1"), "w").write(
    "box:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\\n")
print("#  Rank  0 Group  0 Pid 1 on box device  0 [0000:3b:00] Tesla V100")
size, last, faster = int(given["-b"]), int(given["-e"]), 1.5 if {name!r} in os.environ else 1.0
wrong = {wrong!r} if given["-c"] == "1" else "N/A"
while size <= last:
    us = (100 + size / 1e4) / faster * (1 + int(os.getpid()) % 7 / 1e4)
    print("  %d %d float sum -1 %.2f 1.0 1.5 %s %.2f 1.0 1.5 %s" % (
        size, size // 4, us, wrong, us, wrong))
    size *= int(given["-f"])
"""


FEW = ("--rounds", "6", "--sizes", "64M")
"""Of one row the fewest rounds decide."""
ONE = ("--choice", "variables")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A plan whose variables are recommended, as if it were of this machine."""
    directory = tmp_path / "plan"
    directory.mkdir()
    write_plan(plan_of(NAME), directory, models=as_only(load_bundled(NAME)))
    monkeypatch.setattr(module, "machine_launcher", without_gpus)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)  # no torch
    return directory


def program(place, *, wrong="0", name="all_reduce_perf", faster_with="NCCL_P2P_LEVEL"):
    path = place.parent / name
    path.write_text(PROGRAM.format(python=sys.executable, wrong=wrong, name=faster_with))
    path.chmod(0o755)
    return path


def test_the_table_has_means_of_both_ways_and_all_wrong_values():
    rows = read_table(TABLE)
    assert [(row.bytes, row.dtype, row.wrong) for row in rows] == [
        (1024, "float", 0), (65536, "float", 4), (4194304, "float", None), (33554432, "float", 0),
    ]  # fmt: skip
    assert [row.seconds[0] for row in rows[:3]] == pytest.approx([21e-6, 60e-6, 1250e-6])
    assert read_table(TABLE, in_place=False)[3].seconds == pytest.approx((19.56e-6,))


@pytest.mark.parametrize("text", ["", "\x00" * 99, " 1" * 10_000, "1 2 float sum -1\n", "nan\n"])
def test_other_output_has_no_rows(text):
    assert read_table(text) == ()


def test_sizes_have_to_grow_by_one_factor():
    assert size_options((4096,)) == ["-b", "4096", "-e", "4096", "-f", "2"]
    with pytest.raises(InputError):
        size_options((1024, 4096, 5000))


def test_programs_are_known_by_their_names(tmp_path):
    assert set(PROGRAMS.values()) >= {"all_reduce", "all_to_all", "send_recv"}
    for name in ("rm", str(tmp_path / "all_reduce_perf")):
        with pytest.raises(InputError):
            find_program(name)


def test_a_host_without_torch_is_verified_by_the_program_and_preflights_compare_with_that(place):
    path = program(place)
    result = tccl("verify", place, "--with", path, "--json", *FEW)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["winner"]) == (0, "variables")
    default, variables = found["arms"][:2]
    assert variables["ratio"] == pytest.approx(1.5, rel=0.01)
    assert (default["checked"], found["versions"]["nccl"]) == (5, "2.28.9")
    assert found["devices"][0] == "Tesla V100"
    assert variables["groups"] == []
    plan, verified = load_plan(place), Verification.load(place)
    assert verified.at_once == 1
    with module.launcher_of(plan, place, module.Launcher(nccl_tests=path)) as launcher:
        target = read_target(plan, place)
        healthy = check_collectives(target, launcher, verified)
        path.write_text(path.read_text().replace("(100 +", "2 * (100 +"))
        slow = check_collectives(target, launcher, verified)
    assert healthy.problems == () and healthy.checked == 5
    assert not healthy.slower
    assert slow.slower == list(slow.rates)


def test_a_preflight_of_a_plan_that_was_not_verified_names_sizes_that_the_program_takes(place):
    plan = load_plan(place)
    with module.launcher_of(plan, place, module.Launcher(nccl_tests=program(place))) as launcher:
        found = check_collectives(read_target(plan, place), launcher, None)
    assert found.problems == () and found.checked == 5
    assert [row.bytes for row in found.rates] == [1 << 20, 1 << 24, 1 << 28]


def test_a_program_that_fails_is_named_with_its_words(place):
    result = tccl("verify", place, "--with", program(place, wrong="fails"))
    assert result.exit_code == 2
    assert "ended with code 3" in result.stderr
    assert "unhandled system error" in result.stderr
