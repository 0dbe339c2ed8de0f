"""Sizes whose products pass 2^31 elements: on a GPU, against samples computed in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import guild
from guild import grouped_mm, grouped_mm_downproj, grouped_mm_swiglu

GIB = 1 << 30


@pytest.fixture
def roomy_gpu(gpu: str) -> str:
    """A GPU with 100 GiB free; an H100 of 80 GiB skips these."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 100 * GIB:
        pytest.skip(f"needs 100 GiB of GPU memory, {free / GIB:.0f} GiB are free")
    return gpu


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Fresh bfloat16 normals on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale).requires_grad_()


def close(value: Tensor, expected: Tensor) -> None:
    """Raise unless they agree to two bfloat16 roundings, in norm."""
    error = (value.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01, f"relative error {error:.3g}"


def test_rows_past_2_31(roomy_gpu: str) -> None:
    """x, o and dx of 2.25e9 elements; routing to 4 experts, the last rows checked."""
    tokens, hidden, inner, experts = 1_100_000, 2048, 64, 4
    assert tokens * hidden > 1 << 31
    x, w_up, w_down = (
        normal(tokens, hidden),
        normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
        normal(experts, hidden, inner, scale=inner**-0.5),
    )
    ids = (torch.arange(tokens, device="cuda") % experts)[:, None]
    weights = torch.ones(tokens, 1, device="cuda")
    out = guild.routed_experts(x, ids, weights, w_up, w_down)
    last = slice(tokens - 8, tokens)
    with torch.no_grad():
        h = torch.einsum("tih,th->ti", w_up[ids[last, 0]].float(), x[last].float())
        a = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
        close(out[last], torch.einsum("thi,ti->th", w_down[ids[last, 0]].float(), a))
    out.backward(x.detach())
    assert x.grad[last].float().norm() > 0
    # Results of an expert's rows do not depend on their place: run the last ones again alone.
    small = x.detach()[last].clone().requires_grad_()
    guild.routed_experts(small, ids[last], weights[last], w_up.detach(), w_down.detach()).backward(
        x.detach()[last]
    )
    close(x.grad[last], small.grad)


def test_weights_past_2_31(roomy_gpu: str) -> None:
    """256 experts of DeepSeek-V3's size: 7.5e9 elements of w_up, 3.8e9 of w_down."""
    hidden, inner, experts, tokens = 7168, 2048, 256, 64
    w_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    w_down = normal(experts, hidden, inner, scale=inner**-0.5)
    x = normal(tokens, hidden)
    ids = torch.arange(tokens, device="cuda")[:, None] + experts - tokens
    weights = torch.ones(tokens, 1, device="cuda")
    out = guild.routed_experts(x, ids, weights, w_up, w_down)
    out.backward(torch.ones_like(out))
    with torch.no_grad():
        h = w_up[-1].float() @ x[-1].float()
        a = torch.nn.functional.silu(h[:inner]) * h[inner:]
        close(out[-1], w_down[-1].float() @ a)
        close(w_down.grad[-1], torch.ones(hidden, 1, device="cuda") * a)
    assert not w_up.grad[: experts - tokens].any()
    assert w_up.grad[-1].float().norm() > 0


def test_pair_past_2_32(roomy_gpu: str) -> None:
    """gpt-oss's I = 2880 with 750,000 rows: aux has 4.3e9 elements."""
    rows, hidden, inner, experts = 750_000, 64, 2880, 4
    assert rows * 2 * inner > 1 << 32
    x = normal(rows, hidden)
    w_up, w_down = normal(experts, hidden, 2 * inner, scale=0.1), normal(experts, inner, hidden)
    offs = torch.tensor([1000, 1000, 2000, rows], dtype=torch.int32, device="cuda")
    a, aux = grouped_mm_swiglu(x, w_up, offs)
    out = grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux)
    out.backward(torch.ones_like(out))
    last = slice(rows - 4, rows)
    with torch.no_grad():
        h = x[last].float() @ w_up[-1].float()
        close(aux[last], h)
        gate, up = h[:, 0::2].clamp(max=7), h[:, 1::2].clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        close(a[last], expected)
        close(out[last], expected @ w_down[-1].float())
    small = x.detach()[last].clone().requires_grad_()
    few = torch.tensor([0, 0, 0, 4], dtype=torch.int32, device="cuda")
    weights = w_up.detach(), w_down.detach()
    b, aux = grouped_mm_swiglu(small, weights[0], few)
    down = grouped_mm_downproj(b, weights[1], few, aux_biased_acc=aux)
    down.backward(torch.ones_like(down))
    close(x.grad[last], small.grad)


def test_grouped_mm_past_2_31(roomy_gpu: str) -> None:
    """A result of 2.4e9 elements, and rows past the last group that are zero."""
    rows, inner, columns = 1_200_000, 64, 2048
    a, b = normal(rows, inner), normal(2, inner, columns)
    offs = torch.tensor([1000, rows - 3], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        out = grouped_mm(a, b, offs)
        close(out[-7:-3], a[-7:-3].float() @ b[1].float())
        assert not out[-3:].any()
