"""Memory that all ranks of a group reach: peer GPUs of one host, or processes that share files.

On GPUs it is torch's symmetric memory (its CUDA backend), which maps every rank's allocation into
all others; nothing is multicast. On the CPU it is a shared file, so that all of the protocol runs,
and is tested, without a GPU.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guild._torch.operators import ops
from guild.distributed.ranks import Ranks

MOST_RANKS = 32  # kMostRanks in guild/exchange.h


@dataclass(frozen=True)
class Room:
    """Sizes that the memory has room for; the same on every rank.

    Attributes
    ----------
    tokens : int
        Tokens of a rank.
    top_k : int
        Choices of a token.
    row_bytes : int
        Bytes of a token's row.
    returned : int
        Rows that come back for a token.
    """

    tokens: int
    top_k: int
    row_bytes: int
    returned: int

    def holds(self, other: Room) -> bool:
        """Whether there is room for as much as in another."""
        return self.joined(other) == self

    def joined(self, other: Room) -> Room:
        """Room for both."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return Room(*(max(pair) for pair in pairs))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The sizes as the ops take them."""
        return self.tokens, self.top_k, self.row_bytes, self.returned


class PeerMemory:
    """One piece of memory per rank, all mapped into this process; made by all ranks together.

    Parameters
    ----------
    ranks : Ranks
        Those that share it.
    room : Room
        What there must be room for.
    device : torch.device
        This rank's.

    Attributes
    ----------
    peers : torch.Tensor
        int64 (ranks,) on the device: where each rank's memory lies.
    numbers : list of int
        What the ops call `memory`.
    """

    def __init__(self, ranks: Ranks, room: Room, device: torch.device) -> None:
        self.room = room
        self.numbers = [ranks.rank, *room.numbers]
        sizes = ops.peer_memory_sizes(ranks.size, self.numbers)
        size, self._rows_at, self._scores_at = sizes
        make = _on_gpus if device.type == "cuda" else _in_files
        self._own, self._mapped, addresses = make(ranks, size, device)
        ranks.tell("", device)  # now all have mapped it, and it is zeroed
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)

    def returned_rows(self, count: int, like: Tensor) -> Tensor:
        """A view: (count, hidden) of rows that came back, in the dtype and width of `like`."""
        return self._view(self._rows_at, count * like.shape[1], like.dtype).view(
            count, like.shape[1]
        )

    def returned_scores(self, count: int, dtype: torch.dtype) -> Tensor:
        """A view: (count,) of gradients of scores that came back."""
        return self._view(self._scores_at, count, dtype)

    def control(self) -> Tensor:
        """A copy on the CPU: counters, then what came to the last two barriers, int64."""
        return self._own[: 8 * (16 + 2 * MOST_RANKS * 16)].view(torch.int64).cpu()

    def _view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._own[at : at + count * dtype.itemsize].view(dtype)


def _on_gpus(ranks: Ranks, size: int, device: torch.device) -> tuple[Tensor, Any, list[int]]:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # objects that nothing here uses
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    mapped = symmetric.rendezvous(own, ranks.group)
    return own, mapped, list(mapped.buffer_ptrs)


def _in_files(
    ranks: Ranks, size: int, device: torch.device
) -> tuple[Tensor, list[Tensor], list[int]]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    number, path = tempfile.mkstemp(prefix="guild-", dir=folder)
    os.truncate(number, size)
    os.close(number)
    paths = ranks.tell(path, device)
    how: dict[str, Any] = {"shared": True, "size": size, "dtype": torch.uint8, "device": "cpu"}
    mapped = [torch.from_file(p, **how) for p in paths]
    ranks.tell("", device)  # now all have opened it
    os.unlink(path)
    return mapped[ranks.rank], mapped, [m.data_ptr() for m in mapped]


def why_not(ranks: Ranks, device: torch.device) -> str:
    """Why the ranks cannot reach each other's memory, the same on all of them; empty: they can.

    Asks all ranks, so that all take the same decision.
    """
    places = ranks.tell(_place(device), device)
    if len(places) > MOST_RANKS:
        return f"there are more than {MOST_RANKS} ranks"
    if len({kind for kind, *_ in places}) > 1:
        return "some ranks' tokens are on GPUs and others' are not"
    if len({host for _, host, *_ in places}) > 1:
        return "they are not all on one host"
    reason = next((why for *_, why in places if why), "")
    if device.type != "cuda" or reason:
        return reason
    reasons = ranks.tell(_unreachable([number for _, _, number, _ in places], device), device)
    if not any(reasons):
        reasons = ranks.tell(_unmappable(ranks, device), device)
    return next((why for why in reasons if why), "")


def _place(device: torch.device) -> tuple[str, str, str, str]:
    """Kind of device, host, the GPU's own number, and what is missing here."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = socket.gethostname()
    if device.type != "cuda":
        return device.type, host, "", ""
    missing = ""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        backend = symmetric.get_backend(device)
        if backend not in (None, "CUDA"):
            missing = f"torch's symmetric memory has the backend {backend}, not CUDA"
    except (ImportError, AttributeError):
        missing = "this torch has no symmetric memory"
    return device.type, host, str(torch.cuda.get_device_properties(device).uuid), missing


def _unreachable(devices: list[str], device: torch.device) -> str:
    if len(set(devices)) < len(devices):
        return "two ranks have the same GPU"
    seen = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    for number in devices:
        other = seen.get(number)  # None for a GPU that this process does not see
        if other is not None and other != device.index:
            if not torch.cuda.can_device_access_peer(device, other):
                return f"GPU {device.index} cannot reach the memory of GPU {other}"
    return ""


def _unmappable(ranks: Ranks, device: torch.device) -> str:
    """What torch reports if a container or a driver does not let processes share memory."""
    try:
        _on_gpus(ranks, 1024, device)
    except RuntimeError as error:
        return f"mapping it failed: {str(error).splitlines()[0]}"
    return ""
