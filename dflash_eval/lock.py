"""One writer a cache. Who holds it stands in the lock file; a dead process holds nothing."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_eval.errors import UserError

Say = Callable[[str], None]


@contextmanager
def lock(folder: Path, say: Say = lambda _: None) -> Iterator[None]:
    """Hold the cache for writing. The kernel lets go of the lock when the process ends, however it ends; on a file
    system without such locks the file itself is the lock, and one that a dead process left is taken over.

    Raises UserError naming the holder.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be made ({error.strerror}); cache_dir names the folder") from None
    with file as handle:
        before = _holder(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(folder, before) from None
        except OSError:  # no flock here
            with _exclusive_file(folder, say):
                yield
            return
        if before:
            say(f"{folder}: took over the lock of {_name(before)}, which is gone")
        _write(path)
        try:
            yield
        finally:
            handle.truncate(0)


@contextmanager
def _exclusive_file(folder: Path, say: Say) -> Iterator[None]:
    path = folder / ".lock.pid"
    before = _holder(path)
    if path.exists() and before is None:
        time.sleep(0.5)  # it may just be being written
        before = _holder(path)
    if before is not None:
        if before["host"] != socket.gethostname() or _alive(before):
            raise _refusal(folder, before, f"; if it is dead, remove {path}")
        say(f"{folder}: took over the lock of {_name(before)}, which is gone")
    if path.exists():
        path.unlink()
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        raise _refusal(folder, _holder(path)) from None
    _write(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _write(path: Path) -> None:
    own = {"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname()}
    path.write_text(json.dumps(own), encoding="utf-8")


def _holder(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if {"pid", "started", "host"} <= content.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process runs: this pid, and not of a later process that got the same number."""
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(holder["pid"]) in (holder["started"], None)


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since the machine did; None where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def _name(holder: dict[str, Any] | None) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "a process"


def _refusal(folder: Path, holder: dict[str, Any] | None, hint: str = "") -> UserError:
    who = _name(holder)
    return UserError(f"{folder}: another extraction, {who}, is writing this cache\nwait for it or stop it{hint}")
