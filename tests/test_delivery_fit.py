"""A plan whose fingerprint no longer fits switches itself off, and says why."""

import dataclasses
import json
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from tccl_py.delivery.fit import why_elsewhere, why_not_with
from tccl_py.delivery.job import JobRequest, deliver
from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.plugin.index import INDEX_FILE
from tccl_py.nccl.settings import Settings, environment, export_lines
from tccl_py.plan.directory import machine_file, nccl_files, write_plan
from tccl_py.plan.results import planned_fingerprint
from tccl_py.readers.live import GpuFacts
from tests.cluster_plans import mixed
from tests.commands import tccl
from tests.planned import SMALL, needing_a_graph, plan_of, replace_plan

MEASURED = Fingerprint(
    gpu_uuids=("GPU-a", "GPU-b", "GPU-c", "GPU-d"),
    driver="580.159.04",
    numa_count=2,
    kernel="6.8.0",
)
# (what is another now, what the sentence has), field by field
OTHER = {
    "a GPU was replaced": (
        {"gpu_uuids": ("GPU-a", "GPU-x", "GPU-c", "GPU-d")},
        "GPU 1 was GPU-b and is GPU-x",
    ),
    "GPUs have other places": (
        {"gpu_uuids": ("GPU-b", "GPU-a", "GPU-c", "GPU-d")},
        "GPU 0 (GPU-a) has another index; GPU 1 (GPU-b) has another index",
    ),
    "a GPU is gone": ({"gpu_uuids": ("GPU-a", "GPU-b", "GPU-c")}, "GPU 3 (GPU-d) is gone"),
    "a new driver": ({"driver": "590.1"}, "the driver was 580.159.04 and is 590.1"),
    "another NPS setting": ({"numa_count": 8}, "it had 2 NUMA node(s) and has 8"),
}
STILL_FITS = {
    "the same": {},
    "a newer driver of one major version": {"driver": "580.200.01"},
    "another kernel": {"kernel": "6.9.0"},
    "one GPU more": {"gpu_uuids": (*MEASURED.gpu_uuids, "GPU-e")},
}


@pytest.fixture
def measured(tmp_path):
    """A plan as if it had been measured, and its directory."""
    plan = needing_a_graph(plan_of(SMALL))
    plan = replace_plan(plan, simulated=False, assumed=False)
    directory = tmp_path / "plan"
    directory.mkdir()
    write_plan(plan, directory, fingerprint=MEASURED)
    return plan, directory


def why_not(plan, directory, fingerprint, gpus=None):
    """Why a plan does not fit a host of this fingerprint; with `gpus` one that may be equal."""
    facts = SimpleNamespace(gpus=gpus)
    answers = {"fingerprint_of": lambda _: fingerprint, "driver_facts": lambda: facts}
    with mock.patch.multiple("tccl_py.delivery.fit", **answers):
        return why_elsewhere(plan, directory, equal_hosts=gpus is not None, say=print)


@pytest.mark.parametrize("name", OTHER)
def test_a_plan_is_off_where_its_fingerprint_differs(measured, name):
    plan, directory = measured
    changes, said = OTHER[name]
    now = msgspec.structs.replace(MEASURED, **changes)
    assert why_not(plan, directory, now).startswith(said)


@pytest.mark.parametrize("name", STILL_FITS)
def test_a_plan_is_on_where_what_differs_does_not_matter(measured, name):
    plan, directory = measured
    now = msgspec.structs.replace(MEASURED, **STILL_FITS[name])
    assert why_not(plan, directory, now) == ""


def test_a_simulated_plan_is_nobodys(tmp_path):
    assert why_not(plan_of(SMALL), tmp_path, MEASURED) == ""


def test_a_measured_plan_that_does_not_say_whose_it_is_is_off(measured):
    plan, directory = measured
    write_plan(plan, directory)
    path = machine_file(plan, directory)
    assert planned_fingerprint(plan, directory) is None
    assert str(path) in why_not(plan, directory, MEASURED)


@pytest.mark.parametrize("damage", [None, "[]", "{", '{"gpus": 1}'])
def test_a_damaged_machine_is_a_sentence(measured, damage):
    plan, directory = measured
    path = machine_file(plan, directory)
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(InputError) as error:
        why_not(plan, directory, MEASURED)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("planned", "used", "said"),
    [
        ("2.30", "2.30.7", ""),
        ("2.28.9", "2.28.3", ""),
        ("2.28", "v2.28.9+cuda13.0", ""),
        ("2.3", "2.30.7", "--nccl 2.30"),
        ("2.30", "2.28.9", "--nccl 2.28"),
    ],
)
def test_a_plan_is_for_one_version_of_nccl(planned, used, said):
    found = why_not_with(Settings(version=planned), used)
    assert said in found
    assert bool(found) == bool(said)


def test_no_plan_is_advised_for_a_version_without_rules():
    assert "plan again" not in why_not_with(Settings(version="2.30"), "1.0")


def test_no_version_of_nccl_is_a_sentence():
    with pytest.raises(InputError) as error:
        why_not_with(Settings(), "new")
    assert error.value.where == "NCCL version 'new'"


def facts_of(plan, **changes):
    """The GPUs of a plan's machine as NVML has them; `changes` by index as `gpu1`."""
    gpus = [
        GpuFacts(
            index=gpu.index,
            bus_id=gpu.bus_id,
            uuid=f"GPU-other-{gpu.index}",
            name=gpu.name,
            sm=gpu.sm,
            links={},
            c2c_links=0,
        )
        for gpu in plan.machine.gpus
    ]
    for name, change in changes.items():
        index = int(name.removeprefix("gpu"))
        gpus[index] = dataclasses.replace(gpus[index], **change)
    return tuple(gpus)


OTHER_UUIDS = msgspec.structs.replace(MEASURED, gpu_uuids=("GPU-1", "GPU-2", "GPU-3", "GPU-4"))


def test_the_plan_of_an_equal_host_fits_if_that_is_said(measured):
    plan, directory = measured
    assert why_not(plan, directory, OTHER_UUIDS)
    assert why_not(plan, directory, OTHER_UUIDS, facts_of(plan)) == ""


@pytest.mark.parametrize(
    ("gpus", "changes", "said"),
    [
        ({"gpu2": {"name": "NVIDIA A40"}}, {}, "GPU 2 was "),
        ({"gpu0": {"bus_id": "0000:ff:00.0"}}, {}, "GPU 0 was "),
        ({"gpu3": {"index": 9}}, {}, "GPU 3 was "),
        ({}, {"driver": "590.1"}, "the driver was 580.159.04 and is 590.1"),
        ({}, {"numa_count": 1}, "it had 2 NUMA node(s)"),
    ],
)
def test_a_host_that_is_not_alike_is_told_so(measured, gpus, changes, said):
    plan, directory = measured
    now = msgspec.structs.replace(OTHER_UUIDS, **changes)
    alike = facts_of(plan, **gpus)
    assert why_not(plan, directory, now, alike).startswith(said)


@pytest.mark.parametrize("way", ["option", "variable"])
def test_env_takes_the_plan_of_an_equal_host(measured, monkeypatch, way):
    plan, directory = measured
    facts = SimpleNamespace(gpus=facts_of(plan))
    if way == "variable":
        monkeypatch.setenv("TCCL_ALIKE", "1")
    words = ["--alike"] if way == "option" else []
    result = run_env(monkeypatch, directory, OTHER_UUIDS, *words, facts=facts)
    assert result.exit_code == 0, result.stderr
    assert "export NCCL_GRAPH_FILE=" in result.stdout


def test_a_host_of_a_cluster_with_other_gpus_gets_the_variables_of_all_ranks_and_no_graph_file(
    tmp_path, monkeypatch
):
    plan = mixed(simulated=False, assumed=False)
    write_plan(plan, tmp_path)
    gpus = plan.cluster.classes[plan.cluster.host_classes["gpu2"]].machine.gpus
    monkeypatch.setattr("socket.gethostname", lambda: "gpu2")
    for now, code in ((gpus, 0), (gpus[:1], 1)):
        facts = SimpleNamespace(gpus=now)
        monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", lambda facts=facts: facts)
        result = tccl("env", str(tmp_path))
        assert result.exit_code == code, result.stderr
    exports = export_lines(environment(plan.job_settings))
    assert result.stdout.endswith(f"{exports}unset NCCL_GRAPH_FILE\n")
    assert result.stderr.startswith("tccl: GPU 1 was unnamed and is gone: no graph file")
    # Whoever asks for another host is told what that one gets.
    assert tccl("env", str(tmp_path), "--host", "gpu1").exit_code == 0


def run_env(monkeypatch, directory, now, *words, facts=None):
    def answer():
        if now is None:
            raise InputError("this machine", "no NVIDIA driver answers", "use another")
        return facts

    monkeypatch.setattr("tccl_py.delivery.fit.driver_facts", answer)
    monkeypatch.setattr("tccl_py.delivery.fit.fingerprint_of", lambda facts: now)
    return tccl("env", str(directory), *words)


@pytest.mark.parametrize("name", OTHER)
def test_env_is_off_where_the_fingerprint_differs(measured, monkeypatch, name):
    changes, said = OTHER[name]
    now = msgspec.structs.replace(MEASURED, **changes)
    result = run_env(monkeypatch, measured[1], now)
    assert (result.exit_code, result.stdout) == (1, "unset NCCL_GRAPH_FILE\n")
    begin = "tccl: the plan is disabled, NCCL chooses its own rings: "
    assert result.stderr.startswith(begin + said)
    assert result.stderr.count("\n") == 1


def test_env_says_in_json_that_it_is_off(measured, monkeypatch):
    now = msgspec.structs.replace(MEASURED, numa_count=1)
    result = run_env(monkeypatch, measured[1], now, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["environment"] == {}
    assert told["off"].startswith("it had 2 NUMA node(s)")


@pytest.mark.parametrize("gpus", [*combinations(range(5), 2), (0, 1, 2), (0, 1, 3), (1, 2, 3, 4)])
def test_a_plan_is_for_jobs_over_its_own_gpus_alone(tmp_path, gpus):
    plan = plan_of(SMALL, gpus=(0, 1, 2), ring_counts=(1,))
    write_plan(plan, tmp_path)
    said = []
    given = deliver(plan, tmp_path, JobRequest(gpus=gpus), say=said.append)
    fits = set(gpus) <= {0, 1, 2}
    assert (given.refused, bool(given.disabled)) == (not fits, not fits), said
    assert fits or (given.variables == {} and "it is for GPUs 0,1,2" in said[-1])


@pytest.mark.parametrize("known", [4, 3, 0])
def test_the_plugin_has_an_index_only_where_uuids_tell_all_gpus(tmp_path, known):
    plan = replace_plan(needing_a_graph(plan_of(SMALL)), simulated=False, assumed=False)
    uuids = tuple(f"GPU-0000000{gpu}-0000-0000-0000-000000000000" for gpu in range(known))
    write_plan(plan, tmp_path, fingerprint=msgspec.structs.replace(MEASURED, gpu_uuids=uuids))
    assert (tmp_path / "nccl" / INDEX_FILE).exists() == (known == 4)


@pytest.mark.parametrize("winner", ["default", "variables", "graph"])
def test_a_script_names_a_graph_file_only_where_that_is_recommended(tmp_path, winner):
    plan = msgspec.structs.replace(needing_a_graph(plan_of(SMALL)), winner=winner)
    script = nccl_files(plan, tmp_path)["env.sh"]
    assert ("export NCCL_GRAPH_FILE=" in script) == (winner == "graph")
    assert ("unset NCCL_GRAPH_FILE\n" in script) == (winner != "graph")
