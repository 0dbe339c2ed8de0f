"""A learner's steps, one by one at first, then as replays of one CUDA graph.

Launching a step takes the host longer than a GPU needs for the step of a small model, or of a large
one with few tokens. A replay is one launch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch


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
        On a GPU, capture the step as a CUDA graph when the second round begins.
    """

    def __init__(
        self, step: Callable[..., torch.Tensor], device: torch.device, graphs: bool
    ) -> None:
        self._step = step
        # Capture needs a stream of its own. The steps before use it too, as autograd accumulates a
        # gradient on the stream that it has seen first.
        self._stream = torch.cuda.Stream(device) if graphs and device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[torch.Tensor] = []  # what the graph reads
        self._out: torch.Tensor | None = None

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A context for some steps, before and after which the device is idle.

        The first is there for torch to compile the step; the second begins with the capture.
        """
        if self._stream is None:
            yield
            return
        if self._graph is None and self._given:
            self._capture()
        with torch.cuda.stream(self._stream):
            yield

    def run(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The step's result for these tensors."""
        if self._graph is None:
            self._given = list(tensors) if self._stream is not None else []
            return self._step(*tensors)
        for there, given in zip(self._given, tensors, strict=True):
            there.copy_(given)
        self._graph.replay()
        return self._out.clone()

    def release(self) -> None:
        """Free the graph: NCCL's communicators must outlive graphs that use them."""
        self._graph = self._out = None
        self._given = []

    def _capture(self) -> None:
        # The graph has memory of its own: what the steps before it used is returned first.
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog may ask its own events meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._out = self._step(*self._given)
        self._graph = graph
