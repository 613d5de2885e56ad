"""Tuning by message size: what halving keeps, which entries stay, and the ranges they get."""

import ctypes
import functools
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.jobs import HostRanks, Launcher
from tccl_py.experiments.rank import FINALISTS, Tuner, all_choices, halve
from tccl_py.experiments.sizes import (
    LEAST_GAIN,
    confirm,
    contests_again,
    entries,
    load_sizes,
    predict,
    tune_by_size,
    with_spots,
)
from tccl_py.experiments.spec import (
    FINAL_ROUNDS,
    KIB,
    MIB,
    JobResult,
    JobSpec,
    Row,
    RowTimes,
    TunerChoice,
    Variant,
)
from tccl_py.experiments.target import read_target
from tccl_py.files import decode_json, encode_json
from tccl_py.model.symmetry import automorphisms, images_of_gpus
from tccl_py.nccl.tuner import (
    ALGORITHMS,
    PROTOCOLS,
    TunerTable,
    channels_kept_busy,
    check_tables,
)
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.results import load_tuning
from tccl_py.plan.staging import check_files
from tccl_py.rank_processes.tasks import RankOutput
from tccl_py.report.page import read_contents, report_html
from tccl_py.workloads.workload import Workload, WorkloadRow
from tests.commands import tccl
from tests.planned import SMALL, plan_of, replace_plan
from tests.plugin.runs import plugin_library
from tests.report_pages import Page

SIZES = tuple(KIB << shift for shift in range(4, 10))


@pytest.fixture(autouse=True)
def _plugin_built_once(monkeypatch):
    """Each tuning would compile it anew for itself."""
    monkeypatch.setattr("tccl_py.experiments.sizes.plugin_library", lambda _: plugin_library())


def row(size, dtype="bfloat16", collective="all_reduce"):
    return Row(collective=collective, dtype=dtype, bytes=size)


def contest_times(one, choices, seconds, besides, *, final=0):
    variants = tuple(
        Variant(choice=choice, seconds=tuple(times), beside=tuple(beside))
        for choice, times, beside in zip(choices, seconds, besides, strict=True)
    )
    return RowTimes(row=one, variants=variants, final=final)


class Truth:
    """A machine: seconds are `base` over a ratio for each row and choice, with noise.

    A job's choices have factors of their own beside the noise of each round.
    """

    def __init__(self, ratio, *, seed, noise=0.02, job=0.005, channels=8, beside=None):
        self.ratio, self.channels, self.beside = ratio, channels, beside
        self._noise, self._job = noise, job
        self._random = np.random.default_rng(seed)

    def contest(self, one, choices=None, rounds=FINAL_ROUNDS, *, free=False):
        chosen = all_choices(one, self.channels) if choices is None else choices
        ratios = [1.0, *(1.0 if free else self.ratio(one, choice) for choice in chosen)]
        jobs = np.exp(self._random.normal(0, self._job, len(ratios)))

        def measure(orders):
            return [
                [
                    float(1e-4 / ratios[at] * jobs[at] * math.exp(noise))
                    for at, noise in zip(
                        order, self._random.normal(0, self._noise, len(order)), strict=True
                    )
                ]
                for order in orders
            ]

        seconds = halve(len(chosen), measure, rounds=rounds)
        besides = [()] * len(seconds)
        if self.beside is not None:
            shares = [1.0, *(self.beside(one, choice) for choice in chosen)]
            besides = [
                tuple(
                    float(1e-3 / share * math.exp(x))
                    for x in self._random.normal(0, self._noise / 4, 12)
                )
                if len(times) == len(seconds[0])
                else ()
                for share, times in zip(shares, seconds, strict=True)
            ]
        return contest_times(one, (None, *chosen), seconds, besides, final=rounds)

    def contested(self, one, *, free=False):
        """The times of a row of a job."""
        return self.contest(one.plain, one.contest.choices, one.contest.rounds, free=free)

    def tuned(self, sizes=SIZES, jobs=8):
        """The rows and entries that a sweep and fresh jobs come to."""
        sweep = [self.contest(row(size)) for size in sizes]
        again = [[self.contested(one) for one in contests_again(sweep)] for _ in range(12)]
        predicted = with_spots(predict(sweep, again))
        fresh = [
            [
                self.contest(one.plain, () if one.choice is None else (one.choice,), rounds=5)
                for one in predicted
            ]
            for _ in range(jobs)
        ]
        rows = confirm(predicted, {"default": fresh}, plan="default")
        return rows, entries(rows, sweep)


def covering(found, size):
    return [entry for entry in found if entry.from_bytes <= size <= entry.to_bytes]


def wanted(algorithm, protocol, channels):
    return TunerChoice(algorithm=algorithm, protocol=protocol, channels=channels)


@given(st.lists(st.floats(1.0, 9.0), min_size=1, max_size=40, unique=True))
def test_halving_times_the_fastest_choice_in_every_round_and_each_round_in_another_order(seconds):
    asked = []

    def measure(orders):
        asked.extend(orders)
        return [[0.5 if at == 0 else seconds[at - 1] for at in order] for order in orders]

    times = halve(len(seconds), measure)
    complete = [at for at, values in enumerate(times) if len(values) == len(times[0])]
    assert len(times[0]) >= FINAL_ROUNDS
    assert 0 in complete
    assert 1 + seconds.index(min(seconds)) in complete
    assert len(complete) <= 1 + FINALISTS
    assert all(0 in order for order in asked)
    assert len({order[0] for order in asked}) > 1 or len(asked) == 1
    assert sum(map(len, asked)) == sum(map(len, times))


def test_no_choice_has_more_channels_than_the_communicator():
    for channels in (1, 2, 12, 24, 32):
        for size in (KIB, 128 * KIB, 1 << 30):
            counts = {one.channels for one in all_choices(row(size), channels)}
            assert max(counts) <= channels
            assert min(counts) >= 1


def test_no_channels_are_tried_above_nccls_own_number_where_a_tuner_can_only_lower_it():
    for size, channels in itertools.product((KIB, 64 * KIB, MIB, 1 << 28), (1, 12, 32)):
        most = functools.partial(channels_kept_busy, channels=channels, ranks=4)
        tried = all_choices(row(size), channels, most)
        free = all_choices(row(size), channels)
        assert {(one.algorithm, one.protocol) for one in tried} == {
            (one.algorithm, one.protocol) for one in free
        }
        assert all(one.channels <= most(one.algorithm, one.protocol, size) for one in tried)
        assert {one for one in tried if one.channels} <= set(free)
    most = functools.partial(channels_kept_busy, channels=32, ranks=4)
    tried = all_choices(row(64 * KIB), 32, most)
    assert max(one.channels for one in tried if one.algorithm == "ring") == 8
    assert (
        max(one.channels for one in tried if (one.algorithm, one.protocol) == ("ring", "ll")) == 4
    )


def test_only_all_reduce_has_trees():
    assert {one.algorithm for one in all_choices(row(64 * KIB), 8)} == {"ring", "tree"}
    gather = row(64 * KIB, collective="all_gather")
    assert {one.algorithm for one in all_choices(gather, 8)} == {"ring"}


def test_gains_of_ten_percent_are_found_and_adjacent_sizes_share_an_entry():
    best = wanted("ring", "ll", 8)

    def ratio(one, choice):
        if choice == best and 64 * KIB <= one.bytes <= 256 * KIB:
            return 1.10
        return 0.9

    missed = 0
    for seed in range(20):
        rows, found = Truth(ratio, seed=seed).tuned()
        sizes = [size for size in SIZES if covering(found, size)]
        missed += sum(size not in sizes for size in (64 * KIB, 128 * KIB, 256 * KIB))
        assert set(sizes) <= {64 * KIB, 128 * KIB, 256 * KIB}
        assert all(entry.channels == 8 and entry.protocol == "ll" for entry in found)
        assert all(one.right for one in rows if one.dtype == "bfloat16") or missed
    assert missed <= 1


def test_an_entry_ends_at_its_size_where_the_choice_is_slower_at_the_next_one_and_half_way_else():
    best = wanted("tree", "ll", 4)
    ratios = {32 * KIB: 0.7, 64 * KIB: 1.2, 128 * KIB: 1.0}
    truth = Truth(
        lambda one, choice: ratios.get(one.bytes, 0.5) if choice == best else 0.6,
        seed=1,
        noise=0.002,
    )
    _, (entry,) = truth.tuned()
    assert entry.from_bytes == 64 * KIB
    assert entry.to_bytes == math.isqrt(64 * KIB * 128 * KIB)


def test_of_machines_without_a_gain_at_most_one_in_a_hundred_tables_harms():
    harmed = 0
    for seed in range(500):
        random = np.random.default_rng(seed)
        ratios = {}

        def ratio(one, choice, ratios=ratios, random=random):
            return ratios.setdefault((one.bytes, choice), min(1.0, random.uniform(0.9, 1.05)))

        _, found = Truth(ratio, seed=seed, channels=2).tuned(sizes=SIZES[:2], jobs=6)
        harmed += any(
            ratios[size, wanted(entry.algorithm, entry.protocol, entry.channels)] < 1
            for size in SIZES[:2]
            for entry in covering(found, size)
        )
    assert harmed <= 5


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_tables_fit_whatever_the_truth_and_cover_no_size_that_fresh_jobs_did_not_confirm(seed):
    random = np.random.default_rng(seed)
    ratios = {}

    def ratio(one, choice):
        return ratios.setdefault((one.bytes, choice), random.uniform(0.8, 1.3))

    rows, found = Truth(ratio, seed=seed, channels=4).tuned(jobs=6)
    table = TunerTable(gpus=(0, 1), measured_on=(0, 1), entries=found)
    check_tables([table], (0, 1), where="table")
    for one in rows:
        if one.dtype == "bfloat16":
            over = covering(found, one.bytes)
            assert len(over) == one.kept
            assert not one.kept or (one.fresh.low > 1 and one.fresh.middle >= LEAST_GAIN)


def test_an_entry_that_slows_the_other_dtype_does_not_stay():
    best = wanted("ring", "simple", 8)

    def ratio(one, choice):
        return (1.3 if one.dtype == "bfloat16" else 0.9) if choice == best else 0.8

    rows, found = Truth(ratio, seed=3).tuned()
    assert any(one.gained for one in rows)
    assert found == ()


def test_multiplications_choose_between_choices_that_differ_in_channels_alone():
    few, many = wanted("ring", "ll", 2), wanted("ring", "ll", 8)

    def ratio(one, choice):
        return {few: 1.20, many: 1.22}.get(choice, 0.8)

    def beside(one, choice):
        return {few: 1.05, many: 1.00}.get(choice, 1.0)

    _, found = Truth(ratio, seed=4, noise=0.005, beside=beside).tuned()
    assert {entry.channels for entry in found} == {2}


def test_a_choice_that_slows_multiplications_gets_no_entry():
    best = wanted("ring", "ll", 8)
    truth = Truth(
        lambda one, choice: 1.3 if choice == best else 0.8,
        seed=5,
        noise=0.005,
        beside=lambda one, choice: 0.95 if choice == best else 1.0,
    )
    assert truth.tuned()[1] == ()


def test_a_choice_that_nccl_does_not_allow_in_every_job_is_not_predicted():
    small, best = row(16 * KIB), wanted("ring", "ll", 2)
    truth = Truth(lambda one, choice: 1.3 if choice == best else 1.1, seed=7)
    sweep = truth.contest(small, (best, wanted("ring", "ll", 1)))
    jobs = [[truth.contest(small, tuple(v.choice for v in sweep.finalists))] for _ in range(11)]
    assert predict([sweep], jobs)[0].choice == best
    (last,) = jobs[-1]
    jobs[-1] = [replace(last, variants=tuple(v for v in last.variants if v.choice != best))]
    assert predict([sweep], jobs)[0].choice == wanted("ring", "ll", 1)


def test_too_few_fresh_jobs_confirm_nothing():
    truth = Truth(lambda one, choice: 1.3 if choice.protocol == "ll" else 0.8, seed=6)
    assert truth.tuned(jobs=5)[1] == ()


@pytest.fixture(scope="module")
def library():
    return ctypes.CDLL(str(plugin_library()))


def test_a_rank_tells_the_tuner_for_its_calls_alone_and_asks_whether_nccl_follows(
    library, monkeypatch
):
    told = (ctypes.c_int * 4).in_dll(library, "tccl_told")
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", library._name)
    tuner, seen = Tuner(), []
    assert list(told[:1]) == [-1]
    tuner.call(wanted("tree", "simple", 4), lambda: seen.append(list(told[:3])))
    tuner.call(None, lambda: seen.append(list(told[:1])))
    assert seen == [[ALGORITHMS.index("tree"), PROTOCOLS.index("simple"), 4], [-2]]
    assert told[0] == -1

    def followed():
        told[3] += 1

    assert tuner.allows(followed, wanted("ring", "ll", 1))
    assert not tuner.allows(lambda: None, wanted("ring", "ll128", 1))
    with pytest.raises(ZeroDivisionError):
        tuner.call(wanted("ring", "ll", 1), lambda: 1 / 0)
    assert told[0] == -1


def test_the_tuner_follows_what_a_process_tells_it_unless_nccl_forbids_the_choice(library):
    told = (ctypes.c_int * 4).in_dll(library, "tccl_told")
    pointers = (ctypes.c_void_p * 4).in_dll(library, "ncclTunerPlugin_v5")
    sizes = [ctypes.c_size_t, ctypes.c_int]
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        *sizes,
        ctypes.c_void_p,
        *[ctypes.c_int] * 3,
        ctypes.POINTER(ctypes.c_int),
    )
    choose = kind(pointers[2])

    def asked(algorithm, protocol, channels, costs):
        told[:] = [algorithm, protocol, channels, 0]
        table, count = (ctypes.c_float * 21)(*costs), ctypes.c_int(0)
        choose(None, 4, 65536, 1, ctypes.addressof(table), 7, 3, 0, ctypes.byref(count))
        told[0] = -1
        usable = [(cost, at) for at, cost in enumerate(table) if cost >= 0]
        return divmod(min(usable)[1], 3), count.value, told[3]

    costs = [5.0, -1.0, 7.0, 1.0, 2.0, 3.0] + [-1.0] * 15
    ring, tree = ALGORITHMS.index("ring"), ALGORITHMS.index("tree")
    ll, ll128, simple = map(PROTOCOLS.index, ("ll", "ll128", "simple"))
    assert asked(-1, 0, 8, costs) == ((ring, ll), 0, 0)
    assert asked(tree, simple, 8, costs) == ((tree, simple), 8, 1)
    assert asked(ring, ll128, 0, costs) == ((ring, ll128), 0, 1)
    assert asked(tree, ll128, 8, costs) == ((ring, ll), 0, 0)


class FakeJobs:
    """Jobs whose contests have a truth; keeps the environments and the number of ranks of each."""

    def __init__(self, truth, *, fails=lambda ranks: False, by_plugin=lambda row: 1.2):
        self.truth, self.fails, self.by_plugin, self.jobs = truth, fails, by_plugin, []

    def rendezvous(self, host, count):
        return [None] * count

    def run(self, tasks):
        ((host, own),) = tasks.items()
        outputs = []
        for task in own:
            spec = decode_json(task.spec, JobSpec, where="spec")
            self.jobs.append((len(task.ranks), dict(task.environment)))
            if self.fails(len(task.ranks)):
                raise MeasurementError("no device")
            free = "NCCL_TUNER_PLUGIN" not in task.environment
            if "NCCL_ENV_PLUGIN" in task.environment:
                outputs.append(self.of_plugin(spec, task))
                continue
            times = tuple(self.truth.contested(one, free=free) for one in spec.rows)
            result = JobResult(rank=0, torch="2.13.0", nccl="2.30.7", times=times)
            text = encode_json(result)
            outputs.append(RankOutput(results=(text,) * len(task.ranks), log=""))
        return {host: outputs}

    def of_plugin(self, spec, task):
        assert all(one.contest.table and one.contest.choices == () for one in spec.rows)
        index = Path(task.environment["TCCL_INDEX"]).read_text()
        assert "NCCL_GRAPH_FILE" not in task.environment
        times = tuple(
            contest_times(
                one.plain,
                (None, None),
                ((1e-4,) * 5, (1e-4 / self.by_plugin(one),) * 5),
                ((), ()),
            )
            for one in spec.rows
        )
        result = JobResult(rank=0, torch="2.13.0", nccl="2.30.7", times=times)
        log = "tuned by" if "tune " in index else ""
        return RankOutput(results=(encode_json(result),) * len(task.ranks), log=log)


def tuned_plan(directory, jobs, said, plan=None, *, workload=None):
    plan = plan or plan_of(SMALL)
    write_plan(plan, directory)
    host = HostRanks(ranks=tuple(range(len(plan.gpus))), gpus=plan.gpus, environment={})
    launcher = Launcher(backend="cuda", hosts=(host,), runner=jobs, say=said.append)
    sizes = (64 * KIB, 128 * KIB)
    target = read_target(plan, directory)
    return tune_by_size(target, launcher, sizes, seconds=300.0, workload=workload)


def gaining(one, choice):
    """Ring and LL over two channels gain in all-reduce of 128 KiB."""
    best = wanted("ring", "ll", 2)
    return 1.3 if choice == best and one.bytes == 128 * KIB else 0.8


def test_a_tuned_plan_keeps_its_rows_and_gives_the_plugin_tables_of_equal_sets(tmp_path):
    jobs, said = FakeJobs(Truth(gaining, seed=7)), []
    found = tuned_plan(tmp_path, jobs, said)
    assert load_sizes(tmp_path) == found
    assert [len(one.gpus) for one in found] == [4, 4, 2]
    plan = plan_of(SMALL)
    (table,) = load_tuning(plan, tmp_path).tables
    assert (table.gpus, table.measured_on) == (plan.gpus, plan.gpus)
    (entry,) = table.entries
    assert (entry.collective, entry.algorithm, entry.protocol) == ("all_reduce", "ring", "ll")
    assert (entry.channels, entry.to_bytes) == (2, 128 * KIB)
    right, asked = found[0].predictions
    assert right == asked == 2
    # The swept arm and its fresh jobs have the tuner, default NCCL beside them has none.
    assert {ranks for ranks, _ in jobs.jobs} == {2, 4}
    loads = {"NCCL_TUNER_PLUGIN", "NCCL_ENV_PLUGIN"}
    assert any(not loads & set(environment) for _, environment in jobs.jobs) == (
        plan.recommended != "default"
    )
    assert "tune 0,1,2,3 all_reduce" in (tmp_path / "nccl" / "plugin.index").read_text()
    check_files(tmp_path)


def test_for_a_job_just_the_sizes_that_it_has_are_tuned_in_its_groups(tmp_path):
    def calls(collective, size, *groups):
        return WorkloadRow(
            collective=collective, dtype="bfloat16", bytes=size, groups=groups, calls=1
        )

    rows = (
        calls("all_reduce", 128 * KIB, (1, 0), (2, 3)),
        calls("all_gather", 48 * KIB, (0, 1, 2, 3)),
        calls("all_to_all", 8 * KIB, (0, 1, 2, 3)),
        calls("all_reduce", 64 * KIB, (0, 1, 2, 3)),
        calls("all_reduce", 128 * KIB, (0, 1, 2, 3)),
    )
    job = Workload(name="job", source="made by a test", ranks=4, rows=rows)
    found = tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=7)), [], workload=job)
    swept = [
        (one.gpus, row.collective, row.bytes)
        for one in found
        for row in one.rows
        if row.dtype == "bfloat16"
    ]
    assert swept == [
        ((0, 1, 2, 3), "all_reduce", 128 * KIB),
        ((0, 1, 2, 3), "all_reduce", 64 * KIB),
        ((0, 1, 2, 3), "all_gather", 48 * KIB),
        ((0, 1), "all_reduce", 128 * KIB),
    ]
    tables = load_tuning(plan_of(SMALL), tmp_path).tables
    assert {len(table.gpus) for table in tables} == {2, 4}


def test_rows_of_equal_groups_are_tuned_together_whichever_group_has_them(tmp_path):
    parts = {"all_gather": (0, 1), "all_reduce": (2, 3)}
    rows = tuple(
        WorkloadRow(collective=name, dtype="bfloat16", bytes=64 * KIB, groups=(group,), calls=1)
        for name, group in parts.items()
    )
    job = Workload(name="job", source="made by a test", ranks=4, rows=rows)
    (found,) = tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=7)), [], workload=job)
    assert found.gpus == (0, 1)
    assert {row.collective for row in found.rows} == set(parts)


def test_a_smaller_set_is_measured_once_for_all_sets_that_equal_it(tmp_path):
    truth = Truth(lambda one, choice: 1.3 if choice == wanted("ring", "ll", 2) else 0.8, seed=8)
    tuned_plan(tmp_path, FakeJobs(truth), [])
    tables = load_tuning(plan_of(SMALL), tmp_path).tables
    assert [table.gpus for table in tables if len(table.gpus) == 2] == [
        *itertools.combinations(range(4), 2)
    ]
    assert {table.measured_on for table in tables if len(table.gpus) == 2} == {(0, 1)}


def test_sets_whose_jobs_fail_have_no_table(tmp_path):
    said = []
    jobs = FakeJobs(Truth(gaining, seed=9), fails=lambda ranks: ranks == 2)
    found = tuned_plan(tmp_path, jobs, said)
    assert [len(one.gpus) for one in found] == [4, 4]
    assert any("no device" in text for text in said)
    assert len(load_tuning(plan_of(SMALL), tmp_path).tables) == 1


@pytest.mark.parametrize("name", ["h200x4-vm", "amd-3090", "intel-v100"])
def test_equal_sets_are_what_the_symmetries_of_a_machine_exchange(name):
    machine = plan_of(name).machine
    symmetry = automorphisms(machine)
    column = {point: at for at, point in enumerate(symmetry.points)}
    for gpus in itertools.combinations((gpu.index for gpu in machine.gpus), 2):
        images = {
            tuple(sorted(int(symmetry.points[row[column[f"G{gpu}"]]][1:]) for gpu in gpus))
            for row in symmetry.elements
        }
        assert set(images_of_gpus(symmetry, gpus)) == images
        assert gpus in images


def test_the_report_draws_latency_and_bandwidth_by_size_and_show_lists_the_entries(tmp_path):
    tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=10)), [])
    page = Page(report_html(read_contents(tmp_path)))
    page.assert_accessible()
    assert "Latency in us: all-reduce, bfloat16, GPUs 0,1,2,3" in page.words
    lines = [found["d"] for found in page.all("path") if "series" in found.get("class", "")]
    assert all(math.isfinite(float(x)) for line in lines for x in re.findall(r"[0-9.]+", line))
    bands = [found for found in page.all("path") if "band tuned" in found.get("class", "")]
    assert bands
    shown = tccl("show", "--sizes", str(tmp_path), env={"COLUMNS": "200"})
    assert "ring ll 2" in shown.stdout
    found = json.loads(tccl("show", str(tmp_path), "--json").stdout)
    (entry,) = found["tunings"][0]["entries"]
    assert (entry["algorithm"], entry["protocol"], entry["channels"]) == ("ring", "ll", 2)
    rows = {(row["collective"], row["bytes"]): row for row in found["tunings"][0]["rows"]}
    assert rows["all_reduce", 128 * KIB]["fresh"]["middle"] == pytest.approx(1.3, rel=0.05)


def test_a_dry_run_is_not_drawn(tmp_path):
    tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=10)), [])
    file = tmp_path / "tuning.json"
    file.write_text(file.read_text().replace('"backend": "cuda"', '"backend": "host"'))
    assert "tuning.json is left out" in Page(report_html(read_contents(tmp_path))).words


@pytest.mark.parametrize(("old", "new"), [('"rows"', '"lines"'), ('"ll"', '"fast"'), ("{", "")])
def test_damaged_rows_are_refused(tmp_path, old, new):
    tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=10)), [])
    file = tmp_path / "tuning.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError):
        load_sizes(tmp_path)


def test_an_entry_that_harms_by_the_plugin_at_or_between_its_sizes_does_not_stay(tmp_path):
    def half_way(row):
        return 0.9 if 64 * KIB < row.bytes < 128 * KIB else 1.2

    truth = Truth(lambda one, choice: 1.3 if choice == wanted("ring", "ll", 2) else 0.8, seed=11)
    (whole, others, _) = tuned_plan(tmp_path, FakeJobs(truth), [])
    assert [(one.from_bytes, one.to_bytes) for one in whole.entries] == [(64 * KIB, 128 * KIB)]
    sizes = [row.bytes for row in whole.by_plugin]
    assert sizes == [64 * KIB, math.isqrt(64 * 128 * KIB * KIB), 128 * KIB]
    assert all(row.fresh.middle == pytest.approx(1.2) for row in whole.by_plugin)
    assert others.by_plugin
    truth = Truth(truth.ratio, seed=11)
    (whole, *_) = tuned_plan(tmp_path, FakeJobs(truth, by_plugin=half_way), [])
    assert whole.entries == ()
    assert not any(row.kept for row in whole.rows)
    assert "tune 0,1,2,3 all_reduce" not in (tmp_path / "nccl" / "plugin.index").read_text()


def test_a_plan_for_another_nccl_gets_no_table_and_keeps_its_rows(tmp_path):
    said, plan = [], plan_of(SMALL)
    measured = replace_plan(plan, simulated=False, settings=replace(plan.settings, version="2.28"))
    found = tuned_plan(tmp_path, FakeJobs(Truth(gaining, seed=12)), said, measured)
    assert load_sizes(tmp_path) == found
    assert any("no table by message size" in text for text in said)
    assert load_tuning(load_plan(tmp_path), tmp_path) is None
