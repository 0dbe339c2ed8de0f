"""A learner's steps, one by one at first, then as replays of one CUDA graph.

Launching a step takes the host longer than a GPU needs for the step of a small model, or of a large
one with few tokens. A replay is one launch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

# Memory of a graph over what a step allocates: a piece that one stream has freed is not used again
# on another.
_ROOM = 1.5
_FIRST_STEPS = 2  # in which torch compiles the step, and the optimiser allocates its state


class StepQueue:
    """Runs steps on a device.

    Parameters
    ----------
    step : callable
        Tensors of always the same shapes -> a tensor. It must neither wait for the device nor
        depend on numbers of the host that change.
    device : torch.device
        Where it computes.
    graphs : bool
        On a GPU, capture the step as a CUDA graph when a round begins after two steps, if there is
        memory for it.
    all_ranks : callable
        Whether a condition holds on all ranks that take the steps together.

    Attributes
    ----------
    captured : bool
        Whether steps were, or are, replays of a graph.
    refusal : str
        Why there is no graph although one was wanted; else empty.
    """

    def __init__(
        self,
        step: Callable[..., torch.Tensor],
        device: torch.device,
        graphs: bool,
        all_ranks: Callable[[bool], bool] = bool,
    ) -> None:
        self._step, self._all_ranks = step, all_ranks
        self.captured, self.refusal = False, ""
        # Capture needs a stream of its own. The steps before use it too, as autograd accumulates a
        # gradient on the stream that it has seen first.
        self._stream = torch.cuda.Stream(device) if graphs and device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launched = 0
        self._given: list[torch.Tensor] = []  # what the graph reads
        self._out: torch.Tensor | None = None

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A context for some steps, before and after which the device is idle."""
        if self._stream is None:
            yield
            return
        if self._launched == 0:
            torch.cuda.reset_peak_memory_stats(self._stream.device)  # for `_shortage`
        if self._graph is None and self._launched >= _FIRST_STEPS and not self.refusal:
            self._capture()
        with torch.cuda.stream(self._stream):
            yield

    def run(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The step's result for these tensors."""
        if self._graph is None:
            self._given = list(tensors)
            self._launched += 1
            return self._step(*tensors)
        for there, given in zip(self._given, tensors, strict=True):
            there.copy_(given)
        self._graph.replay()
        return self._out.clone()

    def release(self) -> None:
        """Free the graph: NCCL's communicators must outlive graphs that use them."""
        self._graph = self._out = None
        self._given, self._launched = [], 0

    def _capture(self) -> None:
        # The graph has memory of its own: what the steps before it used is returned first.
        gc.collect()
        torch.cuda.empty_cache()
        self.refusal = self._shortage()
        if self.refusal:
            return
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog may ask its own events meanwhile.
        how = {"stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **how):
                self._out = self._step(*self._given)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "no room for a CUDA graph of the step; --no-cuda-graph trains without one"
            ) from error
        self._graph, self.captured = graph, True

    def _shortage(self) -> str:
        """Why the graph's memory may not fit; empty if it does, on all ranks."""
        device = self._stream.device
        step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        needed, free = _ROOM * step, torch.cuda.mem_get_info(device)[0]
        if self._all_ranks(needed <= free):
            return ""
        return (
            f"no CUDA graph of the step: it may need {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} are free"
        )
