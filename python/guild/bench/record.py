"""What `guild bench` writes as JSON, and reads again for `--report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guild.bench.plan import BenchPlan
from guild.bench.results import read_json
from guild.provenance import provenance

SCHEMA = 1


def record_head(plan: BenchPlan) -> dict[str, Any]:
    """What every record begins with: provenance, and how its figures were taken."""
    return {
        "schema": SCHEMA,
        **provenance(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "rounds": plan.rounds,
        "seconds_per_round": None if plan.calls else plan.seconds,
        "calls_per_round": plan.calls,
        "seed": plan.seed,
        "form": plan.form.options(),
        "reference": "float64" if plan.device.type == "cpu" else "float32",
    }


def read_record(file: Path) -> dict[str, Any]:
    """A record that `guild bench` wrote.

    Raises
    ------
    ValueError
        If the file cannot be read or is not such a record.
    """
    try:
        record = read_json(file)
    except ValueError as error:
        raise ValueError(f"report: {error}") from None
    known = isinstance(record, dict) and record.get("schema") == SCHEMA
    cases = record.get("cases") if known else None
    listed = isinstance(cases, list) and cases and all(isinstance(case, dict) for case in cases)
    if not listed or "mode" not in record:
        raise ValueError(f"report: expected a record that guild bench wrote, got {str(file)!r}")
    return record
