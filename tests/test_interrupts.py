"""Interrupts while a plan is searched."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from tccl_py.errors import CTRL_C_AND_SIGTERM, Terminated, defer_signals, interrupts_put_off


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    # Handlers run between two instructions of Python.
    return sum(range(1000))


def test_an_interrupt_is_raised_at_once_where_no_numpy_is_under_way():
    with pytest.raises(KeyboardInterrupt), interrupts_put_off():
        interrupt()
        pytest.fail("was not raised")


def test_an_interrupt_inside_numpy_is_raised_when_it_has_returned():
    def interrupting(row):
        interrupt()
        return row.sum()

    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_put_off():
        done.append(np.apply_along_axis(interrupting, 1, np.ones((3, 2))))
        time.sleep(1)
        pytest.fail("was not raised")
    assert done[0].tolist() == [2, 2, 2]


def test_sigterm_is_an_interrupt_of_its_own_where_that_is_asked_for():
    with pytest.raises(Terminated), interrupts_put_off(CTRL_C_AND_SIGTERM):
        interrupt(signal.SIGTERM)
        pytest.fail("was not raised")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with interrupts_put_off():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts_put_off(CTRL_C_AND_SIGTERM):
            interrupt(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_steps_that_belong_together_are_done_before_an_interrupt():
    done = []
    with pytest.raises(Terminated), interrupts_put_off(CTRL_C_AND_SIGTERM):
        with defer_signals():
            interrupt(signal.SIGTERM)
            interrupt()
            done.append(1)
        pytest.fail("was not raised")
    assert done == [1]


def test_handlers_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with interrupts_put_off():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before


def test_other_threads_plan_without_handlers():
    seen = []

    def planning():
        with interrupts_put_off():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=planning)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
