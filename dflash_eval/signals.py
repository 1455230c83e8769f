"""Ctrl-C and SIGTERM: what is in work is finished first, then the run ends; at the second one it ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash_eval.errors import Stopped
from dflash_eval.progress import say

ONE_PRESS_S = 1.0  # torchrun passes on the Ctrl-C that the terminal has sent already: that is no second one


class Stop:
    """Whether the run is to end, and by which signal. Where `patient` is not set it ends where it stands."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.patient = False
        self._since = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() - self._since < ONE_PRESS_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal, self._since = number, time.monotonic()
        if not self.patient:
            raise Stopped(number)
        say(f"{signal.Signals(number).name}: finishing the shard in work; once more stops at once")


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Within this context SIGINT and SIGTERM go to the Stop that it yields (in the main thread alone)."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
