"""Means beside NCCL: what disqualifies one, and which is best for which size."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments import means_table, plans
from tccl_py.experiments.jobs import HostRanks, Launcher, LocalRunner
from tccl_py.experiments.means import MEANS, NCCL
from tccl_py.experiments.means_table import (
    CALLS,
    MeansRow,
    MeansTable,
    best_means,
    links_of,
    means_lines,
    means_rows,
    measure_means,
)
from tccl_py.experiments.spec import BATCHES, COLLECTIVES, MIB, JobResult, JobSpec, batches
from tccl_py.experiments.target import target_of
from tccl_py.files import decode_json, encode_json
from tccl_py.model.links import Proof
from tccl_py.plan.directory import write_plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import RankOutput, RanksError
from tccl_py.simulator.descriptions import load_bundled
from tests.commands import tccl
from tests.planned import SMALL, as_only, plan_of
from tests.skips import mark_needs
from tests.stand_in_means import STAND_INS

RANKS = 4
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
KNOWN = {NCCL: MEANS[NCCL], **STAND_INS}


@pytest.fixture
def target(tmp_path):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    return target_of(plan, tmp_path)


def launcher(runner=None, *, environment=ENVIRONMENT, **more):
    host = HostRanks(ranks=tuple(range(RANKS)), gpus=tuple(range(RANKS)), environment=environment)
    return Launcher(hosts=(host,), runner=runner, **{"backend": "host", **more})


@pytest.fixture(scope="module")
def server():
    with ForkServer() as found:
        yield found


@mark_needs("torch")
def test_a_means_that_hangs_is_wrong_or_cannot_run_is_out_by_name_and_the_rest_is_right(
    target, server
):
    own = launcher(LocalRunner(server), program="tests.stand_in_means")
    known = {name: KNOWN[name] for name in ("hangs", "wrong", "absent", NCCL)}
    found = measure_means(target, own, seconds=0.1, sizes=(4096,), known=known)
    assert found.out["absent"] == "cannot run: it is not installed"
    assert found.out["hangs"].startswith("hangs: all-reduce of 4 KiB")
    assert found.out["wrong"].startswith("wrong values: 1 of 2048 values are wrong, the first at 3")
    assert {name for row in found.rows for name in row.us} == {NCCL}
    assert {row.best for row in found.rows} == {NCCL}


@mark_needs("torch")
def test_copies_through_host_memory_and_nccl_give_right_values_in_every_row(target, server):
    known = {name: MEANS[name] for name in (NCCL, "host-copies")}
    own = launcher(LocalRunner(server))
    # 1 MiB has several pieces, more than there are slots.
    found = measure_means(target, own, seconds=0.1, sizes=(65536, MIB), known=known)
    assert found.out == {} and found.dry_run
    for row in found.rows:
        able = set(known) if "all-reduce" not in row.calls else {NCCL}
        assert set(row.us) == able
        assert set(row.gemm) == (able if "beside" in row.calls else set())
    assert set(CALLS.values()) <= {row.calls for row in found.rows}
    assert found.keep(target.directory) == MeansTable.load(target.directory)


@mark_needs("torch")
def test_a_rank_without_a_partner_takes_part_in_nothing(target, server):
    host = HostRanks(ranks=(0, 1, 2), gpus=(0, 1, 2), environment=ENVIRONMENT)
    own = Launcher(backend="host", hosts=(host,), runner=LocalRunner(server))
    rows = tuple(row for row in means_rows(3, [65536]) if row.collective == "send")
    for name in (NCCL, "host-copies"):
        (job,) = own.run(target.arms[:1], JobSpec(rows=rows, means=name))
        for rank in job.results:
            assert [len(times.seconds) for times in rank.times] == [BATCHES * (rank.rank < 2)] * 2


class Recorded:
    """Jobs whose rows take the recorded microseconds by means; a text is how a job fails.

    A list has what its jobs do, one after the other.
    """

    def __init__(self, us):
        self.us, self.jobs = us, []

    def rendezvous(self, host, count):
        return [None] * count

    def run(self, tasks):
        ((host, (task,)),) = tasks.items()
        spec = decode_json(task.spec, JobSpec, where="spec")
        self.jobs.append((spec.means, dict(task.environment)))
        us = self.us[spec.means]
        if isinstance(us, list):
            us = us.pop(0) if len(us) > 1 else us[0]
        if isinstance(us, str):
            raise RanksError([0], "ended with code 1", us)
        times = [batches(row, [us(row) * 1e-6] * BATCHES) for row in spec.rows]
        times = [replace(one, gemms=(1.25,) * BATCHES) if one.row.beside else one for one in times]
        results = [
            encode_json(JobResult(rank=rank, torch="2.11", times=tuple(times)))
            for rank in range(spec.world)
        ]
        return {host: [RankOutput(results=tuple(results), log="")]}


RECORDED = {
    NCCL: lambda row: 20 + row.bytes / 4e4,
    "one-shot": lambda row: 5 + row.bytes / 1e4,
    "two-shot": lambda row: 12 + row.bytes / 4.05e4,
    "multimem": "error: NVLink has no multicast here",
    "vllm": "error: vllm is not installed",
    "flashinfer": "error: hangs: all-reduce of 4 KiB did not end in 20 s",
    "peer-copies": lambda row: 10 + row.bytes / 4.1e4,
    "host-copies": lambda row: 40 + row.bytes / 3e4,
}


def proven(target, verdict="sound"):
    ProvenLinks(proof=Proof(verdict=verdict, what="nothing arrives")).keep(target.directory)
    return target


def on_gpus(jobs, **environment):
    environment = {"PATH": "/bin", **environment}
    return launcher(jobs, environment=environment, backend="cuda", keep=tuple(environment)[1:])


def test_recorded_rows_decide_by_size_and_default_nccl_stays_where_it_is_as_good(target):
    jobs = Recorded(RECORDED)
    found = measure_means(proven(target), on_gpus(jobs), seconds=1e3)
    graphs = {row.bytes: row for row in found.rows if row.calls == CALLS["all_reduce"]}
    best = {size: row.best for size, row in graphs.items()}
    assert (best[4096], best[256 << 10], best[64 * MIB]) == ("one-shot", "two-shot", NCCL)
    # The fastest at 64 MiB is not 2 % faster.
    last = graphs[64 * MIB]
    assert (last.best, last.us["two-shot"] < last.us[NCCL]) == (NCCL, True)
    regret = found.regrets["all-reduce in a CUDA graph"]
    assert regret["one-shot"][1] == pytest.approx(2.956, rel=0.01)
    assert 0 < regret["two-shot"][0] < 1
    assert found.out["multimem"] == "cannot run: NVLink has no multicast here"
    assert found.out["flashinfer"] == "hangs: all-reduce of 4 KiB did not end in 20 s"
    assert {row.gemm[NCCL] for row in found.rows if "beside" in row.calls} == {1.25}
    # 160 all-reduces of 512 KiB, between sizes that were timed, and a gather.
    step = found.workloads["tensor-parallel-decode"]
    assert 0.0002 < step["best"] < step[NCCL] < 0.02
    assert [name for name, _ in jobs.jobs].count("host-copies") == 3


@pytest.mark.parametrize(
    ("verdict", "variables", "words"),
    [
        ("wrong values", {}, "wrong values: nothing arrives"),
        ("inconclusive", {}, "inconclusive"),
        (None, {}, "not proven"),
        ("sound", {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1 disables P2P"),
    ],
)
def test_means_that_need_p2p_do_not_run_where_it_is_not_proven(target, verdict, variables, words):
    jobs = Recorded(RECORDED)
    if verdict:
        proven(target, verdict)
    found = measure_means(target, on_gpus(jobs, **variables), seconds=1e-9)
    assert {name for name, _ in jobs.jobs} == {NCCL, "host-copies"}
    assert {words in found.out[name] for name in KNOWN_P2P} == {True}
    assert [name for name, _ in jobs.jobs].count("host-copies") == 1


KNOWN_P2P = [name for name, one in MEANS.items() if one.p2p]


def test_a_means_that_fails_after_anothers_hang_is_tried_once_more(target, monkeypatch):
    monkeypatch.setattr(means_table, "AFTER_HANG_S", 0.0)
    us = {**RECORDED, NCCL: "error: hangs: at once"}
    us["one-shot"] = ["torch.AcceleratorError: CUDA error: launch failed", RECORDED["one-shot"]]
    us["peer-copies"] = ["torch.AcceleratorError: CUDA error: launch failed"]
    found = measure_means(proven(target), on_gpus(Recorded(us)), seconds=1e-9)
    assert any("one-shot" in row.us for row in found.rows)
    assert "CUDA error: launch failed" in found.out["peer-copies"]


def test_without_right_values_there_is_no_table(target):
    jobs = Recorded(dict.fromkeys(MEANS, "error: hangs: at once"))
    with pytest.raises(MeasurementError, match="nccl: hangs: at once"):
        measure_means(proven(target), on_gpus(jobs), seconds=1.0)
    with pytest.raises(InputError):
        measure_means(target, on_gpus(jobs), seconds=1.0, sizes=(3,))


def test_every_means_has_rows_and_every_row_a_means():
    rows = {row.collective for row in means_rows(2)}
    assert rows == {name for one in MEANS.values() for name in one.collectives}
    assert rows <= set(COLLECTIVES)


@pytest.mark.parametrize(
    ("links", "known", "server"),
    [
        ("nvlink", "vllm-project/vllm#24111", "--enable-torch-symm-mem is off"),
        ("pcie", "sgl-project/sglang#34528", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1 is off"),
        ("none", "20 to 50 us below 64 KiB", "off without P2P"),
    ],
)
def test_without_a_table_decoding_is_answered_by_published_figures_for_such_links(
    links, known, server
):
    lines = [*means_lines("tensor-parallel-decode", links, None)]
    text = " ".join(text for _, text in lines)
    assert known in text and server in text and "--means" in text
    assert {"vLLM", "SGLang"} <= {name for name, _ in lines}
    assert [*means_lines("fsdp", links, None)] == []


def test_published_figures_name_a_machine_and_a_source_and_sizes_where_nccl_is_faster():
    text = " ".join(text for _, text in means_lines("tensor-parallel-decode", "pcie", None))
    assert "128 KiB: one-shot pushes 4.0 to 44.5 us, NCCL 19.4 to 51.8 us; 384 KiB: NCCL" in text
    assert "on 4 V100 below one PCIe switch" in text
    assert "1354 us" in " ".join(text for _, text in means_lines("pipeline", "none", None))


def test_a_table_of_the_machine_answers_by_size_with_the_flags_of_servers(target):
    found = measure_means(proven(target), on_gpus(Recorded(RECORDED)), seconds=1e-9)
    lines = [*means_lines("tensor-parallel-decode", "nvlink", found)]
    spans = [text for name, text in lines if name == "By size"]
    assert spans[0].startswith("4 KiB to 64 KiB: one-shot 5.4 to 11.6 us, default NCCL 20.1 to")
    assert spans[1].startswith("256 KiB to 1 MiB: two-shot")
    (told,) = (text for name, text in lines if name == "SGLang")
    assert "is off; for one-shot: its own one-shot kernel" in told
    sends = [text for name, text in means_lines("pipeline", "nvlink", found) if name == "By size"]
    assert "peer-copies" in sends[0] and "measured here" in sends[0]


def test_links_are_told_from_a_machines_nvlinks_and_p2p():
    plans = {"h200x4-vm": "nvlink", "asus-esc8000a-e13p": "pcie", "amd-3090": "none"}
    models = {name: load_bundled(name) for name in plans}
    assert {name: links_of(m.machine, m.knowledge) for name, m in models.items()} == plans


def test_the_flags_of_every_means_for_all_reduce_are_known():
    decode = (name for name, one in MEANS.items() if "all_reduce" in one.collectives)
    for name in decode:
        row = MeansRow(
            calls=CALLS["all_reduce"], bytes=65536, best=name, us={name: 1.0},
            spread={name: (1.0, 1.0)}, gemm={},
        )  # fmt: skip
        table = replace(TABLE, rows=(row,))
        assert len([*means_lines("tensor-parallel-decode", "nvlink", table)]) == 3


TABLE = MeansTable(
    machine="box", backend="cuda", rows=(), regrets={}, workloads={}, out={}, versions={},
    devices=(), seconds=1.0,
)  # fmt: skip


def test_advice_on_a_plans_directory_answers_from_its_table(target):
    write_plan(target.plan, target.directory, models=as_only(load_bundled(SMALL)))
    found = measure_means(proven(target), on_gpus(Recorded(RECORDED)), seconds=1e-9)
    found.keep(target.directory)
    words = ["advise", str(target.directory), "--workload", "tensor-parallel-decode"]
    shown = tccl(*words).stdout
    assert "4 KiB to 64 KiB: one-shot" in shown and "vllm-project" not in shown
    means = json.loads(tccl(*words, "--json").stdout)["means"]
    assert means[0][0] == "By size"
    other = tccl("advise", SMALL, "--workload", "pipeline").stdout
    assert "`tccl verify DIR --means`" in other


@pytest.fixture
def verify(target, monkeypatch):
    """Runs `tccl verify --means` with recorded jobs."""
    write_plan(target.plan, target.directory, models=as_only(load_bundled(SMALL)))
    monkeypatch.setattr(plans, "check_torch", lambda: None)

    def run(us, *words):
        monkeypatch.setattr(plans, "LocalRunner", lambda server: Recorded(us))
        asked = ["verify", str(target.directory), "--means", "--backend", "host", *words]
        return tccl(*asked)

    return run


def test_the_table_is_shown_kept_and_printed_as_json(verify, target):
    shown = verify(RECORDED, "--sizes", "4K,64K", "--seconds", "1")
    assert shown.exit_code == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "all-reduce in a CUDA graph │ 4 KiB │ one-shot │ 5.4 │ 20.1" in words
    assert "send beside a GEMM" in words and "1.25x, 1.25x" in words
    assert "vllm cannot run: vllm is not installed" in words
    assert "DRY RUN" in words
    kept = MeansTable.load(target.directory)
    printed = json.loads(verify(RECORDED, "--sizes", "4K,64K", "--json").stdout)
    assert len(printed["rows"]) == len(kept.rows) == 9
    assert printed["out"] == kept.out


def test_default_nccl_that_hangs_or_is_wrong_is_a_no(verify):
    hangs = {**RECORDED, NCCL: "error: hangs: all-reduce of 4 KiB did not end in 20 s"}
    found = verify(hangs, "--sizes", "4K", "--json")
    assert found.exit_code == 1
    assert all("nccl" not in row["us"] for row in json.loads(found.stdout)["rows"])


@pytest.mark.parametrize("words", [["--tune"], ["--all"], ["--choice", "graph"], ["--sizes", "3"]])
def test_options_on_choices_of_nccl_are_refused_beside_means(verify, words):
    found = verify(RECORDED, *words)
    assert found.exit_code == 2
    assert "means" in found.stderr or "sizes" in found.stderr


MEASURED = json.loads((Path(__file__).parent / "cases/means/h200x2.json").read_text())


@pytest.mark.parametrize("links", ["nvlink", "nop2p"])
def test_two_runs_on_h200_decide_what_is_slower_than_default_nccl_in_neither(links):
    chosen, before = {}, {}
    for row in MEASURED[links]:
        kind = row["collective"], row["mode"], row["beside_gemm"]
        spread = {name: (min(of), max(of)) for name, of in row["us"].items()}
        middle = {name: sum(of) / 2 for name, of in row["us"].items()}
        best = before[kind] = best_means(middle, spread, before.get(kind, ""))
        chosen[(*kind, row["bytes"])] = best
        for number in (0, 1):
            us = {name: of[number] for name, of in row["us"].items()}
            assert us[best] <= us[NCCL]
            # Where processes differ by less than 3 %, so does the best from the choice.
            if all(high < 1.03 * low for low, high in spread.values()):
                assert us[best] <= 1.03 * min(us.values())
    expected = {
        "nvlink": {
            ("all_reduce", "graph", False, 65536): "one-shot",
            ("all_reduce", "graph", False, 16 * MIB): NCCL,
            ("send", "eager", False, 64 * MIB): "peer-copies",
        },
        "nop2p": {
            ("all_reduce", "graph", False, 4096): NCCL,
            ("send", "eager", False, 64 * MIB): "host-copies",
            ("send", "eager", True, 64 * MIB): "host-copies",
        },
    }
    assert expected[links].items() <= chosen.items()


def test_a_means_that_is_as_good_as_the_fastest_and_best_before_stays():
    spread = {NCCL: (20.0, 22.0), "a": (9.0, 12.0), "b": (10.0, 13.0), "c": (12.5, 14.0)}
    us = {name: sum(of) / 2 for name, of in spread.items()}
    assert [best_means(us, spread, before) for before in ("", "b", "c")] == ["a", "b", "a"]
    wide = {**spread, NCCL: (12.0, 30.0), "c": (12.0, 12.1)}
    assert best_means(us, wide, "") == NCCL
    assert best_means({"c": 13.0}, {"c": (12.5, 14.0)}, "") == "c"
