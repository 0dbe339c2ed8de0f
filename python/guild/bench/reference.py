"""The check before the timing: a layer's output and gradients against high precision.

The reference goes expert by expert and compares as it goes, so nothing of the size of the weights
is kept and the largest presets fit beside the layer under test. Precision: float64 on the CPU,
float32 on a GPU, from the same inputs. dS = <dA', A> as in SonicMoE (arXiv 2512.14080).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .problem import Problem

RESULTS = ("out", "x_gradient", "router_gradient", "w_up_gradient", "w_down_gradient")
BIAS_RESULTS = ("b_up_gradient", "b_down_gradient")
# Far above the error of a right layer (3e-3 to 8e-3 in bf16), far below that of a wrong one.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-9}


class RelativeError:
    """||got - want|| / ||want|| over parts that arrive one after the other."""

    def __init__(self) -> None:
        self._difference = self._reference = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Take in one part; a NaN in `got` makes the whole error NaN.

        `scale`, where given, takes the place of `want` below the line.
        """
        self._difference += (got.to(want.dtype) - want).double().square().sum().item()
        self._reference += (want if scale is None else scale).double().square().sum().item()

    def value(self) -> float:
        """The error over all parts."""
        return (self._difference / max(self._reference, 1e-300)) ** 0.5


@torch.no_grad()
def relative_errors(
    problem: Problem, results: tuple[torch.Tensor, ...]
) -> tuple[dict[str, float], torch.Tensor]:
    """Compare a layer's results with the reference.

    Parameters
    ----------
    problem : Problem
        The inputs; ties between the top-k's last choice and the next are excluded there.
    results : tuple of torch.Tensor
        Output, and gradients of x, router, w_up, w_down, and of the biases where there are any.

    Returns
    -------
    errors, counts : dict, torch.Tensor
        Relative error by name of the result, and int64 (experts,) rows per expert.
    """
    names = RESULTS if problem.b_up is None else RESULTS + BIAS_RESULTS
    got = dict(zip(names, results, strict=True))
    exact = torch.float64 if problem.x.device.type == "cpu" else torch.float32
    x, out_gradient = problem.x.to(exact), problem.out_gradient.to(exact)
    logits, ids = F.linear(x, problem.router.to(exact)).topk(problem.shape.top_k, -1)
    scores = logits.softmax(-1)  # a softmax over all, renormalised over the chosen, is the same
    out, x_gradient = torch.zeros_like(x), torch.zeros_like(x)
    score_gradient = torch.zeros_like(scores)
    errors = {name: RelativeError() for name in names}
    for e in range(problem.shape.experts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        w_up, w_down = problem.w_up[e].to(exact), problem.w_down[e].to(exact)
        s, rows, d_out = scores[token, choice, None], x[token], out_gradient[token]
        b_up, b_down = (b if b is None else b[e].to(exact) for b in (problem.b_up, problem.b_down))
        gate, up = F.linear(rows, w_up, b_up).chunk(2, -1)
        sigmoid = gate.sigmoid()
        a = gate * sigmoid * up
        out.index_add_(0, token, s * F.linear(a, w_down, b_down))
        d_a = d_out @ w_down
        score_gradient[token, choice] = (d_a * a).sum(-1)
        if b_down is not None:
            score_gradient[token, choice] += d_out @ b_down
            errors["b_down_gradient"].add(got["b_down_gradient"][e], (s * d_out).sum(0))
        d_a *= s
        d_gate = d_a * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_h = torch.cat((d_gate, d_a * gate * sigmoid), -1)
        if b_up is not None:
            errors["b_up_gradient"].add(got["b_up_gradient"][e], d_h.sum(0))
        x_gradient.index_add_(0, token, d_h @ w_up)
        errors["w_up_gradient"].add(got["w_up_gradient"][e], d_h.mT @ rows)
        errors["w_down_gradient"].add(got["w_down_gradient"][e], d_out.mT @ (s * a))
    mean = (scores * score_gradient).sum(-1, keepdim=True)
    chosen_gradient = scores * (score_gradient - mean)
    logit_gradient = x.new_zeros(x.shape[0], problem.shape.experts)
    logit_gradient.scatter_(1, ids, chosen_gradient)
    x_gradient += logit_gradient @ problem.router.to(exact)
    errors["out"].add(got["out"], out)
    errors["x_gradient"].add(got["x_gradient"], x_gradient)
    scale = None
    if problem.shape.top_k == 1:
        # One renormalised score is always 1, and what is left of its gradient is rounding: measured
        # against the gradient before the mean was taken off.
        scale = logit_gradient.scatter(1, ids, score_gradient).mT @ x
    errors["router_gradient"].add(got["router_gradient"], logit_gradient.mT @ x, scale)
    counts = torch.bincount(ids.flatten(), minlength=problem.shape.experts)
    return {name: error.value() for name, error in errors.items()}, counts


def require_right(errors: dict[str, float], dtype: torch.dtype) -> None:
    """Raise ArithmeticError naming the first result whose relative error is too large."""
    for name, error in errors.items():
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"wrong {name}: relative error {error:.2e}, expected at most {TOLERANCE[dtype]:.0e}"
            )
