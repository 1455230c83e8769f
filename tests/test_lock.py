"""One writer a cache: a second one is refused by name, a dead one is in nobody's way."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest
from conftest import write_config

from dflash_eval.config import load_config
from dflash_eval.errors import UserError
from dflash_eval.extract import extract
from dflash_eval.lock import lock

HOST = socket.gethostname()


@pytest.fixture(params=["flock", "no flock"])
def kind(request, monkeypatch):
    """With and without a file system that has locks."""
    if request.param == "no flock":

        def refused(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(fcntl, "flock", refused)
    return request.param


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave_lock(folder, kind, **holder) -> None:
    name = ".lock" if kind == "flock" else ".lock.pid"
    (folder / name).write_text(json.dumps({"pid": dead_pid(), "started": "1", "host": HOST, **holder}))


def test_a_second_writer_is_refused_with_the_first_ones_pid_and_host(tmp_path, kind):
    named = f"another extraction, process {os.getpid()} on {HOST}, is writing"
    with lock(tmp_path):
        for _ in range(2):  # a refusal leaves the first one's name
            with pytest.raises(UserError, match=named), lock(tmp_path):
                pass
    with lock(tmp_path):
        pass


def test_a_lock_that_a_dead_process_left_is_taken_over_and_said(tmp_path, kind):
    leave_lock(tmp_path, kind)
    said = []
    with lock(tmp_path, said.append), pytest.raises(UserError, match=f"process {os.getpid()}"), lock(tmp_path):
        pass
    assert "took over the lock of process" in said[0]
    said.clear()
    with lock(tmp_path, said.append):  # a run that ended leaves nothing to take over
        pass
    assert not said


def test_a_later_process_with_the_dead_ones_number_does_not_hold_its_lock(tmp_path, kind):
    leave_lock(tmp_path, kind, pid=os.getpid())
    with lock(tmp_path):
        pass


def test_what_runs_on_another_host_cannot_be_told_dead_without_flock(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
    leave_lock(tmp_path, "no flock", host="elsewhere")
    with pytest.raises(UserError, match=r"on elsewhere(.|\n)*if it is dead, remove .*\.lock\.pid"), lock(tmp_path):
        pass


def test_extract_goes_on_after_a_run_that_died_with_the_lock(tiny, tmp_path):
    config = load_config(write_config(tmp_path, tiny.target, [("a", tiny.drafter)]))
    config.cache_dir.mkdir()
    leave_lock(config.cache_dir, "flock")
    said = []
    extract(config, say=said.append)
    assert "took over" in said[0]
    with lock(config.cache_dir), pytest.raises(UserError, match="another extraction"):
        extract(config, say=lambda _: None)


def test_a_lock_file_that_cannot_be_made_is_a_plain_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock: cannot be made"), lock(tmp_path):
        pass
