"""The preflight: checked collectives against the plan's verification, and collapsing writes."""

import pytest

from tccl_py.errors import MeasurementError
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.nccl_tests import NO_TORCH
from tccl_py.experiments.preflight import check_collectives
from tccl_py.experiments.spec import MIB, WrongValue
from tccl_py.experiments.target import read_target
from tccl_py.explanation.paths import collapse_patterns
from tccl_py.model.transfer import parse_set
from tccl_py.plan.directory import write_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.planned import SMALL, WRX, as_only, plan_of
from tests.verified import FakeJobs, changed, dry_run, run_verification

BUDGET = RunBudget(rounds=6, sizes=(MIB, 64 * MIB, 256 * MIB), seconds=0)


class Host:
    """A plan and its verification by jobs of a formula."""

    def __init__(self, plan, directory):
        self.plan, self.directory = plan, directory
        self.verified = run_verification(plan, directory, dry_run(plan, jobs()), BUDGET)

    def checked(self, jobs, *, verified=True):
        launcher = dry_run(self.plan, jobs)
        known = self.verified if verified else None
        return check_collectives(read_target(self.plan, self.directory), launcher, known)


def jobs(factor=lambda number: 1.0, **more):
    """Jobs whose number-th takes `factor(number)` times as long."""
    fake = FakeJobs(lambda size, _: factor(len(fake.jobs)) * (1e-4 + size / 1e10), **more)
    return fake


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    made, directory = plan_of(SMALL), tmp_path_factory.mktemp("plan")
    write_plan(made, directory, models=as_only(load_bundled(SMALL)))
    return Host(made, directory)


def test_a_healthy_machine_passes_with_what_it_achieved_as_the_expectation(host):
    found = host.checked(jobs(seed=5))
    assert (found.problems, found.checked) == ((), 4 * 60)
    assert [row.bytes for row in found.rates] == [64 * MIB, 256 * MIB]
    for row in found.rates:
        assert row not in found.slower
        assert row.gbps == pytest.approx(row.expected_gbps, rel=0.03)


def test_slower_collectives_are_told_only_if_a_second_job_confirms_them(host):
    once = host.checked(jobs(lambda number: 1.2 if number == 1 else 1.0, seed=5))
    always = host.checked(jobs(lambda number: 1.2, seed=5))
    faster = host.checked(jobs(lambda number: 0.8, seed=5))
    assert not (once.slower or faster.slower)
    assert always.slower == list(always.rates)
    assert [problem.what for problem in always.problems] == [
        "bandwidth of all_reduce of 64 MiB",
        "bandwidth of all_reduce of 256 MiB",
    ]


def test_a_plan_that_was_not_verified_has_no_expected_bandwidth(host):
    found = host.checked(jobs(lambda number: 9.0), verified=False)
    assert found.ok
    assert {row.expected_gbps for row in found.rates} == {None}


def test_a_second_job_that_hangs_is_a_finding_as_well(host):
    class Hanging(FakeJobs):
        def run(self, tasks):
            if self.jobs:
                raise MeasurementError("rank 0 did not end in 5 s")
            return super().run(tasks)

    found = host.checked(Hanging(lambda size, _: 1.5 * (1e-4 + size / 1e10)))
    assert not found.ok


def test_bandwidths_of_another_program_are_no_expectation(host):
    launcher = dry_run(host.plan, jobs(lambda number: 9.0))
    target = read_target(host.plan, host.directory)
    verified = changed(host.verified, versions={"torch": f"{NO_TORCH}, but all_reduce_perf"})
    found = check_collectives(target, launcher, verified)
    assert {row.expected_gbps for row in found.rates} == {None}


def test_sizes_that_take_too_long_for_a_preflight_are_left_out(host):
    slow = jobs(lambda number: 8.0)  # 256 MiB then take 0.2 s
    verified = run_verification(host.plan, host.directory, dry_run(host.plan, slow), BUDGET)
    launcher = dry_run(host.plan, jobs(lambda number: 8.0, seed=3))
    found = check_collectives(read_target(host.plan, host.directory), launcher, verified)
    assert [row.bytes for row in found.rates] == [64 * MIB]


def test_wrong_values_name_the_gpu_that_has_them(host):
    wrong = tuple(
        WrongValue(case=f"all-reduce, float32 x {n}", rank=2, what="9 of 9") for n in (1, 3)
    )
    found = host.checked(WrongJobs(wrong))
    (problem,) = found.problems
    assert (problem.where, problem.measured) == ("GPU 2", "2 wrong results")
    assert not found.ok


class WrongJobs(FakeJobs):
    """Jobs in which the last rank has wrong values."""

    def __init__(self, wrong):
        super().__init__(lambda size, _: 1e-4 + size / 1e10, wrong=wrong)

    def _is_wrong(self, spec, environment, rank):
        return spec.checks and rank == spec.world - 1


def test_a_job_that_fails_is_a_finding_and_no_error(host):
    class Failing(FakeJobs):
        def run(self, tasks):
            raise MeasurementError("rank 3 did not end in 30 s")

    found = host.checked(Failing(lambda *_: 1.0))
    (problem,) = found.problems
    assert "rank 3" in problem.where
    assert not found.ok


def test_of_two_hundred_healthy_machines_hardly_one_fails(host):
    failed = sum(bool(host.checked(jobs(seed=seed, noise=0.02)).slower) for seed in range(200))
    assert failed <= 1


# Writes that collapse


def test_each_uplink_has_writes_to_several_root_ports_which_collapse_on_machines_known_for_it():
    made, source = plan_of(WRX), Simulator(load_bundled(WRX))
    patterns = list(collapse_patterns(made, ()))
    assert len(patterns) == 4
    for pattern in patterns:
        assert len({flow.source.index // 4 for flow in pattern.flows}) == 1
        assert len({flow.destination.index // 4 for flow in pattern.flows}) == 2
        both, *each = source.measure([pattern, *(parse_set(str(flow)) for flow in pattern.flows)])
        assert both.rate_gbps < 0.75 * min(one.rate_gbps for one in each)


def test_a_measured_pattern_is_taken_before_a_new_one():
    near = parse_set("G0->G0->G1{blocks=16} G1->G1->G4{blocks=16}")
    known = parse_set("G0->G0->G4{blocks=16} G1->G1->G8{blocks=16} G5->G5->G2{blocks=16}")
    assert next(collapse_patterns(plan_of(WRX), [near, known])) == known


@pytest.mark.parametrize("name", [SMALL, "intel-v100"])
def test_machines_without_shared_uplinks_have_no_patterns(name):
    assert list(collapse_patterns(plan_of(name), ())) == []
