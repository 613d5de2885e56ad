"""NCCL loads the tuner, asks it, and does what the tables say.

NCCL's log says what each collective runs; default NCCL's choices are those of the same plan without
tables.
"""

import os
import re

import pytest

from tccl_py.nccl.tuner import TunerEntry, TunerTable
from tests.plugin.cases import compile_c
from tests.plugin.runs import VERSIONS, make_plan, needs_release, run_ranks

pytestmark = pytest.mark.gpu(count=8)

K, M = 1 << 10, 1 << 20
CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel{Lo..Hi}={0..(\d+)}")
CHANNELS = re.compile(r"(\d+) coll channels")
USED = re.compile(r"TUNER/Plugin: Using (\w+)")
NAMES = {
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
}


def entry(collective, first, last, algorithm, protocol, channels=0):
    return TunerEntry(
        collective=collective,
        from_bytes=first,
        to_bytes=last,
        algorithm=algorithm,
        protocol=protocol,
        channels=channels,
    )


ENTRIES = (
    entry("broadcast", 0, 4 * K, "ring", "simple", 1),
    entry("reduce", M, 4 * M, "ring", "ll", 2),
    # With channels it is not used from 2.29 on.
    entry("all_gather", 256 * K, M, "ring", "ll"),
    entry("reduce_scatter", 4 * M, 4 * M, "ring", "ll"),
    entry("all_reduce", 0, 16 * K, "tree", "simple", 1),
    entry("all_reduce", 128 * K, M, "ring", "ll", 8),
    # The topology has no path for LL128, so NCCL does not allow it.
    entry("all_reduce", 16 * M, 16 * M, "ring", "ll128"),
    entry("all_reduce", 64 * M, 256 * M, "tree", "ll", 64),
)
TABLE = TunerTable(gpus=(0, 1, 2, 3), measured_on=(0, 1, 2, 3), entries=ENTRIES)
NOT_ALLOWED = {("all_reduce", 16 * M)}


class Ran:
    """What a run's log says: choices by (collective, bytes), channels, and the tuner in use."""

    def __init__(self, folder, version, *, scenario="collectives", tables=(TABLE,), **options):
        plan, size = make_plan(folder / "plan", sizes=(2, 4), tables=tables), 4
        env = {"NCCL_DEBUG_SUBSYS": "INIT,TUNING,ENV", "NCCL_MAX_NCHANNELS": "4"}
        options["env"] = env | options.get("env", {})
        options |= {"version": version}
        result = run_ranks(folder / "run", scenario, size, plan=plan, **options)
        assert result.errors == [] and set(result.codes.values()) == {0}
        assert {made.code for records in result.made for made in records} == {0}
        texts = [(folder / "run" / f"log.{rank}").read_text() for rank in range(size)]
        self.tuned = [": tuned by " in text for text in texts]
        self.using = [USED.findall(text) for text in texts]
        self.profiled = any("PROFILER/Plugin: Loaded" in text for text in texts)
        self.channels = int(CHANNELS.search(texts[0])[1])
        self.choices = {}
        for name, count, algorithm, protocol, last in CHOICE.findall(texts[0]):
            whole = int(count) * (size if name in ("AllGather", "ReduceScatter") else 1)
            found = (algorithm.lower(), protocol.lower(), int(last) + 1)
            self.choices[NAMES[name], whole] = found


@pytest.fixture(scope="module", params=VERSIONS)
def default(request, tmp_path_factory):
    """The version, and what it does without tables."""
    needs_release(request.param)
    ran = Ran(tmp_path_factory.mktemp("default"), request.param, tables=())
    assert not any(ran.tuned) and ran.using == [[]] * 4 and not ran.profiled
    return request.param, ran.choices


def test_nccl_obeys_the_table_and_chooses_itself_elsewhere(default, tmp_path):
    version, choices = default
    ran = Ran(tmp_path / "tuned", version)
    assert ran.tuned == [True] * 4 and ran.using == [["tccl"]] * 4
    assert ran.choices.keys() == choices.keys()
    changed = set()
    for (collective, size), found in ran.choices.items():
        [*right] = [
            one
            for one in ENTRIES
            if one.collective == collective and one.from_bytes <= size <= one.to_bytes
        ]
        if not right or (collective, size) in NOT_ALLOWED:
            assert found == choices[collective, size]
            continue
        assert found[:2] == (right[0].algorithm, right[0].protocol)
        assert found[2] <= min(ran.channels, right[0].channels or ran.channels)
        if found != choices[collective, size]:
            changed.add(collective)
    assert changed == {collective for collective, _ in choices}


OWN_TUNER = {"env": {"NCCL_TUNER_PLUGIN": "none"}}


@pytest.mark.parametrize(
    "options",
    [
        OWN_TUNER,
        {"rank_env": {2: OWN_TUNER["env"]}},
        {"rank_env": {0: {"NCCL_CTA_POLICY": "0"}}},
        {"rank_env": {1: {"NCCL_ENV_PLUGIN": None}}},
        {"rank_env": {3: {"TCCL_DISABLE": "1"}}},
        {"rank_env": {rank: {"NCCL_HOSTID": "other"} for rank in (2, 3)}},
        {"gpus": [4, 5, 6, 7]},
    ],
    ids=str,
)
def test_any_doubt_on_one_rank_leaves_all_ranks_to_nccl(tmp_path, options):
    needs_release("2.28.9")
    assert not any(Ran(tmp_path / "run", "2.28.9", scenario="world", **options).tuned)


def test_another_librarys_tuner_is_nccls(tmp_path):
    needs_release("2.28.9")
    compile_c("other_tuner.c", tmp_path).rename(tmp_path / "libnccl-tuner.so")
    wrapper = ["env", f"LD_LIBRARY_PATH={tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"]
    ran = Ran(tmp_path / "run", "2.28.9", scenario="world", wrapper=wrapper)
    assert ran.using == [["other"]] * 4 and not any(ran.tuned)


def test_a_users_algorithm_is_not_overruled(tmp_path):
    needs_release("2.28.9")
    ran = Ran(tmp_path / "run", "2.28.9", env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"})
    assert all(ran.tuned)
    assert {choice[:2] for choice in ran.choices.values()} == {("ring", "simple")}
