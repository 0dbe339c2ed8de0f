"""How many multiprocessors Guild's kernels may fill: fewer leave room for communication."""

from __future__ import annotations

from guild._torch.checks import expect_count
from guild._torch.operators import ops


def num_sms() -> int:
    """The budget that `set_num_sms` set; 0 for all multiprocessors."""
    return ops.num_sms()


def set_num_sms(count: int) -> None:
    """Limit the grouped products to `count` multiprocessors of each GPU.

    Holds for the whole process from the next launch on, on every thread, as backward runs on
    threads of its own; kernels already captured in a CUDA graph keep theirs. CPU tensors are not
    concerned.

    Parameters
    ----------
    count : int
        0 or more; 0, or more than the GPU has, is all of them.

    Raises
    ------
    TypeError, ValueError
        If count is no whole number, or negative.
    """
    expect_count("count", count, 0)
    ops.set_num_sms(count)
