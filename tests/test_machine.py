"""Devices that are not there, and memory that runs out."""

import os
from itertools import chain

import pytest
import torch

from dflash_eval.errors import UserError
from dflash_eval.machine import Pieces, free_bytes, pick_device


def test_a_cuda_device_that_is_not_there_is_a_plain_error():
    with pytest.raises(UserError, match="PyTorch sees"):
        pick_device("cuda:64")
    with pytest.raises(UserError, match="not a device"):
        pick_device("gpu")


def test_pieces_cover_everything_once_and_halve_when_memory_runs_out(capsys):
    pieces = Pieces(10, "rows")

    def work(rows: slice) -> list[int]:
        if rows.stop - rows.start > 3:
            raise MemoryError
        return list(range(rows.start, rows.stop))

    assert list(chain(*pieces.run(25, work))) == list(range(25))
    assert pieces.size == 2
    assert capsys.readouterr().err.strip() == "out of memory at 10 rows: going on with half as many at once"
    assert list(chain(*pieces.run(7, work))) == list(range(7))
    assert capsys.readouterr().err == ""


def test_another_error_is_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="size"):
        Pieces(4, "rows").run(4, lambda _: torch.zeros(2) + torch.zeros(3))


def test_free_bytes_of_a_cpu_are_below_what_the_machine_has():
    assert 2**20 < free_bytes(torch.device("cpu")) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
