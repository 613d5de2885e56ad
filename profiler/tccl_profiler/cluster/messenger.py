"""How the controller and one agent exchange messages, whatever carries them.

Nothing here waits for a peer that may be gone: sending leaves a message to be carried, receiving
looks whether one has come. Who waits does so in naps, with a limit, and looks after all peers.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tccl_profiler.channel import Channel, ChannelClosed, ChannelTimeout
from tccl_profiler.cluster.messages import Beat, Envelope, Leaving
from tccl_py.errors import MeasurementError

BEAT_S = 1.0
"""How often each side says that it is there."""
_SEND_S = 5.0
"""How long a peer's socket may be full before the peer is given up."""
_HOT_S, _WARM_S = 0.003, 0.5
_SHORT_NAP_S, _NAP_S, _LONG_NAP_S = 20e-6, 1e-3, 5e-3
_PR_SET_TIMERSLACK = 29


class PeerGone(MeasurementError):  # noqa: N818 - says what happened
    """The peer has closed its end or has died."""


class Messenger(Protocol):
    """One end of the connection between the controller and a rank's agent.

    `heard_s` is when anything last came from the peer, on this process's CLOCK_MONOTONIC; `leaving`
    whether it has said that its launcher tells it to end.
    """

    heard_s: float
    leaving: bool

    def send(self, envelope: Envelope) -> None:
        """Have a message carried; safe beside another thread that sends.

        Raises:
            PeerGone: nobody is there.
        """

    def poll(self) -> Envelope | None:
        """The next message if one is there; that the peer lives or leaves is heard and left out.

        Raises:
            PeerGone: nobody is there, and all that was sent has been received.
            MeasurementError: the message cannot be read, and is dropped.
        """

    def close(self) -> None:
        """Give the connection back."""


class ChannelMessenger:
    """A Messenger over a Unix socket: to another process of this host, or to a thread in tests."""

    def __init__(self, channel: Channel[Envelope]) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()
        self.leaving = False

    def send(self, envelope: Envelope) -> None:
        """As Messenger."""
        try:
            with self._sending:
                self._channel.send(envelope, (), _SEND_S)
        except (ChannelClosed, ChannelTimeout) as error:
            raise PeerGone(str(error)) from error

    def poll(self) -> Envelope | None:
        """As Messenger."""
        while True:
            try:
                envelope, _ = self._channel.receive(0)
            except ChannelTimeout:
                return None
            except ChannelClosed as error:
                raise PeerGone(str(error)) from error
            self.heard_s = time.monotonic()
            if isinstance(envelope.message, Leaving):
                self.leaving = True
            elif not isinstance(envelope.message, Beat):
                return envelope

    def close(self) -> None:
        """As Messenger."""
        self._channel.close()


class Naps:
    """Naps between looks: none while messages follow each other, longer the longer none comes."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        # Naps of 20 us would take 70 us with the usual slack of timers.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)

    def begin(self) -> None:
        """Something came: the next may follow at once."""
        self._since_s = time.monotonic()

    def nap(self, longest_s: float = _LONG_NAP_S) -> None:
        """Let others run for a while."""
        waited_s = time.monotonic() - self._since_s
        if waited_s < _HOT_S:
            os.sched_yield()
            time.sleep(_SHORT_NAP_S)
        elif waited_s < _WARM_S:
            time.sleep(min(longest_s, _NAP_S))
        else:
            time.sleep(longest_s)


class Heart:
    """A thread that says now and then that this process is there, until it is stopped.

    Args:
        beat: says so to all who are to know; what it raises is no concern of this thread.
        every_s: how often.
    """

    def __init__(self, beat: Callable[[], None], every_s: float = BEAT_S) -> None:
        self._beat, self._every_s = beat, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; returns when the last one is over."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except MeasurementError:
                # Who waits for the peer will hear of it and say so.
                continue


def beat_to(messenger: Messenger) -> None:
    """Send one beat."""
    messenger.send(Envelope(0, Beat()))
