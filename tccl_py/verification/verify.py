"""Verification of a plan: checks, pairs of jobs, what NCCL logged, and what it all comes to."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import msgspec

from tccl_py.plan.plan import Plan
from tccl_py.verification.comparison import overall
from tccl_py.verification.jobs import Outcome
from tccl_py.verification.orders import Order, bus_gbps, large_gbps
from tccl_py.verification.pairs import (
    Effort,
    Pairs,
    PlanJobError,
    Watcher,
    job_seconds,
    run_alone,
    run_pairs,
    training_seconds,
)
from tccl_py.verification.record import SizeResult, Training, Verification
from tccl_py.verification.rings import RingsFound
from tccl_py.verification.sides import AnyPlace
from tccl_py.verification.subjects import Subject, machine_subject


def run_verification(
    plan: Plan,
    directory: Path,
    place: AnyPlace,
    effort: Effort,
    *,
    watch: Watcher = lambda _: None,
) -> Verification:
    """Run real collectives with the plan of one machine and without; as `verify_subject`."""
    return verify_subject(machine_subject(plan, directory), place, effort, watch=watch)


def verify_subject(
    subject: Subject,
    place: AnyPlace,
    effort: Effort,
    *,
    watch: Watcher = lambda _: None,
) -> Verification:
    """Run real collectives with a plan and without.

    Raises:
        InputError: the plan's files are not all there.
        JobError: stock's job failed: then nothing can be said here.
    """
    begun = time.monotonic()
    side = subject.side
    first = Order(backend="host", world=0, checks=effort.checks)
    watch("checking values" if effort.checks else "starting")
    unknown = _begun(subject, place, effort)
    try:
        checked = run_alone(place, side, first)
        pairs = run_pairs(place, side, subject.stock, effort, begun=begun, watch=watch)
    except PlanJobError as error:
        # If stock fails as well, that is no fault of the plan.
        place.run([subject.stock], first)
        seconds = time.monotonic() - begun
        return msgspec.structs.replace(unknown, failure=str(error), seconds=seconds)
    rings = _rings(subject, place, checked)
    if rings is not None:
        # A log that differs from job to job would not be the plan's.
        found = [_rings(subject, place, one) for one in pairs.plan]
        # Without checks the first job moves nothing, and NCCL connects nothing in it.
        all_ = [rings] * effort.checks + [one for one in found if one is not None]
        rings = next((one for one in all_ if not one.same), all_[0] if all_ else rings)
    wrong = [one for answer in checked.answers for one in answer.wrong]
    sizes, training = _sizes(effort, pairs, subject.world), _training(effort, pairs)
    return msgspec.structs.replace(
        unknown,
        verdict=overall([one.verdict for one in sizes]),
        plan_gbps=large_gbps([(one.bytes, one.plan_gbps) for one in sizes]),
        stock_gbps=large_gbps([(one.bytes, one.stock_gbps) for one in sizes]),
        sizes=sizes,
        checked=sum(answer.checked for answer in checked.answers),
        wrong=tuple(wrong),
        left_out=checked.answers[0].left_out,
        rings=rings,
        versions={"torch": checked.answers[0].torch, "nccl": checked.answers[0].nccl},
        devices=tuple(answer.device for answer in checked.answers),
        order=pairs.order,
        at_once=pairs.at_once,
        raw=_raw(pairs),
        seconds=time.monotonic() - begun,
        training=training,
    )


def _rings(subject: Subject, place: AnyPlace, outcome: Outcome) -> RingsFound | None:
    if place.backend != "cuda":
        return None
    return subject.find_rings(outcome.log, place.variables(subject.side))


def _sizes(effort: Effort, pairs: Pairs, world: int) -> tuple[SizeResult, ...]:
    found = []
    for index, size in enumerate(effort.sizes):
        ours = tuple(job_seconds(one, index) for one in pairs.plan)
        theirs = tuple(job_seconds(one, index) for one in pairs.stock)
        rates = [
            bus_gbps(effort.collective, world, size, statistics.median(side))
            for side in (ours, theirs)
        ]
        compared = pairs.compared[index]
        found.append(
            SizeResult(
                bytes=size,
                plan_seconds=ours,
                stock_seconds=theirs,
                plan_gbps=rates[0],
                stock_gbps=rates[1],
                compared=compared,
                verdict=compared.verdict,
            )
        )
    return tuple(found)


def _training(effort: Effort, pairs: Pairs) -> tuple[Training, ...]:
    if not effort.training:
        return ()
    modes = list(pairs.plan[0].answers[0].training)
    rest = pairs.compared[len(effort.sizes) :]
    return tuple(
        Training(
            mode=mode,
            plan_seconds=tuple(training_seconds(one, mode) for one in pairs.plan),
            stock_seconds=tuple(training_seconds(one, mode) for one in pairs.stock),
            compared=compared,
            verdict=compared.verdict,
        )
        for mode, compared in zip(modes, rest, strict=True)
    )


def _raw(pairs: Pairs) -> tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]:
    """Of each job in the order they ran: by size, rank and batch."""
    sides = {"A": iter(pairs.plan), "B": iter(pairs.stock)}
    jobs = [next(sides[letter]) for letter in pairs.order]
    return tuple(
        tuple(zip(*(answer.timings for answer in job.answers), strict=True)) for job in jobs
    )


def _begun(subject: Subject, place: AnyPlace, effort: Effort) -> Verification:
    """What is known before anything ran."""
    return Verification(
        machine=subject.name,
        gpus=subject.gpus,
        hosts=subject.hosts,
        backend=place.backend,
        verdict=None,
        plan_gbps=None,
        stock_gbps=None,
        predicted_gbps=subject.predicted_gbps,
        simulated=subject.simulated,
        assumed=subject.assumed,
        tuned=subject.tuned,
        collective=effort.collective,
        sizes=(),
        checked=0,
        wrong=(),
        left_out=(),
        rings=None,
        settings=subject.settings,
        plan_environment=place.variables(subject.side),
        stock_environment=place.variables(subject.stock),
        versions={},
        devices=(),
        order="",
        raw=(),
        seconds=0.0,
    )
