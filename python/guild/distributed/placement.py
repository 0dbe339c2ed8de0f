"""Where a model's weights lie: experts on one mesh, the rest on another, with DTensor and FSDP2.

mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "experts"))
everyone = init_device_mesh("cuda", (8,))
distribute_experts(model, mesh["experts"])          # Shard(0): E / 4 experts a rank
for block in model.blocks:                          # FSDP2: experts over 2 ranks, the rest over 8
    fully_shard(block, mesh=everyone, ignored_params=expert_weights(block))
    shard_layers(block, everyone, mesh["data"])
fully_shard(model, mesh=everyone)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from guild._torch.checks import expect_flag, expect_positive, expect_tensor
from guild.distributed.expert_parallel import TIMEOUT, ExpertParallel
from guild.distributed.norms import by_layout, norm_of
from guild.distributed.own_experts import EXPERT_WEIGHTS, tensors_of
from guild.layer_experts import expect_shareable
from guild.moe import MoE

__all__ = [
    "clip_grad_norm_",
    "distribute_experts",
    "expert_weights",
    "leave_out_experts",
    "shard_layers",
]


def distribute_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    exact: bool = False,
    timeout: float = TIMEOUT,
    engine: str = "auto",
    max_tokens: int | None = None,
    capacity: float | None = None,
) -> ExpertParallel:
    """Share the experts of every `guild.MoE` in a module among the ranks of a mesh.

    The experts' parameters become DTensors, Shard(0) over the mesh, with this rank's part of their
    present values: every rank must have made or loaded the same module, or one on the meta device.
    Optimisers and torch.distributed.checkpoint take them as they are; `WeightGradients` do not.

    Parameters
    ----------
    module : torch.nn.Module
        A model, before `fully_shard`.
    mesh : DeviceMesh
        One dimension, whose size divides every layer's number of experts.
    exact, timeout, engine, max_tokens, capacity
        As `ExpertParallel` takes them.

    Returns
    -------
    ExpertParallel
        The group, which all layers share.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        If an argument is not as described, or the module has no such layer, a shared one or one in
        FP8.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    room = {"max_tokens": max_tokens, "capacity": capacity}
    group = ExpertParallel(mesh, exact=exact, timeout=timeout, engine=engine, **room)
    if (ranks := mesh.mesh.tolist()) != sorted(ranks):  # a process group numbers them in order
        raise ValueError(f"mesh: expected ranks in ascending order, got {ranks}")
    layers = layers_of(module)
    for layer in layers:
        expect_shareable(group, layer.experts, layer.fp8)  # before anything is changed
        if layer.expert_group is not None or isinstance(layer.w_up, DTensor):
            raise ValueError(
                "module: expected layers with all of their experts, before fully_shard, got one "
                "whose experts are distributed already"
            )
        weights = {name for name in EXPERT_WEIGHTS if getattr(layer, name) is not None}
        if not weights <= layer._parameters.keys():
            raise ValueError(
                "module: expected layers whose experts are parameters, got one with a "
                "parametrisation, pruning or weight_norm of them"
            )
    parts = {weight: _part_of(weight, mesh) for weight in expert_weights(module)}
    for owner in module.modules():  # weights that are tied remain so
        for name, weight in [*owner.named_parameters(recurse=False, remove_duplicate=False)]:
            if weight in parts:
                setattr(owner, name, parts[weight])
    for layer in layers:
        layer.share_experts(group)
    return group


def _part_of(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part of the experts; no values are sent, as there is no source rank."""
    part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=weight.requires_grad)


def layers_of(module: nn.Module) -> list[MoE]:
    """The `guild.MoE` layers of a module.

    Raises
    ------
    ValueError
        If there is none.
    """
    layers = _layers_in(module)
    if not layers:
        raise ValueError(
            f"module: expected one with a guild.MoE in it, got a {type(module).__name__} without"
        )
    return layers


def _layers_in(module: nn.Module) -> list[MoE]:
    return [part for part in module.modules() if isinstance(part, MoE)]


def expert_weights(module: nn.Module) -> set[nn.Parameter]:
    """The experts' weights and biases of every `guild.MoE` of a module.

    For `fully_shard(..., ignored_params=)` of a block, whose other parameters then travel together;
    `shard_layers` has the experts sharded afterwards.

    Parameters
    ----------
    module : torch.nn.Module
        A layer, a block or a model.

    Returns
    -------
    set of torch.nn.Parameter
        Where a parametrisation, pruning or weight_norm computes experts: those of its parameters
        that have two dimensions or more, the first one over the rank's experts.

    Raises
    ------
    ValueError
        If the module has no such layer.
    """
    return {t for layer in layers_of(module) for t in _own(layer) if isinstance(t, nn.Parameter)}


def _own(layer: MoE) -> set[Tensor]:
    """The parameters and buffers of a layer's experts."""
    return {tensor for name in EXPERT_WEIGHTS for tensor in tensors_of(layer, name)}


def leave_out_experts(module: nn.Module, experts: Tensor | Iterable[Tensor] = ()) -> None:
    """Have DistributedDataParallel(module), called next, leave experts on several ranks alone.

    It would overwrite them with the first rank's and average their gradients. These remain sums
    over the ranks that share the experts, while it averages all others over its own ranks.

    Parameters
    ----------
    module : torch.nn.Module
        What DistributedDataParallel gets.
    experts : torch.Tensor or iterable of torch.Tensor
        Its parameters and buffers that hold this rank's experts without a `guild.MoE`, as those of
        a module of your own that calls `ExpertParallel.routed_experts`; LoRA terms, too.

    Raises
    ------
    TypeError, ValueError
        If experts are not parameters or buffers of the module, or there are none and it has no
        `guild.MoE`.
    """
    named = [*module.named_parameters(remove_duplicate=False)]
    named += module.named_buffers(remove_duplicate=False)
    kept = _own_experts(experts, {tensor for _, tensor in named})
    for layer in layers_of(module) if not kept else _layers_in(module):
        if layer.expert_group is not None and layer.expert_group.size > 1:
            kept |= _own(layer)
    names = {name for name, tensor in named if tensor in kept}
    names |= {f".{name}" for name in names if "." not in name}  # DDP's own name for the module's
    names |= {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def _own_experts(experts: Tensor | Iterable[Tensor], held: set[Tensor]) -> set[Tensor]:
    """The experts that `leave_out_experts` is given; held: all tensors of its module."""
    given = [experts] if isinstance(experts, Tensor) else list(experts)
    for tensor in given:
        expect_tensor("experts", tensor)
        if tensor not in held:
            raise ValueError(
                "experts: expected parameters or buffers of the module, got a tensor of shape "
                f"{tuple(tensor.shape)} that is none of them"
            )
    return set(given)


def shard_layers(
    module: nn.Module, mesh: DeviceMesh, experts_mesh: DeviceMesh, **options: Any
) -> None:
    """FSDP2 for every `guild.MoE` of a module whose experts are distributed.

    Experts are sharded over `experts_mesh`, router and shared experts over `mesh`, as two more
    groups of parameters unless `fully_shard` of a block has them already. Gradients are divided by
    the number of ranks of `mesh`, the experts' too: if every rank's loss is a mean over equally
    many tokens, all gradients are those of the mean over all tokens.

    Parameters
    ----------
    module : torch.nn.Module
        A layer, a block or a model, after `distribute_experts`; the rest of it is left to
        `fully_shard`, before this with `expert_weights` ignored, or after it.
    mesh : DeviceMesh
        All ranks that have tokens of their own.
    experts_mesh : DeviceMesh
        Those of them that have the same experts: the other dimension of the mesh that
        `distribute_experts` got one dimension of. Or two others, of replicas and of shards, as
        `fully_shard` takes them.
    **options
        As `fully_shard` takes them: mp_policy, reshard_after_forward and so on.

    Raises
    ------
    ValueError
        If the sizes of the meshes do not fit, or experts are not distributed, or a layer itself
        went to `fully_shard`.
    """
    for layer in layers_of(module):
        if layer.expert_group is None:
            raise ValueError("module: expected layers after distribute_experts, got one before it")
        if isinstance(layer, FSDPModule):
            raise ValueError(
                "module: expected layers that shard_layers is to shard, got a guild.MoE that went "
                "to fully_shard or shard_layers before; only a block around it may go to "
                "fully_shard, with ignored_params=expert_weights(block)"
            )
        ranks = layer.expert_group.size * experts_mesh.size()
        if mesh.size() != ranks:
            raise ValueError(
                f"mesh: expected {ranks} ranks, {layer.expert_group.size} that share the experts "
                f"times {experts_mesh.size()} of experts_mesh, got {mesh.size()}"
            )
        if isinstance(layer.w_up, DTensor):
            _expect_names(layer.w_up.device_mesh, experts_mesh)
        rest = [part for part in (layer.router, layer.shared) if part is not None]
        sharded = {w for part in rest for w in part.parameters() if isinstance(w, DTensor)}
        for part in rest if not sharded else []:
            part.register_forward_hook(_own_output)
            fully_shard(part, mesh=mesh, **_of_parts(options))
        layer.register_forward_hook(_own_output)
        fully_shard(layer, mesh=experts_mesh, ignored_params=sharded, **options)
        if experts_mesh.size(experts_mesh.ndim - 1) == 1:
            # Of a single shard FSDP2 divides once or twice, depending on the dtype.
            layer.set_gradient_divide_factor(1.0)
            layer.set_all_reduce_hook(partial(_divide, by=float(ranks)))
            layer.set_force_sum_reduction_for_comms(True)
            continue
        layer.set_gradient_divide_factor(float(ranks))
        if experts_mesh.device_type == "cpu":  # gloo cannot divide while it sums
            layer.set_force_sum_reduction_for_comms(True)


def _of_parts(options: dict[str, Any]) -> dict[str, Any]:
    """The options of router and shared experts, whose outputs the layer takes as they are."""
    policy = options.get("mp_policy")
    if policy is None or policy.output_dtype is None:
        return options
    return {**options, "mp_policy": replace(policy, output_dtype=None)}


def _divide(gradients: Tensor, by: float) -> None:
    gradients.div_(by)


def _expect_names(*meshes: DeviceMesh) -> None:
    """Raise ValueError unless they can be dimensions of one mesh, as FSDP2 asks of DTensors."""
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise ValueError(
            "experts_mesh: expected a named dimension of the same mesh as distribute_experts' own, "
            'as in init_device_mesh(device, (1, ranks), mesh_dim_names=("data", "experts")) if all '
            "ranks share the experts; got a mesh without names"
        )


def _own_output(part: nn.Module, arguments: Any, output: Any) -> Any:
    """The output, not as a view: an operation that changes a view in place undoes FSDP2's hooks."""
    if type(output) is tuple:  # with the routing
        return _own_output(part, arguments, output[0]), *output[1:]
    if isinstance(output, Tensor) and output._is_view():
        return torch.ops.aten._unsafe_view(output, output.shape)
    return output


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters that lie on several meshes.

    The norm is that of all gradients of all ranks. Experts of a `guild.MoE(expert_group=...)` that
    has run are counted on all ranks of the group; other parameters that are not DTensors count
    once: they are the same on every rank.

    Parameters
    ----------
    parameters : torch.Tensor or iterable of torch.Tensor
        DTensors of any meshes and placements, and tensors.
    max_norm : float
        Above 0. Gradients are scaled down to it where their norm is larger.
    norm_type : float
        Order of the norm, above 0; infinite for the largest absolute value.
    error_if_nonfinite : bool
        Raise an error if the norm is NaN or infinite, on every rank and before any gradient is
        scaled. On a GPU the host then waits for the norm.
    foreach : bool, optional
        As torch takes it. Default: torch's choice for the gradients' device.

    Returns
    -------
    torch.Tensor
        The norm before scaling, float32.

    Raises
    ------
    TypeError, ValueError
        If max_norm or norm_type is not above 0, or error_if_nonfinite is no bool.
    RuntimeError
        With error_if_nonfinite, if the norm is not finite.
    """
    expect_positive("max_norm", max_norm)
    expect_flag("error_if_nonfinite", error_if_nonfinite)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = grad_norm(parameters, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"error_if_nonfinite: expected gradients with a finite norm, got {total.item()}"
        )
    for group in by_layout(parameters).values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def grad_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0, foreach: bool | None = None
) -> Tensor:
    """The norm of the gradients of all ranks, as `clip_grad_norm_` returns it."""
    expect_positive("norm_type", norm_type)
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    norms = [
        norm_of([p.grad for p in group], layout.groups(), norm_type, foreach)
        for layout, group in by_layout(parameters).items()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
