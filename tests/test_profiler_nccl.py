"""What NCCL carries from host to host: real workers and hosts, a stand-in for NCCL's library."""

import contextlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_profiler.cluster.agents import ClusterPool
from tccl_profiler.cluster.session import ClusterSession
from tccl_profiler.compiler import program_for
from tccl_profiler.nccl_links import Communicators, graph_text, process_variables
from tccl_profiler.pool import without_disturbance
from tccl_profiler.precision import Stopping, WindowLimits
from tccl_profiler.profiler import Options
from tccl_profiler.program import Carrier, Link
from tccl_py.errors import MeasurementError
from tccl_py.model.rings import entering, join_flows, leaving
from tccl_py.model.transfer import parse_set, place_named, transfer_set
from tccl_py.nccl_library import Library
from tccl_py.planning.opening_hosts import HostsRequest, cluster_of_job, plan_job
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Budget
from tccl_py.sources.hosts import HostsSource
from tccl_py.sources.profiled import MeasurementOptions
from tests.nccl_cases import read_graph_file
from tests.profiler_clusters import Checked, agents_in_processes
from tests.skips import needs

pytestmark = pytest.mark.timeout(180)
SOURCE = Path(__file__).with_name("stand_in_nccl.c")
LANES = {f"{host}.{name}": 64 for host in ("h0", "h1") for name in ("G0", "G1", "N0", "N1")}
DIRECT = "h0.G0->h0.N0->h1.N1->h1.N1->h1.G1{blocks=3}"
STAGED = "h0.G0->h0.G0->h0.C0->h0.N0->h1.N0->h1.N0->h1.C0->h1.G0->h1.G0{blocks=2,fifo=512K}"
BACK = "h1.G0->h1.G0->h1.C0->h1.N0->h0.N0->h0.N0->h0.C0->h0.G0->h0.G0{blocks=2,fifo=512K}"
CARRIER = Carrier(
    nic_out=0, nic_in=1, channels=3, fifo_bytes=4 << 20, direct_out=True, direct_in=True
)


def program_of(text, **more):
    return program_for(parse_set(text), lanes=LANES, network="nccl", **more)


# Programs


def test_a_flow_is_a_copy_at_each_of_its_two_gpus_joined_by_a_link():
    program = program_of(DIRECT)
    link = Link("h0.G0", "h1.G1", 0, CARRIER)
    assert program.links == (link,)
    assert sorted(program.devices) == ["h0.G0", "h1.G1"]
    for device, sends in (("h0.G0", True), ("h1.G1", False)):
        share = program.devices[device]
        assert not share.lanes
        (copy,) = share.copies
        assert (copy.link, copy.outgoing is not None, copy.incoming is None) == (link, sends, sends)
    (counted,), ((other,),) = program.counted, program.other
    assert (counted.device, counted.engine, other.device) == ("h1.G1", True, "h0.G0")


def test_without_nccl_the_same_flow_is_the_nics():
    program = program_for(parse_set(STAGED), lanes=LANES, network="tcp")
    assert {one for one in program.devices if place_named(one).kind == "N"} == {"h0.N0", "h1.N0"}
    assert all(link.carrier is None for link in program.links)


def test_nccls_blocks_count_beside_those_of_copies():
    lanes = dict.fromkeys(LANES, 5)
    three, four = (parse_set(f"{STAGED} h0.G0->h0.G0->h0.C0{{blocks={n}}}") for n in (3, 4))
    assert program_for(three, lanes=lanes, network="nccl").links
    with pytest.raises(MeasurementError, match=r"^h0\.G0 would run 6 blocks at once, it can run 5"):
        program_for(four, lanes=lanes, network="nccl")


def test_host_memory_at_an_end_is_not_nccls_and_goes_over_tcp():
    text = "h0.C0->h0.N0->h1.N0->h1.N0->h1.C0{blocks=1}"
    assert sorted(program_of(f"{text} {STAGED}").devices) == ["h0.G0", "h0.N0", "h1.G0", "h1.N0"]


def test_flows_of_the_same_two_gpus_have_links_of_their_own():
    numbers = [
        (link.number, link.carrier.nic_out) for link in program_of(f"{DIRECT} {DIRECT}").links
    ]
    assert numbers == [(0, 0), (1, 0)]
    other = DIRECT.replace("h0.N0", "h0.N1")
    found = program_of(f"{DIRECT} {other}").links
    assert [(link.number, link.carrier.nic_out) for link in found] == [(0, 0), (0, 1)]


def test_a_third_gpus_memory_is_refused():
    relayed = join_flows(leaving(0, 0, relay=1), entering(0, 0), sender="h0", receiver="h1")
    with pytest.raises(MeasurementError, match=r"cannot send through a"):
        program_of(str(relayed))


@given(
    st.lists(
        st.tuples(
            st.sampled_from((("h0", "h1"), ("h1", "h0"))),
            st.integers(0, 1),
            st.integers(0, 1),
            st.none() | st.just(0),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_each_link_has_one_copy_that_sends_and_one_on_the_other_host_that_does_not(drawn):
    flows = [
        join_flows(
            leaving(gpu, nic, through=through, blocks=blocks),
            entering(nic, gpu, through=through),
            sender=sender,
            receiver=receiver,
        )
        for (sender, receiver), gpu, nic, through, blocks in drawn
    ]
    program = program_for(transfer_set(flows), lanes=LANES, network="nccl")
    assert len(program.links) == len(set(program.links)) == len(flows)
    for link in program.links:
        ends = [
            (device, copy.outgoing is not None)
            for device, share in program.devices.items()
            for copy in share.copies
            if copy.link == link
        ]
        assert sorted(ends) == sorted([(link.sender, True), (link.receiver, False)])
    for host in program.hosts:
        mine = [one for one in program.links if host in (one.sender[:2], one.receiver[:2])]
        assert list(program.on(host).links) == mine


# What NCCL is told


def links_of(*carriers):
    return [Link("h0.G0", f"h1.G{i}", 0, one) for i, one in enumerate(carriers)]


def carrier(**more):
    return Carrier(**{**{f: getattr(CARRIER, f) for f in CARRIER.__struct_fields__}, **more})


@pytest.mark.parametrize(
    ("direct_in", "direct_out", "level", "read"),
    [(True, True, "SYS", "1"), (True, False, "SYS", "0"), (False, False, "LOC", "0")],
)
def test_nics_reach_gpu_memory_where_the_flows_say_so(direct_in, direct_out, level, read):
    found = process_variables(links_of(carrier(direct_in=direct_in, direct_out=direct_out)))
    assert found["NCCL_NET_GDR_LEVEL"] == level
    assert found["NCCL_NET_GDR_READ"] == read
    assert found["NCCL_BUFFSIZE"] == str(4 << 20)


def test_what_tcp_carries_needs_no_variables():
    assert process_variables([Link("h0.N0", "h1.N0", 0)]) == {}


@pytest.mark.parametrize(
    ("carriers", "sentence"),
    [
        ((carrier(), carrier(fifo_bytes=1 << 20)), "FIFOs of one size"),
        ((carrier(), carrier(direct_in=False)), "by one rule"),
        ((carrier(), carrier(direct_out=False)), "by one rule"),
        ((carrier(direct_in=False),), "directly only if"),
    ],
)
def test_what_one_process_cannot_be_told_is_refused(carriers, sentence):
    with pytest.raises(MeasurementError, match=sentence):
        process_variables(links_of(*carriers))


def test_variables_that_hide_nics_are_left_out_and_others_kept():
    told = {"NCCL_IB_HCA": "mlx5_0", "NCCL_GRAPH_FILE": "x", "NCCL_DEBUG": "INFO", "HOME": "/"}
    assert without_disturbance(told) == {"NCCL_DEBUG": "INFO", "HOME": "/"}


@pytest.mark.parametrize(("channels", "count"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_the_graph_file_is_a_ring_of_one_gpu_by_the_nic_with_half_the_channels(
    channels, count, tmp_path
):
    path = tmp_path / "graph.xml"
    for sends, nic in ((True, 0), (False, 11)):
        path.write_text(graph_text(10, carrier(channels=channels, nic_in=11), sends=sends))
        file = read_graph_file(path, version="2.28")
        ring, tree = file.values()
        assert (ring.id, tree.id, ring.nchannels, tree.nchannels) == (0, 1, count, count)
        for channel in ring.channels:
            assert (channel.gpus, channel.nets) == ((10,), (nic, nic))


# The stand-in


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory):
    needs("a C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", folder / "libnccl.so.2", SOURCE]
    subprocess.run(command, check=True)
    return folder


@contextlib.contextmanager
def stood_in(library_folder, told):
    """The stand-in is the NCCL of all processes started; a folder in which members say what they
    were told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library_folder))
        patch.setenv("TCCL_STAND_IN_NCCL", str(told))
        patch.setenv("NCCL_IB_HCA", "mlx5_7")
        yield told


@pytest.fixture
def stand_in(library_folder, tmp_path):
    with stood_in(library_folder, tmp_path) as told:
        yield told


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def job(library_folder, told):
    """Two hosts for several sessions, whose members say to `told` what they were told."""
    with stood_in(library_folder, told), agents_in_processes(("h0", "h1")) as found:
        yield found


@pytest.fixture(scope="module")
def session(job):
    with session_over(job, only=ONLY) as opened:
        yield opened


OPTIONS = Options(
    stopping=Stopping(target=0.5, minimum=2, limit=2),
    limits=WindowLimits(minimum_ms=5.0, maximum_ms=50.0, longest_ms=100.0, start_error_share=1.0),
    network="nccl",
)
ONLY = {"h0": frozenset({"G0", "N0"}), "h1": frozenset({"G0", "N0"})}


def session_over(job, **more):
    return ClusterSession(
        job, backend="host", devices=1, interfaces=("lo",), options=OPTIONS, **more
    )


def test_the_library_is_the_one_that_the_loader_is_told_of(stand_in):
    library = Library()
    assert library.version == 22809
    assert len(library.unique_id()) == 128


def test_no_library_is_said_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr("tccl_py.nccl_library.NAME", "libnccl-none.so.2")
    with pytest.raises(MeasurementError, match=r"does not load .*"):
        Communicators("G0", 0, memory=None).listen([Link("h0.G0", "h1.G1", 0, CARRIER)])


def test_sets_are_measured_over_communicators_made_once_for_each_link(session, told, monkeypatch):
    starts, restart = [], ClusterPool.restart
    monkeypatch.setattr(ClusterPool, "restart", lambda pool: starts.append(restart(pool)))
    sets = [parse_set(text) for text in (STAGED, f"{BACK} {STAGED}", BACK)]
    over, both, back = Checked(session).measure(sets)
    inside = "h0.G0->h0.G0->h0.C0{blocks=1}"
    (mixed,) = Checked(session).measure([parse_set(f"{inside} {STAGED}")])
    for found in (over, both, back, mixed):
        assert min(min(row) for row in found.samples_gbps) > 0
        assert not found.simulated
    # Workers have NCCL's variables from the start.
    assert len(starts) == 1
    # Two links, two members each; the third set found the first one's.
    texts = [path.read_text() for path in told.iterdir()]
    assert sorted(line for text in texts for line in text.splitlines()[:1]) == [
        "rank=0", "rank=0", "rank=1", "rank=1",
    ]  # fmt: skip
    for text in texts:
        assert "channels=2..2\n" in text
        assert "NCCL_BUFFSIZE=524288\nNCCL_NET_GDR_LEVEL=LOC\nNCCL_NET_GDR_READ=0\n" in text
        assert "NCCL_SOCKET_IFNAME==lo\nNCCL_IB_HCA=\n" in text
        assert '<graph id="0" pattern="4"' in text
    assert {line for text in texts for line in text.splitlines() if "HOSTID" in line} == {
        "NCCL_HOSTID=h0", "NCCL_HOSTID=h1",
    }  # fmt: skip


def test_fifos_of_another_size_are_other_processes(session, told):
    small = STAGED.replace("512K", "1M")
    # The first set is measured already, unless this test runs alone.
    Checked(session).measure([parse_set(STAGED)])
    Checked(session).measure([parse_set(small)])
    assert not session.notices
    pids = {}
    for path in told.iterdir():
        size = path.read_text().partition("NCCL_BUFFSIZE=")[2].split()[0]
        pids.setdefault(int(size), set()).add(path.name.partition("-")[0])
    assert {512 << 10, 1 << 20} <= set(pids)
    assert pids[512 << 10].isdisjoint(pids[1 << 20])


def test_a_nic_that_the_host_has_not_is_refused(session):
    with pytest.raises(MeasurementError, match=r"h0\.N7 is not measured here"):
        Checked(session).measure([parse_set(STAGED.replace("h0.N0", "h0.N7"))])


def test_what_nccl_refuses_is_named_with_its_link_and_words(stand_in, monkeypatch):
    monkeypatch.setenv("TCCL_STAND_IN_REFUSES", "1")
    with (
        agents_in_processes(("h0", "h1")) as job,
        session_over(job, only=ONLY) as session,
        pytest.raises(MeasurementError, match=r"link 0 from h0\.G0"),
    ):
        Checked(session).measure([parse_set(STAGED)])
    # Two members, made again, and both again by new workers.
    assert len(list(stand_in.iterdir())) == 8


# Planning by it


def test_a_cluster_is_planned_with_nccl_between_its_hosts(job, told, tmp_path):
    before = set(told.iterdir())
    with session_over(job, gid_index=3) as session:
        source = HostsSource(session, MeasurementOptions(target=0.5, repeats=6), dry_run=True)
        source.keep_in(tmp_path / "measurements.jsonl")
        few = {"ring_counts": (1,), "budget": Budget(sets=1)}
        growth = HostsRequest(PlanRequest(version="2.28", keep_order=True, **few))
        made = plan_job(source, cluster_of_job(source, None), growth)
    assert made.rate_gbps > 0
    assert not made.assumed
    assert not made.simulated
    # All rings at once ran over NCCL too.
    assert made.whole_ring_gbps > 0
    journal = (tmp_path / "measurements.jsonl").read_text()
    assert "network by nccl" in journal
    assert "h0.G0->h0.G0->h0.C0->h0.N0->h1.N0->h1.N0->h1.C0->h1.G0->h1.G0" in journal
    # No NIC was started, and NCCL was told of the GID.
    texts = [path.read_text() for path in set(told.iterdir()) - before]
    assert texts and all("rank=" in text for text in texts)
