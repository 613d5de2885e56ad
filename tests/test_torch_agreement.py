"""Ranks learn each other's reports, whatever an earlier exchange left in the store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec

import pytest

from tccl_py.errors import InputError
from tccl_py.torch.agreement import Member, exchange, variables_read

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
LEVEL, SIZE = "NCCL_P2P_LEVEL", "NCCL_BUFFSIZE"


@pytest.fixture(params=["HashStore", "FileStore"])
def store(request, tmp_path):
    """A store of torch; no key of a FileStore can be deleted."""
    import torch.distributed as dist  # noqa: PLC0415

    made = dist.HashStore() if request.param == "HashStore" else dist.FileStore(f"{tmp_path}/s", 9)
    made.set_timeout(timedelta(seconds=20))
    return made


def exchanged(store, hosts, late=()):
    """The hosts that each rank of an exchange learns of; `late` ranks come after the others."""

    def rank(number):
        time.sleep(0.2 * (number in late))
        members = exchange(store, number, len(hosts), Member(host=hosts[number]))
        return "".join(member.host for member in members)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(rank, range(len(hosts))))


@needs_torch
@pytest.mark.parametrize("late", [{0}, {1}, {1, 2}])
def test_exchanges_in_one_store_do_not_see_each_others_reports(store, late):
    assert exchanged(store, "abc") == ["abc"] * 3
    assert exchanged(store, "def", late) == ["def"] * 3
    assert exchanged(store, "g") == ["g"]


@needs_torch
@pytest.mark.parametrize("ended", [0, 1])
def test_ranks_meet_after_an_exchange_that_one_of_them_left(store, ended):
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError):
        exchange(store, 1 - ended, 2, Member(host="x"))
    store.set_timeout(timedelta(seconds=20))
    assert exchanged(store, "ab", late={1}) == ["ab"] * 2


@needs_torch
def test_rank_0_gives_up_after_the_timeout_if_only_a_former_process_told_a_nonce(store):
    store.set("nonce/1", "former")
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError):
        exchange(store, 0, 2, Member(host="a"))


def reader(read, *by_plan):
    """A rank whose NCCL has read these variables."""
    return Member(host="h boot", read=read, by_plan=by_plan)


NEW, PLANNED = Member(host="h boot"), reader({LEVEL: "SYS", SIZE: "4096"}, LEVEL)


@pytest.mark.parametrize(
    ("members", "read"),
    [
        ([NEW, NEW], {}),
        ([NEW, PLANNED, NEW], {LEVEL: "SYS"}),
        ([PLANNED, reader({LEVEL: "SYS"}), NEW], {LEVEL: "SYS"}),  # set by the user
        ([reader({SIZE: "1024"}), reader({}), NEW], {}),  # no plan's
        ([reader({"NCCL_IB_HCA": "=a"}, "NCCL_IB_HCA"), reader({})], {}),  # of a host
    ],
)
def test_ranks_have_in_common_what_nccl_read_of_plans(members, read):
    assert variables_read(members) == read


@pytest.mark.parametrize("other", [None, "PXB"])
def test_variables_that_nccl_read_unlike_are_an_error_that_names_both_ranks(other):
    unlike = reader({} if other is None else {LEVEL: other})
    for members in ([NEW, PLANNED, unlike], [NEW, unlike, PLANNED]):
        with pytest.raises(InputError, match=rf"rank 2 on h: its NCCL has read {LEVEL} .*rank 1;"):
            variables_read(members)
