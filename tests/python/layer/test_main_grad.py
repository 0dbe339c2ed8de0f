"""`main_grad` of single parameters and of lists, and the contract that trainers have about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import guild
from guild import WeightGradients, experts_mlp, routed_experts
from listed_layers import EXPERTS, HIDDEN, INNER, dtype_of, whole_layer

OLD = 3.0  # what every main_grad holds before


def single(t: Tensor) -> list[nn.Parameter]:
    parameter = nn.Parameter(t.clone())
    parameter.main_grad = torch.full_like(t, OLD, dtype=torch.float32)
    return [parameter]


def even(t: Tensor) -> list[nn.Parameter]:
    parts = [nn.Parameter(part) for part in t.clone()]
    for part, main in zip(parts, torch.full_like(t, OLD, dtype=torch.float32), strict=True):
        part.main_grad = main
    return parts


def uneven(t: Tensor) -> list[nn.Parameter]:
    """main_grads in the opposite order, as a buffer filled from the last parameter has them."""
    parts = [nn.Parameter(part) for part in t.clone()]
    mains = torch.full_like(t, OLD, dtype=torch.float32)
    for part, main in zip(parts, mains.unbind(0)[::-1], strict=True):
        part.main_grad = main
    return parts


MADE = [single, even, uneven]


def run(layer: dict[str, list[nn.Parameter]], device: str, sink: WeightGradients) -> Tensor:
    """x's gradient."""
    torch.manual_seed(1)
    x = torch.randn(24, HIDDEN, device=device, dtype=dtype_of(device), requires_grad=True)
    offsets = torch.tensor([0, 9, 9, 14, 24], device=device, dtype=torch.int32)
    given = {n: ps[0] if len(ps) == 1 else ps for n, ps in layer.items()}
    experts_mlp(x, offsets, **given, weight_gradients=sink).square().sum().backward()
    return x.grad


def plain(device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of x and of the weights, by autograd."""
    layer = {n: [nn.Parameter(t)] for n, t in whole_layer(device).items()}
    dx = run(layer, device, None)
    return dx, {n: ps[0].grad.float() for n, ps in layer.items()}


def mains(parts: list[nn.Parameter]) -> Tensor:
    return parts[0].main_grad if len(parts) == 1 else torch.stack([p.main_grad for p in parts])


@pytest.fixture(autouse=True)
def copies_are_expected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", guild.CopiedWeightsWarning)
        yield


def close(device: str) -> dict[str, float]:
    return {"rtol": 1e-6, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 5e-2}


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_gradients_are_added(device: str, made: Callable, delayed: bool) -> None:
    """They are added in float32, in place, wherever the tensors lie."""
    dx, gradients = plain(device)
    layer = {n: made(t) for n, t in whole_layer(device).items()}
    places = {p.main_grad.data_ptr() for ps in layer.values() for p in ps}
    sink = WeightGradients(main_grad=True, delayed=delayed)
    for passes in (1, 2):
        assert torch.equal(run(layer, device, sink), dx)
        if delayed and passes == 1:
            assert all((mains(ps) == OLD).all() for ps in layer.values())
        sink.compute()
        for name, ps in layer.items():
            assert all(p.grad is None for p in ps)
            wanted = OLD + passes * gradients[name]
            torch.testing.assert_close(mains(ps), wanted, **close(device))
    assert {p.main_grad.data_ptr() for ps in layer.values() for p in ps} == places


def test_main_grads_are_written_in_place(device: str) -> None:
    """Unless one of them wants no gradient: then gradients go through a tensor of their own."""
    for made in (even, uneven):
        layer = {n: made(t) for n, t in whole_layer(device).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error", guild.CopiedWeightsWarning)
            run(layer, device, WeightGradients(main_grad=True))
    layer["w_down"][1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", guild.CopiedWeightsWarning)
        with pytest.raises(guild.CopiedWeightsWarning, match="'s gradients: the experts' tensors"):
            run(layer, device, WeightGradients(main_grad=True))


def test_copied_gradients_are_reported_where_the_caller_is() -> None:
    """Once for each line that calls backward or compute."""
    layer = {n: uneven(t) for n, t in whole_layer("cpu").items()}
    layer["w_down"][1].requires_grad_(False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default", guild.CopiedWeightsWarning)
        for _ in range(2):
            run(layer, "cpu", WeightGradients(main_grad=True))
        sink = WeightGradients(main_grad=True, delayed=True)
        run(layer, "cpu", sink)
        sink.compute()
    assert [w.filename for w in said] == [__file__] * 2
    assert said[0].lineno != said[1].lineno


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_hooks_of_waiting_parameters_run(device: str, made: Callable, delayed: bool) -> None:
    """`grad_added_to_main_grad`: autograd reaches the parameter, as a trainer's hooks need."""
    _, gradients = plain(device)
    layer = {n: made(t) for n, t in whole_layer(device).items()}
    reached, sink = [], WeightGradients(main_grad=True, delayed=delayed)

    def hook(parameter: nn.Parameter) -> Callable:
        def done(*_: object) -> None:
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad_added_to_main_grad
            reached.append(parameter.grad.untyped_storage().data_ptr())
            parameter.grad = None

        return done

    kept = []
    for parts in layer.values():
        for p in parts:
            p.grad_added_to_main_grad = False
            kept.append(p.expand_as(p).grad_fn.next_functions[0][0])
            kept[-1].register_hook(hook(p))
    run(layer, device, sink)
    assert len(reached) == sum(map(len, layer.values()))
    if made is not single:  # one memory for all experts' meaningless gradients
        assert len(set(reached)) <= len(layer)
    sink.compute()
    for name, ps in layer.items():
        torch.testing.assert_close(mains(ps), OLD + gradients[name], **close(device))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_beside_frozen_low_rank_terms(device: str, made: Callable, routed: bool) -> None:
    """Nothing but lists may want a gradient; parameters that wait for autograd are reached."""
    kind = {"device": device, "dtype": dtype_of(device)}
    torch.manual_seed(1)
    x = torch.randn(24, HIDDEN, **kind)
    low = guild.LoRA(torch.randn(EXPERTS, 8, HIDDEN, **kind), torch.zeros(EXPERTS, 16, 8, **kind))

    def out(layer: dict[str, list[nn.Parameter]], sink: WeightGradients | None) -> Tensor:
        given = {n: ps[0] if len(ps) == 1 else ps for n, ps in layer.items()}
        given |= {"weight_gradients": sink, "lora_up": low}
        if routed:
            ids = torch.arange(48, device=device).view(24, 2) % EXPERTS
            return routed_experts(x, ids, torch.ones(24, 2, device=device), **given)
        offsets = torch.tensor([0, 9, 9, 14, 24], device=device, dtype=torch.int32)
        return experts_mlp(x, offsets, **given)

    autograd = {n: [nn.Parameter(t)] for n, t in whole_layer(device).items()}
    out(autograd, None).square().sum().backward()
    layer = {n: made(t) for n, t in whole_layer(device).items()}
    reached = []
    for p in [p for ps in layer.values() for p in ps]:
        p.grad_added_to_main_grad = False
        p.register_post_accumulate_grad_hook(lambda p: reached.append(p.grad.shape == p.shape))
    out(layer, WeightGradients(main_grad=True)).square().sum().backward()
    assert reached == [True] * sum(map(len, layer.values()))
    for name, ps in layer.items():
        torch.testing.assert_close(mains(ps), OLD + autograd[name][0].grad.float(), **close(device))


@pytest.mark.parametrize("made", MADE)
def test_gradients_without_meaning_may_have_to_be_zero(device: str, made: Callable) -> None:
    layer = {n: made(t) for n, t in whole_layer(device).items()}
    for parts in layer.values():
        for p in parts:
            p.grad_added_to_main_grad, p.zero_out_wgrad = False, True
    run(layer, device, WeightGradients(main_grad=True))
    for parts in layer.values():
        assert all(p.grad is not None and not p.grad.any() for p in parts)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("which", ["all", "first"])
def test_main_grad_may_be_overwritten(device: str, made: Callable, which: str) -> None:
    """Also where one parameter of several that are written together asks for it."""
    _, gradients = plain(device)
    layer = {n: made(t) for n, t in whole_layer(device).items()}
    for parts in layer.values():
        for p in parts if which == "all" else parts[:1]:
            p.overwrite_main_grad = True
    run(layer, device, WeightGradients(main_grad=True))
    for name, ps in layer.items():
        old = torch.full_like(gradients[name], OLD)
        old[: None if which == "all" or made is single else 1] = 0
        torch.testing.assert_close(mains(ps), old + gradients[name], **close(device))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_one_parameter_for_all_experts(device: str, main_grad: bool, overwrite: bool) -> None:
    """Its gradients add up, and only what was there before is overwritten."""
    layer = {n: even(t) for n, t in whole_layer(device).items()}
    shared = layer["w_down"][0]
    shared.overwrite_main_grad = overwrite
    layer["w_down"] = [shared] * EXPERTS
    run(layer, device, WeightGradients(main_grad=main_grad))
    apart = {n: single(t) for n, t in whole_layer(device).items()}
    whole = shared.detach().expand(EXPERTS, -1, -1).clone()
    apart["w_down"] = [nn.Parameter(whole)]
    run(apart, device, None)
    wanted = apart["w_down"][0].grad.float().sum(0)
    wanted += OLD if main_grad and not overwrite else 0
    got = shared.main_grad if main_grad else shared.grad.float()
    bound = (1e-5 if device == "cpu" else 2e-2) * float(wanted.abs().max())  # parts are rounded
    torch.testing.assert_close(got, wanted, rtol=0, atol=bound)


def test_main_grad_may_come_from_a_call(device: str) -> None:
    """`get_main_grad()` is asked in backward, not before."""
    _, gradients = plain(device)
    layer = {n: even(t) for n, t in whole_layer(device).items()}
    asked = []
    for parts in layer.values():
        for p in parts:
            main = p.main_grad
            del p.main_grad
            p.get_main_grad = lambda main=main: asked.append(1) or main
    sink = WeightGradients(main_grad=True, delayed=True)
    run(layer, device, sink)
    assert not asked
    sink.compute()
    assert len(asked) == sum(map(len, layer.values()))
    for name, ps in layer.items():
        torch.testing.assert_close(mains(ps), OLD + gradients[name], **close(device))


def test_main_grad_in_the_parameters_dtype(device: str) -> None:
    """As for trainers that do not keep float32 sums."""
    _, gradients = plain(device)
    layer = {n: even(t) for n, t in whole_layer(device).items()}
    for parts in layer.values():
        buffer = torch.stack([p.main_grad.to(p.dtype) for p in parts])
        for p, main in zip(parts, buffer, strict=True):
            p.main_grad = main
    run(layer, device, WeightGradients(main_grad=True))
    for name, ps in layer.items():
        torch.testing.assert_close(mains(ps).float(), OLD + gradients[name], **close(device))


@pytest.mark.parametrize("delayed", [False, True])
def test_main_grads_of_two_dtypes(device: str, delayed: bool) -> None:
    """Each in float32 or the parameter's dtype, whatever others have that one op writes with it."""
    _, gradients = plain(device)
    layer = {n: nn.Parameter(t) for n, t in whole_layer(device).items()}
    gate, up = map(nn.Parameter, layer["w_up"].detach().chunk(2, 1))
    layer["w_up"] = (gate, up)
    for p in (gate, up, *list(layer.values())[1:]):
        wide = p is gate or p is layer["b_up"]
        p.main_grad = torch.full_like(p, OLD, dtype=torch.float32 if wide else p.dtype)
    sink = WeightGradients(main_grad=True, delayed=delayed)
    run(layer, device, sink)
    sink.compute()
    layer["w_up"] = [gate, up]
    gradients["w_up"] = torch.stack(gradients["w_up"].chunk(2, 1))
    for name, ps in layer.items():
        got = mains(ps) if name == "w_up" else ps.main_grad
        torch.testing.assert_close(got.float(), OLD + gradients[name], **close(device))


def test_nothing_is_written_if_a_target_is_gone() -> None:
    """`compute` can be repeated when the target is back."""
    _, gradients = plain("cpu")
    layer = {n: even(t) for n, t in whole_layer("cpu").items()}
    sink = WeightGradients(main_grad=True, delayed=True)
    run(layer, "cpu", sink)
    main, layer["b_up"][1].main_grad = layer["b_up"][1].main_grad, None
    with pytest.raises(ValueError, match=r"b_up\[1\]\.main_grad: expected a float32 tensor"):
        sink.compute()
    assert sink.pending == 1
    layer["b_up"][1].main_grad = main
    sink.compute()
    for name, ps in layer.items():
        torch.testing.assert_close(mains(ps), OLD + gradients[name], **close("cpu"))


def test_frozen_members_and_halves(device: str) -> None:
    """Of a pair of lists: a half that wants nothing, an expert that wants nothing."""
    whole = whole_layer(device)
    gate, up = whole.pop("w_up").chunk(2, 1)
    layer = {n: even(t) for n, t in whole.items()}
    gates, ups = even(gate.contiguous()), even(up.contiguous())
    for p in gates:
        p.requires_grad_(False)
    layer["w_down"][1].requires_grad_(False)
    _, gradients = plain(device)
    torch.manual_seed(1)
    x = torch.randn(24, HIDDEN, device=device, dtype=dtype_of(device))
    offsets = torch.tensor([0, 9, 9, 14, 24], device=device, dtype=torch.int32)
    sink = WeightGradients(main_grad=True)
    out = experts_mlp(x, offsets, (gates, ups), **layer, weight_gradients=sink)
    out.square().sum().backward()
    assert all((p.main_grad == OLD).all() for p in (*gates, layer["w_down"][1]))
    wanted = OLD + gradients["w_up"][:, INNER:]
    torch.testing.assert_close(mains(ups), wanted, **close(device))
    for e in (0, 2, 3):
        main = layer["w_down"][e].main_grad
        torch.testing.assert_close(main, OLD + gradients["w_down"][e], **close(device))


def test_routed_tokens_and_lists(device: str) -> None:
    """Only the weights want gradients; x and the scores are data."""
    torch.manual_seed(2)
    x = torch.randn(20, HIDDEN, device=device, dtype=dtype_of(device))
    ids = torch.arange(20, device=device)[:, None] % EXPERTS
    scores = torch.rand(20, 1, device=device)
    whole = {n: nn.Parameter(t) for n, t in whole_layer(device).items()}
    routed_experts(x, ids, scores, **whole).sum().backward()
    layer = {n: even(t) for n, t in whole_layer(device).items()}
    sink = WeightGradients(main_grad=True)
    routed_experts(x, ids, scores, **layer, weight_gradients=sink).sum().backward()
    for name, ps in layer.items():
        wanted = OLD + whole[name].grad.float()
        torch.testing.assert_close(mains(ps), wanted, **close(device))


def test_one_parameter_as_both_weights(device: str) -> None:
    """Both gradients are added; overwriting is refused, as the second would replace the first."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    one = nn.Parameter(torch.randn(2, 16, 16, device=device, dtype=dtype) / 4)
    x = torch.randn(6, 16, device=device, dtype=dtype)
    ids = torch.tensor([[0, 1]] * 6, device=device)
    relu = guild.Activation("relu", gated=False)
    scores = torch.rand(6, 2, device=device)

    def call(**options: object) -> Tensor:
        return routed_experts(x, ids, scores, one, one, activation=relu, **options)

    call().sum().backward()
    wanted = one.grad.float()
    one.grad, one.main_grad = None, torch.ones_like(one, dtype=torch.float32)
    call(weight_gradients=WeightGradients(main_grad=True)).sum().backward()
    bound = (1e-5 if device == "cpu" else 2e-2) * float(wanted.abs().max())
    torch.testing.assert_close(one.main_grad, 1 + wanted, rtol=0, atol=bound)
    one.overwrite_main_grad = True
    with pytest.raises(ValueError, match=r"^w_down: expected another parameter than w_up where"):
        call(weight_gradients=WeightGradients(main_grad=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"w_down\[2\]\.main_grad: expected a float32 tensor, got None"),
        ("dtype", r"w_down\[2\]\.main_grad: expected float32 of shape \(16, 8\), got float16"),
        ("leaf", r"w_down\[2\]: expected a parameter"),
        ("twice", r"w_up\[1\] \(up\): expected another parameter than w_up\[0\]"),
    ],
)
def test_wrong_lists(change: str, message: str) -> None:
    layer = {n: even(t) for n, t in whole_layer("cpu").items()}
    if change == "missing":
        del layer["w_down"][2].main_grad
    elif change == "dtype":
        layer["w_down"][2].main_grad = layer["w_down"][2].main_grad.half()
    elif change == "leaf":
        layer["w_down"][2] = layer["w_down"][2] * 1
    else:
        halves = even(whole_layer("cpu")["w_up"][:, :INNER].contiguous())
        layer["w_up"] = (halves, halves)
    with pytest.raises(ValueError, match=message):
        run(layer, "cpu", WeightGradients(main_grad=True))
