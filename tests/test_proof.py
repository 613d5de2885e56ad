"""The proof of links without a GPU: what ranks see, what it makes of them, and who asks for it."""

import ctypes
import json
import threading
import time
from itertools import permutations
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_profiler.links import LinkRecord, LinksResult, LinksSpec, pair_proofs
from tccl_py.files import encode_json
from tccl_py.health import proving
from tccl_py.health.host import DriverState, HostState
from tccl_py.model.links import JobProof, PairProof
from tccl_py.nccl import communicators as values
from tccl_py.nccl.asked import AskedJob, JobsProof
from tccl_py.nccl.communicators import (
    CommunicatorLog,
    CommunicatorsSpec,
    RankProof,
    RankResult,
    prove_values,
)
from tccl_py.plan.load import load_plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.planning.installed_nccl import CONTROL, Evidence, gather_evidence
from tccl_py.rank_processes.tasks import RankOutput, RanksError, Task, run_each
from tccl_py.sources.profiled import ProfilerSource
from tests.commands import tccl
from tests.planned import SMALL
from tests.sessions import Fake, measures_by

SPEC = LinksSpec(gpus=(0, 2, 5), bus_ids=("a", "b", "c"), pairs=tuple(permutations(range(3), 2)))


# What the kernels' ranks saw of each pair.
def records(bad=(), **changes):
    """Sound records of all pairs by both mappings; those of `bad` pairs are changed."""
    for mapping in ("cumem", "cuda-ipc"):
        for source, target in SPEC.pairs:
            for test in ("write", "read", "together"):
                one = LinkRecord(
                    source=source, target=target, mapping=mapping, test=test, state="sound"
                )
                hit = (source, target) in bad and test == changes.get("test", test)
                yield msgspec.structs.replace(one, **changes) if hit else one


def verdicts(*results):
    proofs = pair_proofs(SPEC, [LinksResult(records=tuple(result)) for result in results])
    return {(p.source, p.target, p.mapping): (p.verdict, p.what) for p in proofs}


def test_pairs_are_named_by_their_gpus_and_all_sound_ones_are_sound():
    found = verdicts(records())
    assert set(found.values()) == {("sound", "")}
    assert {key[:2] for key in found} == set(permutations((0, 2, 5), 2))


@pytest.mark.parametrize(
    ("changes", "verdict", "clause"),
    [
        ({"test": "write", "state": "late", "what": "LL"}, "hangs", "nothing that GPU 2 writes"),
        ({"test": "write", "state": "late", "what": "Simple"}, "hangs", "Simple that GPU 2"),
        ({"test": "write", "state": "wrong", "what": "9 packs"}, "wrong values", "GPU 2 writes"),
        ({"test": "read", "state": "wrong", "what": "9 packs"}, "wrong values", "GPU 2 reads"),
        ({"test": "together", "state": "wrong", "what": "1 pack"}, "wrong values", "beside others"),
    ],
)
def test_a_fault_of_one_pair_is_told_of_this_pair_alone(changes, verdict, clause):
    found = verdicts(records([(1, 2)], **changes))
    bad = {key: value for key, value in found.items() if value[0] != "sound"}
    assert {key[:2] for key in bad} == {(2, 5)}
    assert all(value[0] == verdict and clause in value[1] for value in bad.values())


def test_what_was_late_and_came_with_more_patience_is_sound():
    late = records([(0, 1)], test="write", state="late", what="LL")
    again = [one for one in records() if (one.source, one.target) == (0, 1)]
    assert {value[0] for value in verdicts([*late, *again]).values()} == {"sound"}


@given(st.sets(st.sampled_from(SPEC.pairs)))
def test_pairs_without_a_record_are_not_proven_and_never_sound(missing):
    left = [one for one in records() if (one.source, one.target) not in missing]
    found = verdicts(left)
    gone = {(SPEC.gpus[a], SPEC.gpus[b]) for a, b in missing}
    assert {key[:2] for key, value in found.items() if value[0] == "not proven"} == gone


# What a rank of NCCL sees of its collectives, by ranks that are threads.
class Ring:
    """Stands for NCCL and the GPUs of all ranks: host memory, a barrier for each collective."""

    def __init__(self, ranks, fault="", at=""):
        self.ranks, self.fault, self.at = ranks, fault, at
        self.barrier = threading.Barrier(ranks)
        self.parts = {}

    def library(self, rank):
        return SimpleNamespace(
            allocate=lambda size: self.allocate(rank, size),
            collective=lambda _, pointer, size, __: self.all_reduce(rank, pointer, size),
            exchange=lambda sends, receives, _: self.exchange(rank, sends, receives),
            is_busy=lambda: self.fault == "hangs" and self.at == "busy",
        )

    def allocate(self, rank, size):
        buffer = (ctypes.c_char * size)()
        self.parts.setdefault(rank, []).append(buffer)
        return ctypes.addressof(buffer)

    def _write(self, rank, pointer, data):
        if self.fault == "wrong values" and rank == 1:
            data = b"\x7f\xc0\xde\xad" + data[4:]
        ctypes.memmove(pointer, data, len(data))

    def all_reduce(self, rank, pointer, size):
        self.parts["sum", rank] = ctypes.string_at(pointer, size)
        self.barrier.wait()
        numbers = [self.parts["sum", one] for one in range(self.ranks)]
        total = bytes(sum(column) % 256 for column in zip(*numbers, strict=True))
        self.barrier.wait()
        self._write(rank, pointer, total)

    def exchange(self, rank, sends, receives):
        for pointer, size, peer in sends:
            self.parts["sent", rank, peer] = ctypes.string_at(pointer, size)
        self.barrier.wait()
        for pointer, _, peer in receives:
            self._write(rank, pointer, self.parts["sent", peer, rank])
        self.barrier.wait()


@pytest.fixture
def driver(monkeypatch):
    def copied(to, of, size):
        ctypes.memmove(to.value, of.value, size.value)
        return 0

    here = SimpleNamespace(
        cuCtxGetCurrent=lambda _: 0,
        cuCtxSetCurrent=lambda _: 0,
        cuMemcpyHtoD_v2=copied,
        cuMemcpyDtoH_v2=copied,
    )
    monkeypatch.setattr(values, "cuda_driver", lambda: here)
    monkeypatch.setattr(values, "SIZES", (512, 4096))
    monkeypatch.setattr(values, "REPEATS", 2)


def proven_by(ring):
    found = {}

    def prove(rank):
        found[rank] = prove_values(ring.library(rank), 1, rank=rank, ranks=ring.ranks)

    threads = [threading.Thread(target=prove, args=(rank,)) for rank in range(ring.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ring.ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_right_collectives_are_sound_for_any_number_of_ranks(driver, ranks):
    found = proven_by(Ring(ranks))
    assert [rank.verdict for rank in found] == ["sound"] * ranks
    assert all(len(rank.repeats) == 2 and min(rank.repeats) > 0 for rank in found)


def test_wrong_values_are_told_by_the_rank_that_got_them_and_hang_no_other(driver):
    found = proven_by(Ring(3, "wrong values"))
    assert [rank.verdict for rank in found] == ["sound", "wrong values", "sound"]
    assert "bytes of all-reduce of 512 B are wrong" in found[1].what


def test_a_collective_that_does_not_end_is_a_hang_by_name(driver, monkeypatch):
    monkeypatch.setattr(values, "HANG_S", 0.2)
    found = proven_by(Ring(2, "hangs", "busy"))
    assert {(rank.verdict, rank.what) for rank in found} == {
        ("hangs", "all-reduce of 512 B does not end")
    }


# Jobs of NCCL, each of which may fail by itself.
def test_a_jobs_verdict_is_its_worst_ranks_and_its_rate_the_slowest_ones():
    seen = {
        (): [RankProof(verdict="sound"), RankProof(verdict="hangs", what="all-reduce ...")],
        ("1",): [
            RankProof(verdict="sound", seconds=1.0, repeats=(1.0, 2.0)),
            RankProof(verdict="sound", seconds=3.0, repeats=(2.0, 1.0)),
        ],
    }

    def run(tasks):
        for task in tasks:
            spec = msgspec.json.decode(task.spec, type=CommunicatorsSpec)
            off = task.environment.get("NCCL_P2P_DISABLE")
            assert spec.questions[0].proof.jobs == 2
            proofs = seen[(off,) if off else ()]
            logs = [CommunicatorLog(log="", proof=one) for one in proofs]
            results = (RankResult(version="2.28.9", logs={0: one}) for one in logs)
            yield RankOutput(results=tuple(map(encode_json, results)), log="")

    proof = JobsProof((0, 1), [(CONTROL, True), ({}, True)])
    control, default = proof.results(list(run(proof.tasks)), 0.0)
    assert (default.proof.verdict, default.answer) == ("hangs", None)
    assert (control.proof.verdict, control.proof.seconds) == ("sound", 3.0)
    assert control.proof.gbps == pytest.approx([(64 << 20) / 2e9] * 2)


def test_a_job_that_crashes_says_so_and_the_others_have_their_verdicts():
    crash = RanksError([1], "was killed by signal 11", "")
    late = RanksError([0], "did not end within 60 s", "", late=True)
    proof = JobsProof((0, 1), [({}, True), (CONTROL, True), ({"A": "1"}, False)])
    first, second, asked = proof.results([crash, late, late], time.time())
    assert (first.proof.verdict, second.proof.verdict) == ("fails", "hangs")
    assert asked.proof is None and asked.answer is None and asked.why


def test_of_jobs_that_run_together_one_fails_and_the_others_end(tmp_path):
    (tmp_path / "stand_in.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "spec = Path(sys.argv[1])\n"
        "if spec.read_text() == '\"fails\"': sys.exit(7)\n"
        "import time; time.sleep(4)\n"  # longer than what a failure leaves its own job
        "(spec.parent / f'result-{sys.argv[2]}.json').write_text('1')\n"
    )
    tasks = [
        Task(
            program="stand_in",
            spec=f'"{kind}"',
            ranks=(0, 1),
            environment={"PYTHONPATH": str(tmp_path)},
            timeout=60,
        )
        for kind in ("fails", "ends")
    ]
    failed, ended = run_each(tasks)
    assert isinstance(failed, RanksError) and "code 7" in failed.what
    assert ended.results == ("1", "1")


@pytest.mark.parametrize(
    ("shared", "nccl", "alone", "order"),
    [
        # Processes that measure start beside the jobs, once it is known that the GPUs are idle.
        (True, True, False, ["ready", ["links", "communicators"]]),
        (True, True, True, [["links"], ["communicators"]]),
        (False, True, False, [["links"], ["communicators"], ["communicators"]]),
        (True, False, False, [["links"]]),
    ],
)
def test_kernels_run_beside_nccl_where_processes_may_share_gpus(
    monkeypatch, shared, nccl, alone, order
):
    done = []

    def run(tasks):
        done.append(sorted({task.program.rpartition(".")[2] for task in tasks}, reverse=True))
        return [RanksError([0], "stands for any end", "")] * len(tasks)

    for name, stand_in in {
        "why_not_asked": lambda _: "",
        "why_no_default": lambda: "",
        "why_no_kernels": lambda: "",
        "several_processes_may_use": lambda _: shared,
        "run_each": run,
    }.items():
        monkeypatch.setattr(f"tccl_py.planning.installed_nccl.{name}", stand_in)
    version = "2.28" if nccl else None
    place = Fake(SMALL).place()
    gather_evidence(place, GPUS, version, alone=alone, ready=lambda: done.append("ready"))
    assert done[: len(order)] == order
    assert ("ready" in done) == ("ready" in order)


# What commands make of it.
GPUS = Fake(SMALL).model.machine.gpu_indices


def evidence(bad=(), default="sound"):
    """What kernels and NCCL showed of SMALL: pairs with a GPU of `bad` hang."""
    pairs = [
        PairProof(
            source=a,
            target=b,
            mapping="cumem",
            verdict="hangs" if a in bad else "sound",
            what=f"nothing that GPU {a} writes arrives at GPU {b}" if a in bad else "",
        )
        for a, b in permutations(range(len(GPUS)), 2)
    ]
    jobs = [
        AskedJob(environment=of, proof=JobProof(environment=of, verdict=verdict, seconds=1.0))
        for of, verdict in ((CONTROL, "sound"), ({}, default))
    ]
    return Evidence(pairs=tuple(pairs), jobs=tuple(jobs))


@pytest.fixture
def box(monkeypatch, tmp_path_factory):
    """A machine with GPUs, whose evidence a test may change."""
    rooms = "tccl_py.sources.profiled", "tccl_py.planning.plan_sources"
    session = measures_by(monkeypatch, Fake(SMALL), *rooms)
    box = SimpleNamespace(evidence=evidence(), runs=0)

    def gathered(*_, **__):
        box.runs += 1
        return box.evidence

    monkeypatch.setattr(proving, "gather_evidence", gathered)
    monkeypatch.setattr(proving, "measured_machine", session.place)
    (root := tmp_path_factory.mktemp("host")).joinpath("sys").mkdir()
    box.host = HostState(root=root, driver=DriverState())
    monkeypatch.setattr(proving, "this_host", lambda: box.host)
    monkeypatch.setattr(proving, "files_of_this_host", lambda: box.host)
    return box


BROKEN = evidence(bad=(1,), default="hangs")
UNABLE = Evidence(unable="process 7 (python) uses GPU 1")


@pytest.mark.parametrize(
    ("seen", "code", "verdict"),
    [(evidence(), 0, "sound"), (BROKEN, 1, "hangs"), (UNABLE, 0, "inconclusive")],
)
def test_doctor_has_the_verdict_in_its_code_and_in_json(box, seen, code, verdict):
    box.evidence = seen
    result = tccl("doctor", "--json")
    links = json.loads(result.stdout)["links"]
    assert (result.exit_code, links["verdict"]) == (code, verdict)
    assert set(links) >= {"verdict", "pairs", "common", "causes", "by_nccl"}
    if seen is BROKEN:
        assert links["common"] == "GPU 1"
        assert json.loads(result.stdout)["findings"][0]["severity"] == "hang"
    if seen is UNABLE:
        assert "process 7" in links["what"]
        assert "not proven" in tccl("doctor").stdout.splitlines()[-1]


def test_doctor_that_only_looks_runs_nothing(box, monkeypatch):
    monkeypatch.setattr("tccl_py.cli.health.this_host", lambda: box.host)
    assert json.loads(tccl("doctor", "--passive", "--json").stdout)["links"] is None
    assert box.runs == 0


def test_a_plan_of_broken_links_has_what_runs_and_keeps_the_proof(box, tmp_path):
    box.evidence = BROKEN
    place = tmp_path / "box"
    result = tccl("plan", place, "--rings", "1", "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["choices"]["default"]["fails"]["verdict"] == "hangs"
    assert made["choices"]["default"]["rate_gbps"] is None
    assert made["choices"][made["recommended"]]["environment"]["NCCL_P2P_DISABLE"] == "1"
    kept = ProvenLinks.load(place)
    assert kept.proof.common == "GPU 1"
    assert {pair for fact in kept.proof.facts for pair in [(fact.one, fact.other)]} == {
        (min(1, gpu), max(1, gpu)) for gpu in GPUS if gpu != 1
    }
    assert load_plan(place).choices["default"].fails is not None


@pytest.mark.parametrize(("alone", "verdict"), [(9.0, "sound"), (4.0, "slower than host memory")])
def test_what_looks_slower_beside_kernels_is_judged_by_jobs_that_run_alone(
    box, monkeypatch, alone, verdict
):
    def gathered(*_, **options):
        box.runs += 1
        rates = {"NCCL_P2P_DISABLE": 5.0, "": alone if options["alone"] else 4.0}
        jobs = [
            AskedJob(
                environment=of,
                proof=JobProof(
                    environment=of,
                    verdict="sound",
                    seconds=1.0,
                    gbps=(rates["".join(of)], rates["".join(of)] * 1.01) * 5,
                ),
            )
            for of in (CONTROL, {})
        ]
        return Evidence(pairs=evidence().pairs, jobs=tuple(jobs))

    monkeypatch.setattr(proving, "gather_evidence", gathered)
    assert (proving.prove_host().links.verdict, box.runs) == (verdict, 2)


@pytest.mark.parametrize(("seen", "ends"), [(evidence(), 1), (BROKEN, 2)])
def test_processes_that_measure_start_anew_after_jobs_that_hung(
    box, tmp_path, monkeypatch, seen, ends
):
    begun, ended = [], []

    def gathered(*_, ready, **__):
        ready()
        return seen

    stop = ProfilerSource.stop
    monkeypatch.setattr(proving, "gather_evidence", gathered)
    monkeypatch.setattr(ProfilerSource, "prepare", lambda _: begun.append(1))
    monkeypatch.setattr(ProfilerSource, "stop", lambda *given: (ended.append(1), stop(*given)))
    assert tccl("plan", tmp_path / "box", "--rings", "1").exit_code == 0
    assert (len(begun), len(ended)) == (1, ends)


def test_where_nccl_fails_without_p2p_too_nothing_is_planned(box, tmp_path):
    failing = [
        AskedJob(
            environment=of,
            proof=JobProof(environment=of, verdict="fails", seconds=0.0, what="No space left"),
        )
        for of in (CONTROL, {})
    ]
    box.evidence = Evidence(jobs=tuple(failing))
    result = tccl("plan", tmp_path / "box")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No space left" in result.stderr
    assert not (tmp_path / "box").exists()


def test_check_ends_with_one_where_a_link_broke_since_the_plan(box, tmp_path):
    place = tmp_path / "box"
    assert tccl("plan", place, "--rings", "1").exit_code == 0
    assert tccl("check", place).exit_code != 1
    box.evidence = BROKEN
    result = tccl("check", place, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"][0]["where"] == "GPU 1"
    box.evidence = UNABLE
    result = tccl("check", place)
    assert result.exit_code == 0, result.stdout + result.stderr


def test_a_proof_under_other_conditions_is_made_again_before_installing(box, tmp_path, monkeypatch):
    place = tmp_path / "box"
    assert tccl("plan", place, "--rings", "1").exit_code == 0
    plan, said = load_plan(place), []
    runs = box.runs

    def check(**options):
        proving.check_proof_holds(plan, place, say=said.append, **options)

    check(force=False)
    assert box.runs == runs
    monkeypatch.setattr(proving, "conditions_of_proof", lambda *_: {"driver": "another"})
    check(force=False)
    assert box.runs == runs + 1
    check(force=False)  # the new proof is kept
    assert box.runs == runs + 1
    monkeypatch.setattr(proving, "conditions_of_proof", lambda *_: {"driver": "a third"})
    for seen, words in ((BROKEN, "plan again"), (UNABLE, "--force|`force`")):
        box.evidence = seen
        with pytest.raises(Exception, match=words):
            check(force=False)
        check(force=True)
    assert len(said) >= 2
