"""`tccl overlap`: real transfers and products over gloo where there is torch, and arithmetic."""

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.cli.overlap import parse_sets
from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.jobs import Launcher, Outcome
from tccl_py.experiments.overlap import rows_of_sets, time_overlap
from tccl_py.experiments.spec import JobResult, RowTimes, Variant
from tccl_py.experiments.together import ThreadStopwatch, time_beside
from tccl_py.rank_processes.rank import Communicator
from tccl_py.report.tables import overlap_lines, span
from tests.processes import alive, children
from tests.skips import mark_needs
from tests.test_json_page import same_keys

needs_torch = mark_needs("torch")
LONG_S = 100
"""Bounds what never comes; whatever does come may take its time on a busy machine."""
REPOSITORY = Path(__file__).resolve().parents[1]


def tccl(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def sets_of(*pairs, messages=2, copies=False):
    return rows_of_sets(
        [pairs], copies=copies, message_bytes=1024, messages=messages, repeats=3
    )  # fmt: skip


def outcome_of(rows, *ranks):
    """A job of these rows: the times of each set on each rank, alone and at once."""
    results = tuple(
        JobResult(rank=rank, torch="2", times=tuple(map(times_of, rows, sets)))
        for rank, sets in enumerate(ranks)
    )
    return Outcome(results=results, log="")


def times_of(row, times):
    variants = (Variant(seconds=alone, beside=at_once) for alone, at_once in times)
    return RowTimes(row=row, variants=tuple(variants))


@needs_torch
def test_transfers_and_products_are_timed_for_real_over_gloo():
    words = ("--backend", "gloo", "--size", 1, "--messages", 2, "--repeats", 6, "--ranks", 3)
    result = tccl("overlap", *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert same_keys("overlap", found)
    assert (found["gpus"], found["message_bytes"], found["backend"]) == ([0, 1, 2], 2**20, "gloo")
    kinds = {(row["by"], row["mode"]) for row in found["pairs"]}
    assert kinds == {
        (by, mode) for by in ("gloo", "memcpy") for mode in ("sequential", "concurrent")
    }
    assert ["G1->G0", "G2->G0"] in [row["set"] for row in found["pairs"]]
    for row in found["pairs"]:
        for one in (*row["message"], row["total"]):
            assert 0 < one["low_ms"] <= one["median_ms"] <= one["high_ms"]
    transfers = [(row["by"], row["transfer"], row["mode"]) for row in found["products"]]
    assert ("gloo", "all-reduce", "concurrent") in transfers
    assert ("gloo", "G0->G1", "sequential") in transfers
    assert ("memcpy", "G0->G1", "concurrent") in transfers
    for row in found["products"]:
        assert row["total"]["median_ms"] >= row["product_time"]["low_ms"]
        assert row["product_time"]["median_ms"] > 0


def test_the_table_shows_sets_modes_and_intervals(monkeypatch):
    times = ((1e-3,), (1.5e-3,)), ((2e-3,), (2.5e-3,))
    outcome = outcome_of(sets_of((1, 0)), (times[1:], times, times))
    found = dict.fromkeys(("gloo", "memcpy"), outcome)
    monkeypatch.setattr("tccl_py.cli.overlap.time_overlap", lambda *_, **__: found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    result = tccl("overlap", "G1->G0", "--backend", "gloo", "--messages", 1)
    assert result.exit_code == 0, result.output
    for text in ("G1->G0", "sequential", "concurrent", "memcpy", "all-reduce", "95 % interval"):
        assert text in result.stdout
    assert "2.50 (2.50 to 2.50)" in result.stdout
    assert result.stdout.startswith("1 message of 64 MiB") and "GEMM's time" in result.stdout


@needs_torch
def test_nothing_is_left_when_the_command_is_killed():
    words = ["overlap", "--backend", "gloo", "--size", "16", "--repeats", "1000"]
    command = [sys.executable, "-m", "tccl_py.cli.main", *words]
    running = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    ranks = []
    until = time.monotonic() + LONG_S
    while len(ranks) < 2 and time.monotonic() < until:
        time.sleep(0.1)
        ranks = [rank for server in children(running.pid) for rank in children(server)]
    running.send_signal(signal.SIGKILL)
    running.wait()
    until = time.monotonic() + LONG_S
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(ranks) == 2
    assert not any(map(alive, ranks))


def test_pieces_of_work_run_at_the_same_time():
    # Each waits for the other: run one after the other, they would never meet.
    meeting = threading.Barrier(2)
    first, second = lambda: meeting.wait(LONG_S), lambda: (meeting.wait(LONG_S), time.sleep(0.1))
    times = ThreadStopwatch().together([first, second])
    assert times[0] > 0
    assert times[1] >= 0.1


def test_an_error_in_a_piece_of_work_is_not_lost():
    with pytest.raises(ZeroDivisionError):
        ThreadStopwatch().together([lambda: 1 / 0, lambda: None])


def test_gemms_beside_a_copy_run_on_its_gpu_and_counts_are_agreed_on_the_ranks_own(monkeypatch):
    torch, busy, multiply = MagicMock(), [], MagicMock()
    torch.device = lambda kind, index: SimpleNamespace(type=kind, index=index)
    torch.cuda.Event().elapsed_time.return_value = 1.0
    torch.tensor().tolist.return_value = [3.0]
    torch.full().__eq__ = lambda *_: MagicMock()  # all bytes are right
    made = "tccl_py.experiments.together.gemms"
    monkeypatch.setattr(made, lambda on, _: busy.append(on.device.index) or multiply)
    own = Communicator(
        torch=torch, dist=MagicMock(), rank=0, members=(0,), device=torch.device("cuda", 0)
    )
    *_, beside_gemm = sets_of((2, 3), copies=True)
    times = time_beside(own, beside_gemm, beside_gemm.contest)
    assert ([len(row.beside) for row in times.variants], times.fault) == ([3, 3], "")
    # torch refuses a collective on another device than the process group's.
    assert (busy, torch.tensor.call_args.kwargs["device"].index) == ([2], 0)


def test_few_samples_give_all_they_have():
    found = span([3e-3, 1e-3])
    assert (found.low, found.middle, found.high) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("mode", "total"), [("sequential", 30.0), ("concurrent", 20.0)])
def test_the_receivers_times_count_and_totals_follow_from_them(mode, total):
    (sets, *_) = sets_of((0, 1), (1, 0))
    none, long, short = ((), ()), ((0.02, 0.02),) * 2, ((0.01, 0.01),) * 2
    outcome = outcome_of([sets], [(none, long)], [(short, none)])
    lines = overlap_lines("nccl", outcome, (4, 6), messages=2)
    (row,) = (line for line in lines if line["mode"] == mode)
    assert row["set"] == ["G4->G6", "G6->G4"]
    assert [one.middle for one in row["message"]] == [5.0, 10.0]
    assert row["total"].middle == total


def test_of_a_product_the_slowest_rank_of_the_transfer_counts():
    def times(product, *transfer):
        return (transfer, transfer), (product, product)

    all_reduce = times((0.006,), 0.007)
    transfers = times((0.002,)), times((0.003,), 0.005), times(())
    outcome = outcome_of(sets_of((0, 1))[1:], *([one, all_reduce] for one in transfers))
    _, row, other, _ = overlap_lines("nccl", outcome, (0, 1, 2), messages=2)
    assert (row["transfer_time"].middle, row["product_time"].middle) == (5.0, 3.0)
    assert row["total"].middle == 5.0
    assert other["transfer"] == "all-reduce"
    assert other["total"].middle == pytest.approx(13.0)


@needs_torch
def test_wrong_bytes_make_the_times_void(monkeypatch):
    monkeypatch.setenv("NCCL_TEST_WRONG", "batch_isend_irecv")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    spoilt = partial(Launcher, program="tests.wrong_ranks")
    monkeypatch.setattr("tccl_py.experiments.overlap.Launcher", spoilt)
    counts = {"message_bytes": 1024, "messages": 1, "repeats": 1}
    with pytest.raises(MeasurementError, match=r"by gloo: gave rank 1 wrong bytes"):
        time_overlap("gloo", (0, 1), (((0, 1),),), timeout=60.0, **counts)


def test_sets_are_written_with_the_gpus_of_the_job():
    sets = parse_sets(["G2->G5 G5->G7"], (2, 5, 7))
    assert sets == (((0, 1), (1, 2)),)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has 0 pairs"),
        ("0<1", "has '0<1'"),
        ("G0->G9", "names GPU 9"),
        ("G1->G1", "G1 sends to itself"),
        (" ".join(["G0->G1"] * 9), "has 9 pairs"),
    ],
)
def test_odd_sets_are_refused(text, what):
    with pytest.raises(InputError) as caught:
        parse_sets([text], (0, 1))
    assert caught.value.what == what


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--backend", "mpi"], "tccl: --backend 'mpi': is not known; one of nccl, gloo"),
        (["--backend", "gloo", "--ranks", "1"], "tccl: --ranks: is 1; 2 to 16"),
        (["--backend", "gloo", "--gpus", "0"], "--gpus: is for nccl"),
        (["--ranks", "2"], "--ranks: is for gloo"),
        (["--backend", "gloo", "--size", "0"], "tccl: --size: is 0; 1 to 4096"),
        (["--backend", "gloo", "--repeats", "0"], "tccl: --repeats: is 0; 1 to 1000"),
        (["--backend", "gloo", "--timeout", "nan"], "tccl: --timeout: is nan; 1 to 86400"),
        (
            ["G0-", "--backend", "gloo"],
            "set 'G0-': ends with -",
        ),
        (["G0->G7", "--backend", "gloo"], "tccl: set 'G0->G7': names GPU 7; the job has 0, 1"),
    ],
)
def test_wrong_use_is_one_sentence(words, sentence):
    result = tccl("overlap", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_gpus_it_says_how_to_rehearse(monkeypatch):
    def none_here():
        raise InputError("this machine", "no NVIDIA driver answers", "add --simulate MACHINE")

    monkeypatch.setattr("tccl_py.cli.overlap.measured_machine", none_here)
    result = tccl("overlap")
    assert result.exit_code == 2
    sentence = "tccl: this machine: no NVIDIA driver answers; add --backend gloo for a dry run"
    assert result.stderr.startswith(sentence)


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = tccl("overlap", "--backend", "gloo")
    assert result.exit_code == 2
    assert result.stderr.strip() == "tccl: tccl overlap: needs torch; `pip install torch`"


def test_no_other_module_opens_torch():
    command = "import sys, tccl_py.cli.overlap; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
