"""torch.compile(fullgraph=True) through every public function: eager's results, no graph break."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import guild
from layers import ACTIVATIONS, Case, make_layer

CASE = Case("compile", 10, 16, 8, 4, 2, "random", frozenset())


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Drop what earlier tests have compiled."""
    torch._dynamo.reset()


def dtype_of(device: str) -> torch.dtype:
    """A dtype that the device's backend computes in."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def gradients(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Result and gradients of all inputs, for one fixed incoming gradient."""
    out = call(*inputs)
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def assert_same(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], backend: str) -> None:
    """Compiled and eager results agree; without inductor, bit for bit."""
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    exact = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {"rtol": 2e-2, "atol": 2e-3}
    pairs = zip(gradients(compiled, inputs), gradients(call, inputs), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, **exact)


def layer_inputs(device: str) -> tuple[Tensor, ...]:
    """x, scores, weights and biases that want gradients; ids come with the layer."""
    layer = make_layer(CASE, ACTIVATIONS["gpt_oss"], dtype_of(device), device)
    a = layer.arguments("concatenated")
    tensors = (layer.x, layer.scores, a["w_up"], a["w_down"], a["b_up"], a["b_down"])
    return layer.ids, tuple(t.detach().requires_grad_() for t in tensors)


def test_routed_experts(device: str) -> None:
    """The whole layer as one op and its backward as another."""
    ids, inputs = layer_inputs(device)

    def call(x: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
        return guild.routed_experts(x, ids, scores, *weights, activation="gpt_oss") * 2

    assert_same(call, inputs, "aot_eager")


def test_experts_mlp(device: str) -> None:
    """Sorted rows, transposed weights."""
    _, (x, _, w_up, w_down, *_) = layer_inputs(device)
    offsets = torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32, device=device)

    def call(x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return guild.experts_mlp(x, offsets, w_up.mT, w_down.mT, transposed=True)

    assert_same(call, (x, w_up, w_down), "aot_eager")


@pytest.mark.parametrize("case", ["rows", "inner"])
def test_grouped_mm(case: str, device: str) -> None:
    """A product with a bias and a float32 result."""
    dtype = dtype_of(device)
    offs = torch.tensor([8, 8, 16], dtype=torch.int32, device=device)
    shapes = {"rows": ((24, 16), (3, 16, 8)), "inner": ((16, 24), (24, 8))}[case]
    a, b, bias = (
        torch.randn(s, device=device).to(dtype).requires_grad_() for s in (*shapes, (3, 8))
    )

    def call(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return guild.grouped_mm(a, b, offs, bias, out_dtype=torch.float32)

    assert_same(call, (a, b, bias), "aot_eager")


def test_pair(device: str) -> None:
    """The fused pair with aux, and swiglu_out used on its own beside it."""
    dtype = dtype_of(device)
    offs = torch.tensor([8, 8, 20], dtype=torch.int32, device=device)
    shapes = ((24, 16), (3, 16, 16), (3, 16), (3, 8, 16))
    inputs = tuple(torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)

    def call(x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor) -> Tensor:
        a, aux = guild.grouped_mm_swiglu(x, w_up, offs, b_up)
        return guild.grouped_mm_downproj(a, w_down, offs, aux_biased_acc=aux).sum(1) + a.sum(1)

    assert_same(call, inputs, "aot_eager")


def moe_of(device: str) -> guild.MoE:
    """A module with every option on."""
    torch.manual_seed(0)
    return guild.MoE(
        16,
        8,
        4,
        2,
        bias=True,
        shared_experts=1,
        router=guild.Router(score="sigmoid", selection_bias=True, groups=2),
        device=device,
        dtype=dtype_of(device),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_moe(backend: str, device: str) -> None:
    """The module, with shared experts; its counts stay readable after compiled calls."""
    moe = moe_of(device)
    x = torch.randn(2, 6, 16, device=device).to(dtype_of(device)).requires_grad_()
    inputs = (x, *moe.parameters())
    names = [name for name, _ in moe.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), (x,))

    assert_same(call, inputs, backend)
    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    compiled(x[:, :3]).float().sum().backward()  # not as many tokens as in the calls before
    assert int(moe.expert_counts.sum()) == 12


def test_input_weighting(device: str) -> None:
    """Llama 4's router, and padding."""
    moe = guild.MoE(16, 8, 4, 1, router="llama4", device=device, dtype=dtype_of(device))
    x = torch.randn(6, 16, device=device).to(dtype_of(device)).requires_grad_()
    mask = torch.arange(6, device=device) % 3 != 1
    names = [name for name, _ in moe.named_parameters()]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), (x, mask))

    assert_same(call, (x, *moe.parameters()), "aot_eager")


def test_other_numbers_of_tokens(device: str) -> None:
    """dynamic=True: one graph for every number of tokens."""
    moe = moe_of(device)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9, 17):
        x = torch.randn(tokens, 16, device=device).to(dtype_of(device))
        torch.testing.assert_close(compiled(x), moe(x), rtol=0, atol=0)


def test_sizes_of_weights_are_unknown(device: str) -> None:
    """dynamic=True where weights are inputs, too, and w_up is square."""
    ids, inputs = layer_inputs(device)
    call = torch.compile(guild.routed_experts, fullgraph=True, backend="eager", dynamic=True)
    x, scores, *weights = inputs
    assert weights[0].shape[1] == weights[0].shape[2]
    assert torch.equal(
        call(x, ids, scores, *weights), guild.routed_experts(x, ids, scores, *weights)
    )


def test_sizes_of_low_rank_factors_are_unknown() -> None:
    """dynamic=True with factors as PEFT stores them."""
    ids, (x, scores, *weights) = layer_inputs("cpu")
    experts, outputs, inputs = weights[0].shape
    a, b = torch.randn(experts * 3, inputs), torch.randn(outputs, 3 * experts)
    a, b = a.to(x.dtype), b.to(x.dtype)

    def call(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return guild.routed_experts(x, ids, scores, *weights, lora_up=guild.LoRA(a, b))

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x, a, b), call(x, a, b))


def test_export(device: str) -> None:
    """torch.export sees one graph too."""
    moe = moe_of(device).eval()
    x = torch.randn(6, 16, device=device).to(dtype_of(device))
    with torch.no_grad():
        exported = torch.export.export(moe, (x,)).module()
        torch.testing.assert_close(exported(x), moe(x), rtol=0, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_token_rounding(strict: bool) -> None:
    """For any number of tokens: lists of few have another limit than those of many."""
    torch.manual_seed(0)
    router = guild.Router(rounding="nearest", tile=16)
    moe = guild.MoE(16, 8, 4, 2, router=router).train()
    shapes = ({0: torch.export.Dim("tokens", min=1, max=4096)},)
    program = torch.export.export(moe, (torch.randn(40, 16),), dynamic_shapes=shapes, strict=strict)
    for tokens in (1, 2, 9, 100):
        x = torch.randn(tokens, 16)
        assert torch.equal(program.module()(x), moe(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_what_a_layer_keeps(strict: bool) -> None:
    """It would be that of the last call before."""
    moe, x = guild.MoE(16, 8, 4, 2, balance_over="batch"), torch.randn(6, 16)
    moe(x)
    for name in ("load_balancing_loss", "z_loss", "balance_sums", "expert_counts"):
        read = _Reads(moe, name)
        with pytest.raises(Exception, match=r"expected to be read outside torch\.export"):
            torch.export.export(read, (x,), strict=strict)


class _Reads(torch.nn.Module):
    def __init__(self, moe: guild.MoE, name: str) -> None:
        super().__init__()
        self.moe, self.name = moe, name

    def forward(self, x: torch.Tensor) -> tuple:
        return self.moe(x), getattr(self.moe, self.name)


LOADS_A_PACKAGE = """
import sys, torch
with torch.no_grad():
    program = torch.export.export(torch.nn.Linear(4, 4, device="cuda"), (torch.ones(2, 4).cuda(),))
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch._inductor.aoti_load_package(sys.argv[1])
"""


def test_package_of_aotinductor(device: str, tmp_path: Path) -> None:
    """A program compiled ahead of time, with another number of tokens than its example."""
    if device == "cuda":  # there are machines on which torch 2.11 crashes when it loads any package
        command = [sys.executable, "-c", LOADS_A_PACKAGE, str(tmp_path / "linear.pt2")]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this PyTorch cannot load the package of a torch.nn.Linear")
    moe = moe_of(device).eval()
    x = torch.randn(9, 16, device=device).to(dtype_of(device))
    with torch.no_grad():
        shapes = ({0: torch.export.Dim("tokens", min=2, max=64)},)
        exported = torch.export.export(moe, (x[:6],), dynamic_shapes=shapes)
        file = str(tmp_path / "moe.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=file)
        loaded = torch._inductor.aoti_load_package(file)
        torch.testing.assert_close(loaded(x), moe(x), rtol=0, atol=0)


def test_meta_tensors() -> None:
    """Shapes without data."""
    moe = guild.MoE(16, 8, 4, 2, shared_experts=1, device="meta")
    x = torch.empty(3, 5, 16, device="meta", requires_grad=True)
    out = moe(x)
    assert out.shape == x.shape and out.device.type == "meta"
    out.sum().backward()
    assert x.grad.shape == x.shape and moe.w_up.grad.shape == moe.w_up.shape


def test_activation_made_inside() -> None:
    """The checks of an activation's numbers can be traced."""
    x = torch.randn(4, 6)

    @torch.compile(fullgraph=True, backend="eager")
    def activated(x: torch.Tensor) -> torch.Tensor:
        return guild.Activation("silu", alpha=1.5, limit=2.0, up_offset=0.5)(x)

    expected = guild.Activation("silu", alpha=1.5, limit=2.0, up_offset=0.5)(x)
    torch.testing.assert_close(activated(x), expected)


def test_numbers_of_numpy() -> None:
    """A router keeps Python's numbers: the compiler makes tensors of others."""
    router = guild.Router(scale=np.float32(2.5), sum_floor=np.float64(0.5))
    assert type(router.scale) is type(router.sum_floor) is float
    moe, x = guild.MoE(16, 8, 4, 2, router=router), torch.randn(5, 16)
    assert torch.equal(torch.compile(moe, fullgraph=True, backend="eager")(x), moe(x))


@pytest.mark.parametrize("fp8", [None, guild.FP8()])
def test_compiled_autograd(fp8: guild.FP8 | None) -> None:
    """Eager ops in a backward that is compiled: each layer's with its own settings."""
    torch.manual_seed(0)
    more = {"fp8": fp8, "dtype": torch.float32 if fp8 is None else torch.bfloat16}
    layers = [guild.MoE(16, 8, 4, 2, activation, **more) for activation in ("silu", "geglu")]
    x = torch.randn(6, 16, dtype=more["dtype"])
    weight = torch.randn(2, 16, 4, dtype=x.dtype, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    for layer in layers:
        inputs = [*layer.parameters(), weight]
        loss = guild.grouped_mm(layer(x), weight, offs=ends).square().sum()
        expected = torch.autograd.grad(loss, inputs, retain_graph=True)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward(inputs=inputs)
        for tensor, gradient in zip(inputs, expected, strict=True):
            assert torch.equal(tensor.grad, gradient)
            tensor.grad = None


@pytest.mark.parametrize("fp8", [None, guild.FP8()])
@pytest.mark.parametrize("delayed", [False, True])
def test_compiled_autograd_would_lose_what_is_written(delayed: bool, fp8: guild.FP8 | None) -> None:
    """It writes back the `.grad` that it has read before: refused, and nothing is written."""
    gradients = guild.WeightGradients(delayed=delayed)
    dtype = torch.float32 if fp8 is None else torch.bfloat16
    layer = guild.MoE(16, 8, 4, 2, weight_gradients=gradients, fp8=fp8, dtype=dtype)
    loss = layer(torch.randn(6, 16, dtype=dtype)).sum()
    message = "weight_gradients: expected backward without compiled autograd"
    with compiled_autograd._enable(torch.compile(backend="eager")):
        with pytest.raises(NotImplementedError, match=message):
            loss.backward()
    assert layer.w_up.grad is layer.w_down.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_experts": 1, "bias": True},
        {"recompute": True},
        {"balance_over": "batch"},
        {"fp8": guild.FP8(), "dtype": torch.bfloat16},
        {"router": guild.Router("sigmoid", selection_bias=True)},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_number_of_tokens_that_only_data_tell(options: dict[str, Any]) -> None:
    """Tokens chosen by a mask, none among the cases, with gradients and without."""
    torch.manual_seed(0)
    moe = guild.MoE(16, 8, 4, 2, **options)

    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        out = moe(x[mask])
        return out if moe.balance_over is None else out + moe.load_balancing_loss

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
        for count in (7, 0, 3):
            x = torch.randn(12, 16, dtype=moe.w_up.dtype, requires_grad=True)
            mask = torch.arange(12) < count
            with torch.no_grad():
                assert torch.equal(compiled(x, mask), chosen(x, mask))
            found, expected = (
                torch.autograd.grad(call(x, mask).sum(), [x, moe.w_up])
                for call in (compiled, chosen)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("over", [None, "batch"])
def test_transforms(over: str | None, backend: str) -> None:
    """torch.func's grad and vmap in a compiled function leave none of their tensors in a layer."""
    torch.manual_seed(0)
    layer = guild.MoE(16, 8, 4, 2, balance_over=over).requires_grad_(False)
    x = torch.randn(2, 5, 16)
    each = torch.func.grad(lambda x: layer(x).square().sum())
    for transformed in (each, torch.func.vmap(lambda x: layer(x)), torch.func.vmap(each)):
        layer(x)
        found = torch.compile(transformed, fullgraph=True, backend=backend)(x)
        assert layer.expert_counts is layer.balance_sums is None
        torch.testing.assert_close(found, transformed(x))
