"""One model being trained: its MoE layer, optimiser, steps, validation and what they measured.

`guild train` drives one learner, `--compare` and `--fp8` two: they start from the same weights and
see the same bytes, and differ in nothing but the MoE layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from guild.train.corpus import Corpus, step_seed
from guild.train.model import LanguageModel, MoEFactory
from guild.train.settings import Settings
from guild.train.step_graph import StepQueue

LAYERS = ("guild", "plain", "fp8")
_BETAS = (0.9, 0.95)


def moe_factory(
    name: str, device: torch.device, settings: Settings, balanced: bool = False
) -> MoEFactory:
    """Constructor `(hidden, intermediate, experts, top_k)` of the MoE layer called `name`.

    balanced: Guild's keeps sums for the load-balancing loss with every router.
    """
    if name in ("guild", "fp8"):
        return _guild_factory(settings, balanced, name == "fp8")
    if name == "plain":
        from guild.train.plain_moe import PlainMoE

        if not settings.plain_routing:
            raise ValueError(
                "moe: the plain layer has only softmax over the top k; leave out --router, "
                "--round and --capacity"
            )
        compiled = device.type == "cuda"
        if settings.shared:
            from guild.train.plain_shared import PlainSharedMoE

            return functools.partial(PlainSharedMoE, shared=settings.shared, compiled=compiled)
        return lambda *sizes: PlainMoE(*sizes, compiled=compiled)
    raise ValueError(f"moe: expected one of {', '.join(LAYERS)}, got {name!r}")


def _guild_factory(s: Settings, balanced: bool, fp8: bool) -> MoEFactory:
    import guild

    shared: dict[str, Any] = {"shared_intermediate": s.shared} if s.shared else {}
    if fp8:
        if s.capacity:
            raise ValueError(f"capacity: expected 0 in FP8, got {s.capacity}")
        shared["fp8"] = guild.FP8(wgrad="fp8", scales="power_of_two", cached=True)
    if s.plain_routing:
        over = {"balance_over": "batch"} if balanced else {}
        return functools.partial(guild.MoE, **shared, **over)
    router = guild.Router.named(s.router)
    try:
        router.expect_sizes(s.experts, s.top_k)
    except ValueError as error:
        raise ValueError(
            f"router: {s.router} does not fit {s.experts} experts of which a token goes to "
            f"{s.top_k}: {error}"
        ) from None
    if s.round != "none":
        router = dataclasses.replace(router, rounding=s.round, tile=s.tile)
    options: dict[str, Any] = {"router": router, "balance_over": "batch", **shared}
    if not s.capacity:
        return functools.partial(guild.MoE, **options)
    from guild.train.dropping import DroppingMoE

    return functools.partial(DroppingMoE, capacity=s.capacity, **options)


def optimizer_options(
    model: LanguageModel, s: Settings
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and options of AdamW, with weight decay for matrices only."""
    weights = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": s.weight_decay},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ]
    return groups, {"lr": s.lr, "betas": _BETAS}


class Learner:
    """A model with its optimiser.

    Parameters
    ----------
    name : str
        Which MoE layer: one of `LAYERS`.
    settings : Settings
        Sizes and schedule.
    device : torch.device
        Where it computes.
    dtype : torch.dtype
        float32, or bfloat16 for autocast over float32 weights.
    graphs : bool
        On a GPU, replay a CUDA graph of the step from the second round on.

    Attributes
    ----------
    steps : StepQueue
        How steps run; to be released after the last one.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
        graphs: bool = True,
    ) -> None:
        self.name, self.settings, self.device, self.dtype = name, settings, device, dtype
        self.steps = StepQueue(self._compute, device, graphs)
        s = settings
        make_moe = moe_factory(name, device, s)
        model = LanguageModel(
            s.hidden,
            s.layers,
            s.heads,
            s.intermediate,
            s.experts,
            s.top_k,
            make_moe,
            s.vocabulary,
        )
        model.initialise(s.seed)
        self.model = model.to(device)
        groups, options = optimizer_options(self.model, s)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, **options, fused=True, capturable=on_gpu)

    def round(self, corpus: Corpus, first: int, count: int) -> list[dict[str, Any]]:
        """Train steps `first` .. `first + count - 1` and return one row of measurements for each.

        Results stay on the device until the round ends, so a GPU is never waited for in between.

        Raises
        ------
        FloatingPointError
            When the loss, or another number of a row, is not finite.
        """
        self._wait()
        with self.steps.round():
            start = time.perf_counter()
            measured = [self._step(corpus, step) for step in range(first, first + count)]
            self._wait()
        seconds = (time.perf_counter() - start) / count
        rows = []
        for step, values in enumerate(torch.stack(measured).tolist(), first):
            loss, imbalance, norm, kept, *load = values
            self.expect_finite(f"the loss of step {step + 1}", loss)
            self.expect_finite(f"the gradient's norm of step {step + 1}", norm)
            self.expect_finite(f"the imbalance of step {step + 1}", imbalance)
            rows.append(
                {
                    "step": step + 1,
                    "tokens": (step + 1) * self.settings.tokens_per_step,
                    "moe": self.name,
                    "loss": loss,
                    "imbalance": imbalance or None,  # 0: nothing measures it
                    "gradient_norm": norm,
                    "rows_over_choices": round(kept, 6),
                    "load": [round(value, 4) for value in load],
                    "lr": self.settings.lr_at(step),
                    "seconds": seconds,
                }
            )
        return rows

    def autocast(self) -> torch.autocast:
        """The context of the model's forward: bfloat16 operands, or float32 as the weights."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _step(self, corpus: Corpus, step: int) -> torch.Tensor:
        """Queue a step; what it measures, on the device: see `round`."""
        s = self.settings
        for group in self.optimizer.param_groups:
            set_lr(group, s.lr_at(step), self.device)
        if s.round == "stochastic":  # its seeds come from here, so that a run can be resumed
            torch.manual_seed(step_seed(s.seed, step))
        windows = corpus.batch(s.seed, step, s.batch, s.context)
        measured = self.steps.run(*self._windows(*windows))
        self.model.refresh_fp8()  # before a validation; a graph's replay does not announce it
        return measured

    def _windows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """This process's part of a batch, on its device."""
        return self._to_device(*tensors)

    def _compute(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """All of a step that the device does."""
        s = self.settings
        self.model.refresh_fp8()
        loss, imbalance, counts = self._gradients(inputs, targets)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()  # before the next forward, which takes the most memory
        self.model.move_selection_biases(s.bias_rate, counts)
        counts = counts.float()
        load = busiest_over_mean(counts)
        rows = counts.sum(1).mean() / (s.tokens_per_step * s.top_k)
        return torch.cat((torch.stack((loss, imbalance, norm, rows)), load))

    def _gradients(
        self, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward and backward of all windows, one part at a time.

        Returns
        -------
        tuple
            Means over the parts of loss and imbalance, and the rows per expert of all of them,
            int (layers, experts).
        """
        parts, found = self.settings.accumulate, []
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            self._before_part(last=len(found) + 1 == parts)
            with self.autocast():
                loss, imbalance = self.model.loss(x, y)
            ((loss + self.settings.balance * imbalance) / parts).backward()
            values = torch.stack((loss.detach(), imbalance.detach()))
            found.append((values / parts, self.model.expert_counts()))
        values, counts = (sum(each[1:], each[0]) for each in zip(*found, strict=True))
        return values[0], values[1], counts

    def _before_part(self, last: bool) -> None:
        """Hook before the forward of a part of a step's windows; last: it is the last part."""

    def expect_usable(self, corpus: Corpus, step: int) -> None:
        """Raise FloatingPointError unless the model is worth a checkpoint after this step.

        All weights must be finite, routers' selection biases too, and so must the loss of a batch
        of the held-out bytes.
        """
        if not self._has_finite_weights():
            raise FloatingPointError(f"{self.name}: step {step} left weights that are not finite")
        if not self._are_finite(self.model.buffers()):
            raise FloatingPointError(
                f"{self.name}: step {step} left selection biases that are not finite; try a "
                "smaller --bias-rate"
            )
        self.expect_finite(f"the held-out loss after step {step}", self.validate(corpus, 1))

    def expect_finite(self, what: str, value: float) -> None:
        """Raise FloatingPointError, which ends the run, unless the value is finite."""
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.name}: {what} is {value}; try a smaller --lr")

    def _has_finite_weights(self) -> bool:
        return self._are_finite(self.model.parameters())

    @staticmethod
    def _are_finite(weights: Iterable[torch.Tensor]) -> bool:
        flags = [weight.detach().isfinite().all() for weight in weights]
        return not flags or bool(torch.stack(flags).all())

    @torch.no_grad()
    def validate(self, corpus: Corpus, windows: int) -> float:
        """Mean loss in nats per byte over `windows` windows of the held-out bytes."""
        batch = self.settings.batch
        windows = math.ceil(windows / batch) * batch
        inputs, targets = self._windows(*corpus.held_out_windows(windows, self.settings.context))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()  # exact top-k
        with self.autocast():
            for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
                total += self.model.loss(x, y)[0]
        self.model.train()
        return (total / (windows // batch)).item()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer_state()}

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimiser's, with learning rates as numbers."""
        found = self.optimizer.state_dict()
        for group in found["param_groups"]:
            group["lr"] = float(group["lr"])
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`.

        Raises
        ------
        ValueError
            If it is the state of another model.
        """
        try:
            self.model.load_state_dict(state["model"])
            # Options come from the settings, which the checkpoint gives too.
            groups = self.optimizer.state_dict()["param_groups"]
            moments = state["optimizer"]["state"]
            self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
            for weight in self.model.parameters():
                expect_moments(weight, self.optimizer.state[weight])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            raise ValueError(
                f"resume: the checkpoint's weights and optimiser do not fit this {self.name} "
                "model; another version of Guild may have written it"
            ) from None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self.device.type != "cuda":
            return list(tensors)
        # Pinned, so that the copy does not stop the host from running ahead.
        return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]


def expect_whole(model: LanguageModel, tensors: dict[str, Any], moments: dict[str, Any]) -> None:
    """Raise unless there are all of a model's tensors and moments, by name, in their shapes.

    torch.distributed.checkpoint would leave as it is what is missing.
    """
    own = model.state_dict()
    if tensors.keys() != own.keys() or any(t.shape != own[n].shape for n, t in tensors.items()):
        raise ValueError("tensors of another model")
    weights = dict(model.named_parameters())
    if moments.keys() != weights.keys():
        raise ValueError("moments of other weights")
    for name, weight in weights.items():
        expect_moments(weight, moments[name])


def expect_moments(weight: torch.Tensor, held: dict[str, Any]) -> None:
    """Raise unless they are a weight's: AdamW's fused step would read past shorter ones."""
    if held["exp_avg"].shape != weight.shape or held["exp_avg_sq"].shape != weight.shape:
        raise ValueError("moments of another weight")
    if held["step"].numel() != 1:
        raise ValueError("step counts of another optimiser")


def set_lr(group: dict[str, Any], lr: float, device: torch.device) -> None:
    """Set a parameter group's learning rate, on a GPU as a tensor that graphs read."""
    held = group["lr"]
    if device.type != "cuda":
        group["lr"] = lr
    elif isinstance(held, torch.Tensor) and held.is_cuda:
        held.fill_(lr)
    else:  # as an optimiser is made, or loaded
        group["lr"] = torch.full((), lr, device=device)


def busiest_over_mean(counts: torch.Tensor) -> torch.Tensor:
    """Rows of the busiest expert over the mean, float (layers), of rows (layers, experts).

    0 if no expert has any, as when rounding goes down from fewer rows than a tile.
    """
    return counts.amax(1) / counts.mean(1).clamp(min=1 / counts.shape[1])
