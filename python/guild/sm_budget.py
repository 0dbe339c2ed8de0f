"""How many multiprocessors Guild's kernels may fill, and whether they have them to themselves."""

from __future__ import annotations

from guild._torch.checks import expect_count, expect_flags
from guild._torch.operators import ops


def num_sms() -> int:
    """The budget that `set_num_sms` set; 0 for all multiprocessors."""
    return ops.num_sms()


def set_num_sms(count: int, *, shared: bool | None = None) -> None:
    """Limit the grouped products to `count` multiprocessors of each GPU.

    Holds for the whole process from the next launch on, on every thread, as backward runs on
    threads of its own; kernels already captured in a CUDA graph keep theirs. CPU tensors are not
    affected.

    Parameters
    ----------
    count : int
        0 or more; 0, or more than the GPU has, is all of them.
    shared : bool, optional
        Whether other kernels run at the same time, such as communication. Products then hand out
        tiles one at a time to whichever block is free, so that a block whose multiprocessor is
        taken starts late and has less to do. Results have the same bits. Default: if count is not
        0.

    Raises
    ------
    TypeError, ValueError
        If count is not an integer or is negative, or shared is not a bool.
    """
    expect_count("count", count, 0)
    shared = count != 0 if shared is None else shared
    expect_flags(shared=shared)
    ops.set_num_sms(count, shared)
