"""Verification of a plan: checks, interleaved rounds of its arms, NCCL's log, and the winner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec

from tccl_py.verify.arms import AnyPlace, Arm, Jobs
from tccl_py.verify.comparison import EQUAL
from tccl_py.verify.jobs import JobError, Outcome
from tccl_py.verify.orders import Groups, Order, Timed, bus_gbps, groups_of, large_gbps
from tccl_py.verify.record import ArmResult, Row, Verification, winner
from tccl_py.verify.rings import RingsFound
from tccl_py.verify.rounds import Effort, Rounds, Watcher, row_seconds, run_rounds
from tccl_py.verify.subjects import Subject


def verify_subject(
    subject: Subject,
    place: AnyPlace,
    effort: Effort,
    *,
    watch: Watcher = lambda _: None,
) -> Verification:
    """Run real collectives in every arm of a plan.

    Raises:
        InputError: the plan's files are not all there.
        JobError: a job of default NCCL failed: then nothing can be said here.
    """
    begun = time.monotonic()
    # 1. Check values, where every arm may fail.
    watch("checking values" if effort.checks else "starting")
    first = Order(backend="host", world=0, checks=effort.checks)
    names = [arm.name for arm in subject.arms]
    checked = dict(zip(names, Jobs(place, ()).run(subject.arms, first), strict=True))
    baseline = checked["default"]
    if isinstance(baseline, JobError):
        raise baseline
    failures = {name: str(one) for name, one in checked.items() if isinstance(one, JobError)}
    # 2. Time the arms that ran. Variables hold for smaller communicators of a process as well.
    running = [arm for arm in subject.arms if arm.name not in failures]
    with_groups = any(arm.name == "variables" for arm in running)
    order = effort.order(groups_of(subject.world) if with_groups else ())
    rounds = run_rounds(place, running, effort, order, begun=begun, watch=watch)
    failures |= rounds.failures
    # 3. Judge each arm, and find the winner.
    found: list[ArmResult] = []
    for arm in subject.arms:
        result = ArmResult(
            name=arm.name,
            settings=arm.settings,
            environment=place.variables(arm),
            predicted_gbps=arm.predicted_gbps,
            failure=failures.get(arm.name, ""),
        )
        outcome = checked[arm.name]
        if arm.name in rounds.outcomes and isinstance(outcome, Outcome):
            logs = [outcome, *rounds.outcomes[arm.name]]
            result = msgspec.structs.replace(
                result,
                rows=_rows(subject, order, rounds, arm),
                checked=sum(answer.checked for answer in outcome.answers),
                wrong=tuple(one for answer in outcome.answers for one in answer.wrong),
                rings=_rings(subject, place, arm, logs, checks=effort.checks),
            )
            result = msgspec.structs.replace(
                result,
                gbps=large_gbps([(one.bytes, one.gbps) for one in result.sizes]),
                large=result.over(found[0]) if found else EQUAL,
            )
        found.append(result)
    letters = dict(zip(names, "ABC", strict=False))
    return Verification(
        machine=subject.name,
        gpus=subject.gpus,
        hosts=subject.hosts,
        backend=place.backend,
        arms=tuple(found),
        recommended=subject.recommended,
        chosen=subject.chosen,
        winner=winner(found),
        simulated=subject.simulated,
        assumed=subject.assumed,
        tuned=subject.tuned,
        collective=effort.collective,
        left_out=baseline.answers[0].left_out,
        versions={"torch": baseline.answers[0].torch, "nccl": baseline.answers[0].nccl},
        devices=tuple(answer.device for answer in baseline.answers),
        order="".join(letters[name] for name in rounds.order),
        at_once=rounds.at_once,
        raw=_raw(rounds),
        seconds=time.monotonic() - begun,
    )


def _rings(
    subject: Subject, place: AnyPlace, arm: Arm, outcomes: Sequence[Outcome], *, checks: bool
) -> RingsFound | None:
    """Compare NCCL's logs under a graph file with the plan; return the first that differs."""
    if place.backend != "cuda" or arm.name != "graph":
        return None
    # Without checks the first job moves nothing, and NCCL connects nothing in it.
    logs = outcomes if checks or len(outcomes) == 1 else outcomes[1:]
    found = [subject.find_rings(one.log, place.variables(arm)) for one in logs]
    return next((one for one in found if not one.same), found[0])


def _rows(subject: Subject, order: Order, rounds: Rounds, arm: Arm) -> tuple[Row, ...]:
    rows = []
    for timed, seconds in row_seconds(order, rounds.outcomes[arm.name]).items():
        compared = rounds.compared.get((arm.name, timed), EQUAL)
        ranks = len(timed.groups[0]) if timed.groups else subject.world
        middle = statistics.median(seconds)
        row = Row(
            bytes=timed.bytes,
            groups=_gpus(subject, timed),
            mode=timed.mode,
            seconds=seconds,
            gbps=bus_gbps(order.collective, ranks, timed.bytes, middle),
            compared=compared,
            verdict=compared.verdict,
        )
        rows.append(row)
    return tuple(rows)


def _gpus(subject: Subject, timed: Timed) -> Groups:
    return tuple(tuple(subject.gpus[rank] for rank in one) for one in timed.groups)


def _raw(rounds: Rounds) -> tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]:
    """Return the timings of each job, in the order they ran: by row, rank and batch."""
    jobs = {name: iter(outcomes) for name, outcomes in rounds.outcomes.items()}
    return tuple(
        tuple(zip(*(answer.timings for answer in next(jobs[name]).answers), strict=True))
        for name in rounds.order
    )
