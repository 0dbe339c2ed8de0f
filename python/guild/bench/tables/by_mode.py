"""A record of any mode as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from guild.bench.decode.table import decode_table
from guild.bench.float8.table import float8_table
from guild.bench.tables.layers import bench_table
from guild.bench.tables.memory import memory_table
from guild.bench.tables.rounding import rounding_table
from guild.bench.tables.steps import steps_table
from guild.bench.tables.sweep import sweep_table

_TABLES = {
    "decode": decode_table,
    "fp8": float8_table,
    "layers": bench_table,
    "memory": memory_table,
    "rounding": rounding_table,
    "steps": steps_table,
    "sweep": sweep_table,
}


def table_of(record: dict[str, Any]) -> RenderableType:
    """The table of a record's mode."""
    return _TABLES[record["mode"]](record)
