"""The ways a command ends badly, and what their messages have in common."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave is wrong (exit status 2); the message is one to three plain lines."""


class RunError(Exception):
    """The run failed through no fault of what the user gave (exit status 1)."""


class GateFailed(Exception):
    """The run is done, and the results are not what the command line asked for (exit status 3)."""


class Stopped(Exception):
    """A signal ended the run (exit status 128 + its number); the same command resumes it."""

    def __init__(self, signal: int) -> None:
        super().__init__("stopped; run the same command to resume")
        self.signal = signal


def reason(error: BaseException) -> str:
    """The first line that the error says; its kind where it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listed(layers: Iterable[int]) -> str:
    """Layers as messages name them."""
    return ", ".join(map(str, layers))
