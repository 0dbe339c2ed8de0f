"""The module GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor, nn

from guild import WeightGradients, grouped_mm
from guild._torch.checks import dtype_name, expect_count, expect_shape, expect_tensor
from guild.integrations.expert_parameters import ExpertParameters, ends_of
from guild.integrations.transformer_engine.product import grouped_linear


class GroupedLinear(ExpertParameters):
    """One linear layer per group of rows, called as `transformer_engine.pytorch.GroupedLinear` is.

    Parameters
    ----------
    num_gemms : int
        Number of groups G, such as experts.
    in_features, out_features : int
        Of each. With parallel_mode "column" the second is divided by tp_size, with "row" the first.
    sequence_parallel, tp_group, tp_size, parallel_mode, ub_name, save_original_input
        As in Transformer Engine: communication is left to the token dispatcher. The last two have
        no effect.
    fuse_wgrad_accumulation : bool
        Add weight gradients to each weight's `main_grad`. Biases keep their `.grad`.
    get_rng_state_tracker, rng_tracker_name : callable, str, optional
        The first returns the tracker under whose `fork(rng_tracker_name)` the parameters are drawn.
    init_method : callable, optional
        Fills a weight in place. Default: a normal distribution of standard deviation 0.023.
    bias, return_bias : bool
        Whether there are biases; whether they are returned instead of added.
    params_dtype : torch.dtype, optional
        Default: torch's default dtype.
    device : torch.device or str
        Default: "cuda"; "cpu" and "meta" are possible.
    ub_overlap_rs, ub_overlap_ag : bool
        Only False.
    delay_wgrad_compute : bool
        Compute gradients of weights and biases in `backward_dw()` instead of in backward.

    Notes
    -----
    The parameters are `weight0` .. and `bias0` .., as in Transformer Engine, of (out_features,
    in_features) and (out_features,). They share one storage and are read in place. FP8 recipes have
    no effect.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("ub_overlap_rs, ub_overlap_ag: expected False, got True")
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(
                f"parallel_mode: expected None, 'column' or 'row', got {parallel_mode!r}"
            )
        sizes = {"num_gemms": num_gemms, "in_features": in_features, "out_features": out_features}
        for name, size in (sizes | {"tp_size": tp_size}).items():
            expect_count(name, size, 1)
        if parallel_mode == "column":
            out_features = _divided("out_features", out_features, tp_size)
        elif parallel_mode == "row":
            in_features = _divided("in_features", in_features, tp_size)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.sequence_parallel, self.parallel_mode = sequence_parallel, parallel_mode
        self.tp_group, self.tp_size = tp_group, tp_size
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._sink = WeightGradients(main_grad=fuse_wgrad_accumulation, delayed=delay_wgrad_compute)
        self._past_autograd = fuse_wgrad_accumulation or delay_wgrad_compute
        self._init_method = init_method or _normal
        self._tracker = get_rng_state_tracker, rng_tracker_name
        self._hooks: list[Callable] = []
        place = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self._register("weight", torch.empty(num_gemms, out_features, in_features, **place))
        if bias:
            self._register("bias", torch.empty(num_gemms, out_features, **place))
        for parameter in self.parameters():
            parameter.skip_backward_post_hook = delay_wgrad_compute
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights and set biases to zero; does nothing on the meta device."""
        get_tracker, name = self._tracker
        for weight in self._listed("weight"):
            if weight.is_meta:
                continue
            if get_tracker is None:
                self._init_method(weight)
            else:
                with get_tracker().fork(*([name] if name else [])):
                    self._init_method(weight)
        for bias in self._listed("bias"):
            if not bias.is_meta:
                nn.init.zeros_(bias)

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Store the group, which is not used here."""
        self.tp_group = tp_group

    def forward(
        self, inp: Tensor, m_splits: list[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Run each group of rows through its own layer.

        Parameters
        ----------
        inp : torch.Tensor
            (..., in_features), in the parameters' dtype or under autocast, sorted by group.
        m_splits : list of int or torch.Tensor
            How many rows each of the G groups has, as a list or an integer tensor on any device.
            The host does not wait for one on the GPU; rows past the groups' are zero.
        is_first_microbatch
            Has no effect: `main_grad` is added to in the first micro-batch too, so zero it before.

        Returns
        -------
        torch.Tensor or (torch.Tensor, list of torch.Tensor)
            (..., out_features), and the biases with return_bias.

        Raises
        ------
        TypeError, ValueError
            If dtype, width or the numbers of groups or of rows do not agree; the message names it.
            Rows are not counted if m_splits is a tensor.
        """
        _expect_splits(m_splits, self.num_gemms)
        expect_tensor("inp", inp)
        if not inp.dim() or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"inp: expected shape (..., {self.in_features}), got {tuple(inp.shape)}"
            )
        x = inp.reshape(-1, self.in_features)
        if not isinstance(m_splits, Tensor) and sum(m_splits) != x.shape[0]:
            raise ValueError(f"m_splits: expected {x.shape[0]} rows as in inp, got {sum(m_splits)}")
        weights, biases = self._listed("weight"), self._listed("bias")
        if x.dtype != weights[0].dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"inp: expected dtype {weights[0].dtype}, got {x.dtype}")
        ends = ends_of(m_splits, x)
        added = biases if self.apply_bias else []
        if self._past_autograd:
            out = grouped_linear(x, ends, weights, added, self._sink)
        else:
            out = grouped_mm(x, [w.mT for w in weights], ends, added or None)
        out = out.view(*inp.shape[:-1], self.out_features)
        return (out, biases) if self.return_bias else out

    # ---- delayed weight gradients ---------------------------------------------------------------

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are computed by `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients of the backward passes since the last call."""
        if not self.need_backward_dw():
            return
        self._sink.compute()
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """Register a hook that `backward_dw` calls at its end."""
        self._hooks.append(hook)


def _expect_splits(splits: object, groups: int) -> None:
    """Raise unless they can be the groups' row counts; a tensor's values are not read."""
    if isinstance(splits, Tensor):
        expect_shape("m_splits", splits, (groups,))
        if splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
            raise TypeError(f"m_splits: expected an integer dtype, got {dtype_name(splits.dtype)}")
        return
    if not isinstance(splits, list | tuple):
        raise TypeError(f"m_splits: expected a list or a torch.Tensor, got {splits!r}")
    if len(splits) != groups:
        raise ValueError(f"m_splits: expected {groups} numbers of rows, got {len(splits)}")
    if any(not isinstance(n, Integral) or n < 0 for n in splits):
        raise ValueError(f"m_splits: expected integers of 0 or more, got {splits}")


def _normal(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.023)


def _divided(name: str, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{name}: expected a multiple of tp_size {parts}, got {size}")
    return size // parts
