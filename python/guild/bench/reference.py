"""The check before the timing: a layer's output and gradients against high precision.

The reference goes expert by expert and compares as it goes, so nothing of the size of the weights
is kept and the largest presets fit beside the layer under test. Precision: float64 on the CPU,
float32 on a GPU, from the same inputs; gradients are autograd's. The expert is the plain layer's
(train/plain_moe.py), with the activation of the problem's form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from guild.bench.problem import Problem

RESULTS = ("out", "x_gradient", "router_gradient", "w_up_gradient", "w_down_gradient")
BIAS_RESULTS = ("b_up_gradient", "b_down_gradient")
# Far above the error of a correct layer (3e-3 to 8e-3 in bf16), far below that of a wrong one.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-9}


class RelativeError:
    """||got - want|| / ||want|| over parts that arrive one after another."""

    def __init__(self) -> None:
        self._difference = self._reference = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Add one part; a NaN in `got` makes the whole error NaN.

        `scale`, if given, replaces `want` in the denominator.
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
        The inputs; they have no ties between a token's last chosen expert and the next one.
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
    x, router = (
        t.to(exact).requires_grad_() for t in (problem.x.detach(), problem.router.detach())
    )
    with torch.enable_grad():
        logits = F.linear(x, router)
        ids = logits.detach().topk(problem.shape.top_k, -1).indices
        scores = logits.gather(1, ids).softmax(-1)  # of all, renormalised over the chosen
    out, x_gradient = torch.zeros_like(x), torch.zeros_like(x)
    score_gradient = torch.zeros_like(scores)
    errors = {name: RelativeError() for name in names}
    weights = problem.experts().values()
    for e in range(problem.shape.experts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        inputs = (x[token], scores[token, choice, None], *(w[e].to(exact) for w in weights))
        leaves = [t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            rows, s, *mine = leaves
            y = s * problem.form.expert(rows, *mine)
        d_rows, d_s, *gradients = torch.autograd.grad(
            y, leaves, problem.out_gradient[token].to(exact)
        )
        out.index_add_(0, token, y.detach())
        x_gradient.index_add_(0, token, d_rows)
        score_gradient[token, choice] = d_s[:, 0]
        for name, gradient in zip(names[3:], gradients, strict=True):
            errors[name].add(got[name][e], gradient)
    of_x, of_router = torch.autograd.grad(scores, (x, router), score_gradient)
    x_gradient += of_x
    errors["out"].add(got["out"], out)
    errors["x_gradient"].add(got["x_gradient"], x_gradient)
    scale = None
    if problem.shape.top_k == 1:
        # One renormalised score is always 1, so its gradient is only rounding. It is measured
        # against the gradient before the mean was subtracted.
        scale = torch.zeros_like(logits).scatter(1, ids, score_gradient).mT @ x
    errors["router_gradient"].add(got["router_gradient"], of_router, scale)
    counts = torch.bincount(ids.flatten(), minlength=problem.shape.experts)
    return {name: error.value() for name, error in errors.items()}, counts


def require_right(errors: dict[str, float], dtype: torch.dtype) -> None:
    """Raise ArithmeticError naming the first result whose relative error is too large."""
    for name, error in errors.items():
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"wrong {name}: relative error {error:.2e}, expected at most {TOLERANCE[dtype]:.0e}"
            )
