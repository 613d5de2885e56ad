"""Two hosts made of one machine's GPUs: what they send each other goes over TCP on loopback."""

import os

import msgspec
import pytest

from tccl_profiler.cluster.session import LIMITS, ClusterSession
from tccl_profiler.precision import Stopping
from tccl_profiler.profiler import Options
from tccl_py.model.transfer import parse_set
from tests.gpu.ranks import REAL
from tests.profiler_clusters import Checked, agents_in_processes

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("sharing"),
]
QUICK = Options(stopping=Stopping(limit=6), limits=LIMITS, check=True)
ONLY = {"h0": frozenset({"G0", "N0"}), "h1": frozenset({"G1", "N0"})}
OVER = "h0.G0->h0.G0->h0.C0->h0.N0->h1.N0->h1.N0->h1.C0->h1.G1->h1.G1{blocks=2}"
BACK = "h1.G1->h1.G1->h1.C0->h1.N0->h0.N0->h0.N0->h0.C0->h0.G0->h0.G0{blocks=2}"
INSIDE = "h0.G0->h0.G0->h0.C0 h1.G1->h1.G1->h1.C0"
FEW = INSIDE if REAL else "h0.G0->h0.G0->h0.C0{blocks=4} h1.G1->h1.G1->h1.C0{blocks=4}"
"""A share of a GPU has room for few blocks beside NCCL's."""


def test_gpus_of_two_hosts_send_to_each_other_and_start_together():
    with (
        agents_in_processes(("h0", "h1")) as job,
        ClusterSession(
            job, backend="cuda", interfaces=("lo",), options=QUICK, only=ONLY
        ) as session,
    ):
        sets = [parse_set(text) for text in (OVER, f"{OVER} {BACK}", INSIDE)]
        over, ring, inside = Checked(session).measure(sets)
        assert min(over.gbps + ring.gbps + inside.gbps) > 0
        # Their clocks are each compared with their host's, and those with the controller's.
        assert inside.skew_error_us > 0
        if REAL:
            assert (over.gbps[0] > 0.5, min(ring.gbps) > 0.3, min(inside.gbps) > 5) == (True,) * 3
            assert inside.skew_us < 300
            assert inside.skew_error_us < 500
            assert inside.overlap > 0.9


def test_nccl_carries_flows_between_gpus_of_two_hosts():
    options = msgspec.structs.replace(QUICK, network="nccl")
    with (
        agents_in_processes(("h0", "h1")) as job,
        ClusterSession(
            job, backend="cuda", interfaces=("lo",), options=options, only=ONLY
        ) as session,
    ):
        sets = [parse_set(text) for text in (OVER, f"{OVER} {BACK}", f"{OVER} {FEW}")]
        over, ring, mixed = Checked(session).measure(sets)
    print(over.gbps, ring.gbps, mixed.gbps, over.skew_us, mixed.overlap, session.notices)
    assert over.gbps[0] > 0.5
    assert min(ring.gbps) > 0.3
    assert min(mixed.gbps) > 0.3
    assert mixed.skew_us < 300
    if REAL:
        # Tests before this one may have left a CUDA context in this process.
        assert not [text for text in session.notices if f"process {os.getpid()} " not in text]
