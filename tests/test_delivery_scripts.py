"""Scripts that give a plan to jobs: SLURM's task prolog and environment modules."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tccl_py.delivery.job import Delivery
from tccl_py.delivery.scripts import module, script
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.directory import write_plan
from tests.cluster_plans import mixed
from tests.planned import SMALL, needing_a_graph, plan_of, replace_plan

PRINT = Fingerprint(
    gpu_uuids=("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd"),
    driver="580.159.04",
    numa_count=2,
    kernel="6.8.0",
)
VARIABLES = environment(Settings(version="2.28", p2p_level="SYS", buffsize=524288))
DELIVERY = Delivery(variables=VARIABLES)
EXPORTS = ["export NCCL_P2P_LEVEL=SYS", "export NCCL_BUFFSIZE=524288"]


@pytest.fixture
def measured(tmp_path):
    """A plan as if it had been measured, and its directory."""
    plan = replace_plan(needing_a_graph(plan_of(SMALL)), simulated=False, assumed=False)
    directory = tmp_path / "my box"
    directory.mkdir()
    write_plan(plan, directory, fingerprint=PRINT)
    return plan, directory


@pytest.fixture
def node(tmp_path):
    """The files of a host that the prolog looks at: four GPUs, a driver, two NUMA nodes."""
    root = tmp_path / "root"
    driver = root / "proc" / "driver" / "nvidia"
    for number, uuid in enumerate(PRINT.gpu_uuids):
        folder = driver / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t x\nGPU UUID: \t {uuid}\n")
    (driver / "version").write_text("NVRM version: Open Kernel Module  580.95.05  Release\n")
    for number, cpus in enumerate(("0-7\n", "8-15\n", "\n")):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    return root


def prolog(plan, directory, *, alike=False):
    return script("slurm-prolog", plan, directory, DELIVERY, equal_hosts=alike)


def exports(text, root, **environment):
    """What a prolog prints on a host whose files are below `root`."""
    text = text.replace("/proc/", f"{root}/proc/").replace("/sys/", f"{root}/sys/")
    done = subprocess.run(
        ["sh", "-eu", "-c", f"{text}echo done"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    assert last == "done"
    return lines


def test_the_prolog_exports_variables_in_jobs_of_one_node(measured, node):
    text = prolog(*measured)
    assert exports(text, node) == exports(text, node, SLURM_JOB_NUM_NODES="1") == EXPORTS
    assert exports(text, node, SLURM_JOB_NUM_NODES="2") == []
    assert "GRAPH" not in text


def test_the_prolog_leaves_what_the_job_has_set(measured, node):
    text = prolog(*measured)
    assert exports(text, node, NCCL_BUFFSIZE="") == EXPORTS[:1]


def test_the_prolog_of_a_simulated_plan_is_for_all_hosts(tmp_path):
    text = prolog(plan_of(SMALL), tmp_path)
    assert exports(text, tmp_path) == EXPORTS
    assert exports(text, tmp_path, SLURM_JOB_NUM_NODES="2") == []


def test_the_prolog_of_a_cluster_exports_in_jobs_over_several_nodes(tmp_path):
    text = prolog(mixed(), tmp_path)
    assert exports(text, tmp_path, SLURM_JOB_NUM_NODES="2") == EXPORTS


def test_the_prolog_for_equal_hosts_heeds_driver_and_numa_nodes_alone(measured, node):
    text = prolog(*measured, alike=True)
    shutil.rmtree(node / "proc/driver/nvidia/gpus")
    assert exports(text, node)[-1] == "export TCCL_ALIKE=1"
    (node / "proc/driver/nvidia/version").write_text("Module  590.58.01  Release\n")
    assert exports(text, node) == []


@pytest.mark.parametrize("change", ["gpu", "driver", "numa", "no driver"])
def test_the_prolog_exports_nothing_on_another_host(measured, node, change):
    driver = node / "proc" / "driver" / "nvidia"
    if change == "gpu":
        shutil.rmtree(driver / "gpus" / "0000:01:00.0")
    elif change == "driver":
        (driver / "version").write_text("Module 581580.1  590.58.01  Release\n")
    elif change == "numa":
        (node / "sys/devices/system/node/node2/cpulist").write_text("16\n")
    else:
        shutil.rmtree(driver)
    assert exports(prolog(*measured), node) == []


def test_a_module_sets_any_text_in_tcl():
    place = Path('/p $x [exit] {"\\;#é')
    text = module({"TCCL_INDEX": str(place)}, provenance="simulated")
    assert text.startswith("#%Module1.0\n")
    assert 'setenv TCCL_INDEX /p\\ \\$x\\ \\[exit\\]\\ \\{\\"\\\\\\;\\#é\n' in text
    if shutil.which("tclsh") is not None:
        program = 'proc setenv {n v} {puts "$n=$v"}\n' + text
        done = subprocess.run(["tclsh"], input=program, capture_output=True, text=True, check=True)
        assert f"TCCL_INDEX={place}\n" in done.stdout


# `tccl export`
