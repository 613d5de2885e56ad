"""What `tccl advise FILE...` says of logs of NCCL and tables of rates, with files of any kinds."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.health.nccl_report import read_report
from tccl_py.health.pasted import read_pasted

CASES = Path(__file__).parent / "cases"
REPORTS = CASES / "reports"
LOG = REPORTS / "log_info_only.txt"
INIT = CASES / "h200x4-vm" / "nccl-2.28.9-init.log"


def findings(*names):
    return read_pasted([str(REPORTS / name) for name in names]).findings


def tccl(*arguments, given=None):
    return CliRunner().invoke(app, ["advise", *map(str, arguments)], input=given)


def test_a_log_says_release_variables_rings_transports_and_a_failed_search():
    log = read_report(LOG.read_text())
    assert (log.version, log.ranks, log.hosts) == ("2.27.3", 2, ("boxa",))
    assert [(v.name, v.value, v.by) for v in log.variables] == [
        ("NCCL_P2P_LEVEL", "SYS", "environment")
    ]
    assert log.rings == ((0, 1), (0, 1))
    assert [(hop.source, hop.target, hop.via) for hop in log.hops] == [
        (0, 1, "SHM/direct/direct"),
        (1, 0, "SHM/direct/direct"),
    ]
    assert (log.simple_order, log.tree, log.warnings, log.unfinished) == ((4,), False, (), ())


def test_the_machine_is_the_one_that_nccl_printed():
    log = read_report(LOG.read_text())
    assert log.uplinks_gbps == {"0": 24.0, "1": 1.5}
    assert [gpu.bus_id for gpu in log.machine.gpus] == ["0000:41:00.0", "0000:61:00.0"]
    (cpu,) = log.machine.numa_nodes
    assert cpu.vendor == "AuthenticAMD"
    h200 = read_report(INIT.read_text())
    assert (h200.ranks, h200.channels, h200.tree) == (4, 24, True)
    assert all(h200.machine.has_nvlink(0, other) for other in (1, 2, 3))
    assert h200.machine.numa_nodes[0].numa_id == -1
    assert {hop.via for hop in h200.hops} == {"P2P/CUMEM"}
    assert h200.network == "Socket"


P2P_LEVEL = "boxa:4100:4205 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to SYS\n"


@pytest.mark.parametrize(
    ("old", "new", "words", "remedy"),
    [
        ("", "", "the driver grants", "topo -p2p r"),
        ("(1/2/-1)", "(1/1/-1)", "the driver grants", "topo -p2p r"),
        (P2P_LEVEL, "", "the driver grants", "topo -p2p r"),
        (P2P_LEVEL + "(1/2/-1)", "(1/1/-1)", "P2P goes up to PXB by default", "NCCL_P2P_LEVEL=SYS"),
        ("P2P_LEVEL set by environment to SYS", "P2P_DISABLE set by environment to 1",
         "P2P goes up to LOC by NCCL_P2P_DISABLE=1", "take NCCL_P2P_DISABLE=1 away"),
    ],
)  # fmt: skip
def test_why_a_hop_goes_through_host_memory_follows_nccls_rules(old, new, words, remedy, tmp_path):
    text = LOG.read_text()
    if old.startswith(P2P_LEVEL) and new:
        text, old = text.replace(P2P_LEVEL, ""), old.removeprefix(P2P_LEVEL)
    path = tmp_path / "nccl.log"
    path.write_text(text.replace(old, new) if old else text)
    found = read_pasted([str(path)]).findings
    assert words in found.why[0]
    assert any(remedy in one for one in found.following)


TESTS = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 536870912 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid  39155 on boxa device  0 [0x41] NVIDIA GeForce RTX 4090
#  Rank  1 Group  0 Pid  39155 on boxa device  1 [0x61] NVIDIA GeForce RTX 4090
"""


def test_cards_that_are_named_beside_a_log_say_why_the_driver_grants_no_p2p(tmp_path):
    path = tmp_path / "nccl.log"
    path.write_text(TESTS + LOG.read_text())
    found = read_pasted([str(path)]).findings
    assert "GeForce" in found.why[0]
    assert not found.hung


def test_a_table_without_a_row_after_its_ranks_were_joined_is_a_hang(tmp_path):
    path = tmp_path / "nccl.log"
    rows = LOG.read_text().replace("SHM/direct/direct", "P2P/direct pointer").splitlines()
    path.write_text(TESTS + "\n".join(rows[:-1]))
    found = read_pasted([str(path)]).findings
    assert found.hung
    assert "NCCL_P2P_DISABLE=1" in found.following[0]


HOSTS = """\
[1,0]<stdout>:a:1:1 [0] NCCL INFO NCCL version 2.30.7+cuda13.0
[1,0]<stdout>:a:1:1 [0] NCCL INFO Using network Socket
[1,0]<stdout>:a:1:2 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 2 cudaDev 0 \
busId 1000 commId 0x5 - Init START
[1,1]<stdout>:b:1:2 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 1 nranks 2 cudaDev 0 \
busId 1000 commId 0x5 - Init START
[1,0]<stdout>:a:1:2 [0] NCCL INFO === System : maxBw 1.2 totalBw 24.0 ===
[1,0]<stdout>:a:1:2 [0] NCCL INFO CPU/0-0 (1/2/-1)
[1,0]<stdout>:a:1:2 [0] NCCL INFO + PCI[5000.0] - NIC/0-0
[1,0]<stdout>:a:1:2 [0] NCCL INFO                 + NET[1.2] - NET/0-0 (0/0/0/1.250000)
[1,0]<stdout>:a:1:2 [0] NCCL INFO + PCI[24.0] - GPU/0-1000 (0)
[1,0]<stdout>:a:1:2 [0] NCCL INFO ==========================================
[1,0]<stdout>:a:1:2 [0] NCCL INFO Channel 00/02 : 0 1
[1,0]<stdout>:a:1:2 [0] NCCL INFO Channel 01/02 : 0 1
[1,0]<stdout>:a:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
[1,0]<stdout>:a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
ROW = "[1,0]<stdout>: 33554432 8388608 float sum -1 3966.7 1.12 1.12 0 3942.4 1.12 1.12 0\n"


def test_hops_between_hosts_are_judged_by_the_network_behind_mpiruns_tags(tmp_path):
    path = tmp_path / "nccl.log"
    path.write_text(HOSTS)
    found = read_pasted([str(path)]).findings
    assert found.log.nets_gbps == {"NET/0-0": 1.2}
    assert "2 ranks of 2 hosts" in found.did[0]
    assert "never reached Init COMPLETE" in found.did[1]
    assert ["NET" in found.limits[0], "sockets" in found.limits[1]] == [True, True]
    path.write_text(HOSTS + ROW)
    found = read_pasted([str(path)]).findings
    assert "93% of the 1.2 GB/s that a host's network" in found.got[0]
    assert not any("never reached" in one for one in found.did)


def test_a_log_whose_ranks_end_has_no_missing_rank_although_others_log_elsewhere():
    lines = [line for line in INIT.read_text().splitlines() if "vm:906:" in line]
    assert read_report("\n".join(lines)).unfinished == ()


def test_choices_by_size_are_read_by_number_and_by_name():
    text = (
        "h:1:1 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo 1 proto 2 time 30.5\n"
        "h:1:1 [0] NCCL INFO AllReduce: 512 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..3}\n"
    )
    first, second = read_report(text).choices
    assert (first.algorithm, first.protocol, first.channels) == ("Ring", "Simple", None)
    assert (second.algorithm, second.protocol, second.channels) == ("TREE", "LL", 4)


def test_wrong_values_are_said(tmp_path):
    path = tmp_path / "perf.txt"
    path.write_text(
        "# ./build/all_reduce_perf -b 8 -e 1G\n"
        "    33554432       8388608     float     sum      -1   3966.7    8.46   12.69      7"
        "   3942.4    8.51   12.77      0\n"
    )
    found = read_pasted([str(path)]).findings
    (rate,) = found.rates
    assert (rate.collective, rate.bytes, rate.gbps, rate.in_place_gbps, rate.wrong) == (
        "all_reduce", 33554432, 12.69, 12.77, 7,
    )  # fmt: skip
    assert "WRONG VALUES: 7" in found.got[0]


def test_names_and_matrix_may_be_in_two_files(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("GPU 0: NVIDIA L40S\nGPU 1: NVIDIA L40S\n")
    found = read_pasted([str(REPORTS / "prose_before.txt"), str(names)]).description.machine
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA L40S"] * 2


def test_what_stands_around_a_matrix_and_was_used_is_named():
    used = {
        "prose_before.txt": "nothing",
        "paste_link_query.csv": "names, bus ids, links",
        "pro6000x2_phb.txt": "names, P2P",
    }
    for name, around in used.items():
        assert findings(name).used[1] == f"with it: {around}"


def test_standard_input_is_read():
    result = tccl("-", "--json", given=LOG.read_text())
    assert json.loads(result.stdout)["findings"]["used"][0].startswith("standard input")
