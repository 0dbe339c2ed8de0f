"""Layers over ranks: whose figures stand where in the plot; torch's all-to-all around experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

import guild
from guild.bench.parallel_plot import figures_of, main
from guild.bench.presets import Shape
from guild.bench.symmetric import SymmetricLayer
from processes import run_on_ranks

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "bench" / "results" / "2026-11-23-h200x2-parallel.json"


def record_of(engines: list[str], milliseconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Of a layer of 6e9 operations forward and 12e9 backward."""
    tflops = {name: 1.0 for name in milliseconds if not name.endswith("alone")}
    case = {"name": "toy", "shape": [1000, 100, 1000, 8, 10], "tflops": tflops}
    return {"engines": engines, "cases": [case | {"milliseconds": milliseconds}]}


def test_figures() -> None:
    """Engines by name, the first one's calls without it; alone is the mean of the records."""
    times = [[1.0, 3.0], [2.0, 2.0]]
    both = {"forward": times, "forward nccl": times, "forward alone": times}
    first = record_of(["peer", "nccl"], both | {"backward": times, "backward alone": times})
    second = record_of(["torch"], {"forward": times, "forward alone": [[4.0, 4.0]]})
    found = figures_of([first, second])
    assert list(found["forward"]) == ["nccl", "torch", "peer", "alone"]
    assert list(found["backward"]) == ["peer", "alone"]
    assert found["forward"]["alone"]["toy"] == pytest.approx((6 / 2 + 6 / 4) / 2)
    assert found["backward"]["alone"]["toy"] == pytest.approx(12 / 2)


def test_plot(tmp_path: Path) -> None:
    """Of a record in the tree."""
    record = json.loads(RECORDED.read_text())
    alone = figures_of([record])["forward"]["alone"]
    assert all(alone[c["name"]] > c["tflops"]["forward"] for c in record["cases"])
    main([str(RECORDED), "--out", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def send(rows: Tensor, out: Tensor, counts: Tensor, places: Tensor, _: str) -> None:
    """all_to_all_vdev to this rank alone."""
    count = int(counts.sum())
    out[:count] = rows[:count]
    places[0], places[1] = counts, 0


def symmetric_layer(rank: int) -> None:
    """Rows sorted by rank, their experts' numbers and what comes back fit together."""
    shape, layer = Shape(32, 16, 8, 4, 2), guild.MoE(16, 8, 4, 2)
    x = torch.randn(shape.tokens, shape.hidden)
    memory = {"empty": torch.zeros, "rendezvous": lambda *_: None}
    ops = mock.Mock(all_to_all_vdev=send)
    with mock.patch.multiple(symmetric, **memory), mock.patch.object(torch.ops, "symm_mem", ops):
        out = SymmetricLayer(shape, layer, x).forward()
    torch.testing.assert_close(out, layer(x))


def test_symmetric_layer(tmp_path: Path) -> None:
    """On one rank, in place of GPUs that share memory."""
    run_on_ranks([symmetric_layer], 1, tmp_path / "ranks")
