"""Guild on several GPUs, by torch.distributed: experts spread over ranks, and what FSDP2 needs.

Nothing here is imported until it is asked for; the rest of the library needs no process group.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "placement":  # what is called by its full name
        return import_module("guild.distributed.placement")
    raise AttributeError(f"module 'guild.distributed' has no attribute {name!r}")
