"""The net plugin of cables, between processes."""

import ctypes
import multiprocessing
import random

import pytest

from tests.cables.network import Net, build, ring_cables, write_cables

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("net"))


def joined(library, folder, *, asked, listened, aware, cables=None, messages=()):
    """Host 0 sends to host 1 by these functions; return what came and the log's lines."""
    where = write_cables(folder / "cables", cables or ring_cables(3))
    log = folder / "log"

    def listen(pipe):
        net = Net(library, 1, where, log, aware=aware)
        handle, listener = net.listen(listened)
        pipe.send(handle)
        try:
            came = net.receive(net.accept(listener), [len(one) + 9 for one in messages])
        except RuntimeError as error:
            came = str(error)
        pipe.send(came)

    def connect(handle):
        net = Net(library, 0, where, log, aware=aware)
        try:
            link = net.connect(asked, handle)
        except RuntimeError:
            return
        net.send(link, [(ctypes.c_char * len(one)).from_buffer_copy(one) for one in messages])

    here, there = FORK.Pipe()
    far = FORK.Process(target=listen, args=(there,))
    far.start()
    near = FORK.Process(target=connect, args=(here.recv(),))
    near.start()
    came = here.recv()
    near.join()
    far.join()
    return came, sorted(log.read_text().splitlines())


def test_data_goes_over_a_cable_in_order_and_with_its_sizes(library, tmp_path):
    chosen = random.Random(1)
    messages = [chosen.randbytes(size) for size in (1, 4096, 3_000_000, 17, 0, 500_000) * 10]
    came, log = joined(library, tmp_path, asked=0, listened=1, aware=False, messages=messages)
    assert came == messages
    assert log == ["send 0 0 0 1 1"]


def test_functions_without_a_cable_are_refused_by_both_ends(library, tmp_path):
    came, log = joined(library, tmp_path, asked=0, listened=0, aware=False)
    assert came == "accept: 2"
    assert log == ["refused 0 0 1 0", "refused 1 0 0 0"]


@pytest.mark.parametrize(
    ("asked", "listened", "line"),
    [
        (1, 1, "send 0 1 0 1 1"),  # the sender gives way to the listener's cable
        (2, 2, "send 0 2 2 1 3"),  # the listener's leads elsewhere, so it gives way
    ],
)
def test_subnets_correct_an_end_where_the_other_is_right(library, tmp_path, asked, listened, line):
    _, log = joined(library, tmp_path, asked=asked, listened=listened, aware=True)
    assert log == [line]


def test_subnets_correct_nothing_where_both_ends_lead_elsewhere(library, tmp_path):
    came, log = joined(library, tmp_path, asked=1, listened=0, aware=True)
    assert came == "accept: 2"
    assert log == ["refused 0 1 1 0", "refused 1 0 0 1"]
