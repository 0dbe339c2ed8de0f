"""FSDP2's gathers on one host by copy engines, from 16-bit copies straight into the weights.

    optimiser:  barrier | this rank's part of every weight, and its 16-bit copy | barrier
    gather:     each rank's part of a weight to its place in the whole one

All ranks map each other's 16-bit copies, which do not change between two steps of the optimiser.
So a gather waits for no rank, casts nothing, and copies each byte once, to where products read it,
without using a multiprocessor. FSDP2 itself casts to a buffer, copies to another, gathers there and
copies from there into the weights, all on multiprocessors.

A module's whole weights have memory of their own if FSDP2 keeps them from forward to backward. The
other modules share two places for each list of sizes: while one module computes, the next one is
gathered. A place is overwritten only after the module that had it last has been computed: a gather
waits for everything that was queued before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from guild.train.mapped import TIMEOUT_MS, MakeBuffers, mapped_buffers, others

try:  # not public: without them NCCL does the work
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError:
    FSDPParam = FSDPParamGroup = object

_ALIGNED = 128  # elements at which a part begins
_REPLACED = (  # what this file and peer_copies.py call, or do in place of FSDP2
    (FSDPParamGroup, "unshard wait_for_unshard reshard post_backward finalize_backward"),
    (FSDPParamGroup, "is_unsharded _to_sharded _to_unsharded"),
    (FSDPParam, "init_unsharded_param unsharded_param to_sharded_dtensor"),
)
_SMALL = 1 << 18  # elements; smaller weights of a module are copied together by one kernel


@dataclass
class Place:
    """Memory for the whole weights of a module, one flat tensor for each."""

    weights: list[Tensor]
    module: GatheredModule | None = None  # whose weights it holds or receives


@dataclass
class Copies:
    """What a gather copies: pairs of a place and a rank's part that goes there."""

    large: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    small: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def add(self, to: Tensor, part: Tensor) -> None:
        """Add a pair."""
        if part.numel() >= _SMALL:
            self.large.append((to, part))
        else:
            self.small[0].append(to)
            self.small[1].append(part)

    def make(self) -> None:
        """Run all copies."""
        for to, part in self.large:
            to.copy_(part)
        if self.small[0]:
            torch._foreach_copy_(*self.small)


class GatheredModule:
    """Replaces FSDP2's code that gathers a module's weights and releases them."""

    def __init__(self, parameters: Any, place: Place, copies: Copies, stream: Any) -> None:
        self._parameters, self._place, self._copies = parameters, place, copies
        self._stream, self._device = stream, parameters.device_handle
        self._arrived: Any = None  # event: gathered, and not yet waited for
        for own, weight in zip(parameters.fsdp_params, place.weights, strict=True):
            own.all_gather_outputs = [weight]
            own.init_unsharded_param()
            own.all_gather_outputs = []  # FSDP2 would free them
        self._put_away = parameters._to_sharded
        parameters.unshard = self.gather
        parameters.wait_for_unshard = self.wait
        parameters._to_sharded = self.let_go

    @torch.no_grad()
    def gather(self, async_op: bool = False) -> None:
        """Start a gather, unless one was started."""
        if self._arrived is not None or self._parameters.is_unsharded:
            return
        place = self._place
        if place.module not in (None, self):
            raise RuntimeError(
                "guild train: a module's weights were requested before the module that holds "
                "their place in memory released its own"
            )
        place.module = self
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            self._copies.make()
            self._arrived = self._device.Event()
            self._arrived.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the weights."""
        if self._arrived is None:
            return
        self._device.current_stream().wait_event(self._arrived)
        self._arrived = None
        self._parameters._to_unsharded()

    def let_go(self) -> None:
        """Release the weights: nothing later than the current stream's work needs them."""
        if self._parameters.is_unsharded:
            self._put_away()
            self._place.module = None

    def forget(self) -> None:
        """Give up the place if a gather was started and never waited for."""
        if self._arrived is not None:
            self._place.module = self._arrived = None


class GatheredWeights:
    """The weights of modules under FSDP2, gathered by copies; made by all ranks.

    Parameters
    ----------
    modules : sequence of FSDPModule
        After `fully_shard` over all ranks.
    group : torch.distributed.ProcessGroup
        All ranks.
    dtype : torch.dtype
        Of the copies, and of the weights that products read.
    device : torch.device
        Of this rank.
    make : callable
        Makes memory that all ranks map, as `mapped_buffers` does.

    Attributes
    ----------
    parts : dict of torch.nn.Parameter to torch.Tensor
        This rank's 16-bit copy, flat and padded, of its part of each parameter.
    mapped_bytes : int
        Memory that torch's own count does not include.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        make: MakeBuffers = mapped_buffers,
    ) -> None:
        of_modules = [parameters_of(module) for module in modules]
        every = [own for parameters in of_modules for own in parameters.fsdp_params]
        starts, total = starts_of(own._sharded_param_data.numel() for own in every)
        ((buffer, self._mapped),) = make(1, total * dtype.itemsize, group, device)
        self.mapped_bytes, self._dtype = total * dtype.itemsize, dtype
        self._device = of_modules[0].device_handle
        self._stream = self._device.Stream(priority=-1)
        self._every = every
        self._starts = {id(own): start for own, start in zip(every, starts, strict=True)}
        flat = buffer.view(dtype)
        self._own = [flat[at : at + count_of(own)] for own, at in zip(every, starts, strict=True)]
        places = _Places(group.size(), dtype, device)
        self._modules = [
            GatheredModule(parameters, place, self._copies_to(place, parameters), self._stream)
            for parameters, place in ((p, places.of(p)) for p in of_modules)
        ]
        self.refresh()

    @property
    def parts(self) -> dict[nn.Parameter, Tensor]:
        """See the class."""
        pairs = zip(self._every, self._own, strict=True)
        return {own.sharded_param: part for own, part in pairs}

    def _copies_to(self, place: Place, parameters: Any) -> Copies:
        copies, mapped = Copies(), self._mapped
        for own, weight in zip(parameters.fsdp_params, place.weights, strict=True):
            count, start = count_of(own), self._starts[id(own)]
            for rank in (*others(mapped), mapped.rank):
                # .data: autograd must not treat a gather as a change of what it has saved.
                to = weight.data[rank * count : (rank + 1) * count]
                copies.add(to, mapped.get_buffer(rank, (count,), self._dtype, start))
        return copies

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """A context in which this rank's parts may be written to: nobody reads them."""
        current = self._device.current_stream()
        for module in self._modules:
            module.forget()
        current.wait_stream(self._stream)
        self._mapped.barrier(timeout_ms=TIMEOUT_MS)
        yield
        self._mapped.barrier(timeout_ms=TIMEOUT_MS)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again after something other than the optimiser has changed them."""
        with self.replaced():
            torch._foreach_copy_(self._own, [own._sharded_param_data for own in self._every])


class _Places:
    """Assigns each module the memory of its weights."""

    def __init__(self, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ranks, self._how = ranks, {"dtype": dtype, "device": device}
        self._in_turns: dict[tuple[int, ...], list[Place]] = {}
        self._taken: dict[tuple[int, ...], int] = {}

    def of(self, parameters: Any) -> Place:
        """The module's own if its weights are kept, else one of two shared ones."""
        sizes = tuple(count_of(own) * self._ranks for own in parameters.fsdp_params)
        if parameters.post_forward_mesh_info is None:
            return self._new(sizes)
        turns = self._in_turns.setdefault(sizes, [])
        number = self._taken.get(sizes, 0)
        self._taken[sizes] = number + 1
        if number < 2:
            turns.append(self._new(sizes))
        return turns[number % 2]

    def _new(self, sizes: tuple[int, ...]) -> Place:
        return Place([torch.empty(size, **self._how) for size in sizes])


def knows_fsdp() -> bool:
    """Whether this torch's FSDP2 has the functions that copies replace; none of them is public."""
    return all(hasattr(kind, name) for kind, names in _REPLACED for name in names.split())


def parameters_of(module: FSDPModule) -> Any:
    """FSDP2's record of the parameters that a module gathers together."""
    return module._get_fsdp_state()._fsdp_param_group


def count_of(own: Any) -> int:
    """Number of elements of a rank's part, padded to the largest part."""
    return own._sharded_param_data.numel()


def starts_of(counts: Iterable[int]) -> tuple[list[int], int]:
    """Where parts begin, one after the other, and where the last one ends."""
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += -(-count // _ALIGNED) * _ALIGNED
    return starts, end
