"""Jobs at once take turns: in one order, never two at a time, whatever their ranks' pace."""

import contextlib
import itertools
import multiprocessing
import random
import time

import pytest

from tccl_py.rank_processes.rank import JobSlot, time_slots, write_slots

COUNT = 4


def take(folder, seat, place, pause, log):
    """A rank that has COUNT turns, and notes when each began and ended."""
    turn = time_slots(folder / "slots", seat, place)
    for number in range(COUNT):
        with turn():
            begun = time.monotonic()
            time.sleep(random.Random(pause + number).uniform(0, 0.01))
            log.put((seat.number, place, number, begun, time.monotonic()))


def test_no_two_jobs_have_their_turn_at_once_and_ranks_of_one_have_theirs_together(tmp_path):
    jobs, ranks = 3, 2
    write_slots(tmp_path / "slots", jobs * ranks)
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    seats = [(JobSlot(number=job, jobs=jobs, ranks=ranks), rank) for job in range(jobs)
             for rank in range(ranks)]  # fmt: skip
    started = [
        context.Process(target=take, args=(tmp_path, seat, rank, 10 * pause, log))
        for pause, (seat, rank) in enumerate(random.Random(3).sample(seats, len(seats)))
    ]
    for one in started:
        one.start()
    rows = sorted(
        (log.get(timeout=60) for _ in range(jobs * ranks * COUNT)), key=lambda row: row[3]
    )
    for one in started:
        one.join(60)
    spans = {}
    for job, _, number, begun, ended in rows:
        first, last = spans.get((number, job), (begun, ended))
        spans[number, job] = min(first, begun), max(last, ended)
    order = sorted(spans, key=lambda key: spans[key][0])
    assert order == [(number, job) for number in range(COUNT) for job in range(jobs)]
    for one, other in itertools.pairwise(order):
        assert spans[one][1] <= spans[other][0]


def test_one_job_waits_for_nobody_and_has_no_file(tmp_path):
    for seat in (None, JobSlot(number=0, jobs=1, ranks=8)):
        assert time_slots(tmp_path / "none", seat, 0) is contextlib.nullcontext


def test_a_turn_that_fails_is_not_over(tmp_path):
    write_slots(tmp_path / "slots", 2)
    turn = time_slots(tmp_path / "slots", JobSlot(number=0, jobs=2, ranks=1), 0)
    with pytest.raises(KeyError), turn():
        raise KeyError
    assert (tmp_path / "slots").read_bytes() == bytes(16)
