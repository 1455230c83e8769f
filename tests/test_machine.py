"""Devices that are not there."""

import pytest

from dflash_eval.errors import UserError
from dflash_eval.machine import pick_device


def test_a_cuda_device_that_is_not_there_is_a_plain_error():
    with pytest.raises(UserError, match="PyTorch sees"):
        pick_device("cuda:64")
    with pytest.raises(UserError, match="not a device"):
        pick_device("gpu")
