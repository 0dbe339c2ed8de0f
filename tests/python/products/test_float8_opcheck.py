"""torch.library.opcheck on every FP8 op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from float8_calls import FLOAT8_CALLS, Operands
from guild._torch.gradients import ops  # registers every op


@pytest.mark.parametrize("name", list(FLOAT8_CALLS))
def test_op(name: str, device: str) -> None:
    opcheck(getattr(ops, name.split()[0]).default, FLOAT8_CALLS[name](Operands(device)))


@pytest.mark.parametrize("name", list(FLOAT8_CALLS))
def test_what_is_written_has_no_gradient(name: str) -> None:
    """An output that requires a gradient is refused with an error that names it."""
    arguments = list(FLOAT8_CALLS[name](Operands("cpu")))
    written = [
        i
        for i, a in enumerate(getattr(ops, name.split()[0]).default._schema.arguments)
        if a.alias_info is not None and i < len(arguments)
    ]
    floats = [i for i in written if isinstance(arguments[i], Tensor)]
    floats = [i for i in floats if arguments[i].is_floating_point()]
    for i in floats:
        given = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        given[i] = given[i].requires_grad_() * 1
        with pytest.raises(RuntimeError, match=f"guild::{name.split()[0]}"):
            getattr(ops, name.split()[0])(*given)
    with torch.no_grad():
        getattr(ops, name.split()[0])(*arguments)
