"""Layers over ranks: which figures the plot shows, and other libraries' ways of sending tokens."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

import guild
from guild.bench import parallel
from guild.bench.parallel import measure_parallel, show
from guild.bench.parallel_plot import figures_of, main
from guild.bench.presets import Shape
from guild.bench.ranks.dispatchers import (
    DISPATCHERS,
    AsyncTorchtitanLayer,
    DispatchedLayer,
    TorchtitanLayer,
)
from guild.bench.ranks.symmetric import SymmetricLayer
from processes import run_on_ranks

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "bench" / "results" / "2026-11-23-h200x2-parallel.json"


def record_of(engines: list[str], milliseconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """A record of a layer of 6e9 operations forward and 12e9 backward."""
    tflops = {name: 1.0 for name in milliseconds if not name.endswith("alone")}
    case = {"name": "toy", "shape": [1000, 100, 1000, 8, 10], "tflops": tflops}
    return {"engines": engines, "cases": [case | {"milliseconds": milliseconds}]}


def test_figures() -> None:
    """Engines by name, the first one's calls without it; `alone` is the mean over the records."""
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
    """A plot of a record in the tree."""
    record = json.loads(RECORDED.read_text())
    alone = figures_of([record])["forward"]["alone"]
    assert all(alone[c["name"]] > c["tflops"]["forward"] for c in record["cases"])
    main([str(RECORDED), "--out", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_records(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What cannot be drawn, or written, is one line after the usage."""
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bench.json").write_text('{"cases": [{"name": "a"}], "mode": "layers"}')
    for name, out, text in (
        ("none.json", "plot.png", "expected a JSON file, got '.*/none.json'"),
        ("text.json", "plot.png", "expected a JSON file, got '.*/text.json'"),
        ("list.json", "plot.png", "expected a record that guild.bench.parallel wrote"),
        ("bench.json", "plot.png", "expected a record that guild.bench.parallel wrote"),
        (RECORDED, "text.json/plot.png", "out: expected a folder, got the file"),
        (RECORDED, "plot.xyz", "'xyz'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / name), "--out", str(tmp_path / out)])
        assert re.search(f"error: .*{text}", capsys.readouterr().err), name


def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes are found before the ranks meet, and only the first one reports them."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(parallel, "measure_parallel", pytest.fail)

    def refused(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            parallel.main(list(words))
        return capsys.readouterr().err

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert "error: expected to be started by torchrun" in refused("--device", "cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for words, text in (
        ("--thiek 1,2", "thiek: expected five numbers"),
        ("--thiek 64,16,8,4,2", "64,16,8,4,2: expected a multiple of 3 experts"),
        ("--thiek 64,16,8,6,3", "64,16,8,6,3: expected at least top_k = 3 experts a rank, got 2"),
        ("--capacity 1.5 --engine nccl", "--capacity: cannot be used with --engine nccl"),
        ("--cuda-graph", "--cuda-graph: needs --engine peer"),
        ("--cuda-graph --engine peer --beside all", "--cuda-graph: cannot be used with --beside"),
        (
            "--cuda-graph --engine peer --device cpu",
            "--cuda-graph: cannot be used with --device cpu",
        ),
        ("--thiek 64,16,8,33,2", "thiek: expected hidden of at least experts = 33, got 16"),
        ("--thiek 64,16,8,6,2", "device: 'cuda:0' asked for, this machine has 0 GPUs"),
        ("--thiek 64,16,8,6,2 --device cpu --engine torch", "engine: expected GPUs and a torch"),
        ("--rounds 0", "rounds: expected at least 1, got 0"),
        ("--tokens 4 0", "tokens: expected at least 1, got 0"),
        ("--thiek 64,16,8,6,2 --max-tokens 63", "max_tokens: expected at least 64, got 63"),
        ("--max-tokens 8192 --engine nccl", "--max-tokens: cannot be used with --engine nccl"),
        ("--seconds nan", "seconds: expected a positive number, got nan"),
        ("--capacity -1", "capacity: expected a positive number, got -1"),
        (f"--out {tmp_path / 'file'}", "out: expected a folder, got the file"),
    ):
        assert f"error: {text}" in refused(*words.split())
    monkeypatch.setenv("RANK", "1")
    assert not refused("--rounds", "0")


def same_as_layer(make: Callable[[Shape, guild.MoE], DispatchedLayer]) -> None:
    """With another library's dispatch, output and gradients are those of guild.MoE."""
    shape, layer = Shape(32, 16, 8, 4, 2), guild.MoE(16, 8, 4, 2)
    x = torch.randn(shape.tokens, shape.hidden, requires_grad=True)
    leaves = x, layer.router.weight, layer.w_up, layer.w_down
    found = []
    for call in (make(shape, layer), layer):
        out = call(x)
        grads = torch.autograd.grad(out, leaves, x.detach().roll(1, 0), retain_graph=True)
        found.append((out, *grads))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def send(rows: Tensor, out: Tensor, counts: Tensor, places: Tensor, _: str) -> None:
    """Stands in for all_to_all_vdev, with this rank alone."""
    count = int(counts.sum())
    out[:count] = rows[:count]
    places[0], places[1] = counts, 0


def symmetric_layer(rank: int) -> None:
    """Rows sorted by rank, their experts' numbers, their scores and what returns fit together."""
    memory = {"empty": torch.zeros, "rendezvous": lambda *_: None}
    ops = mock.Mock(all_to_all_vdev=send)
    with mock.patch.multiple(symmetric, **memory), mock.patch.object(torch.ops, "symm_mem", ops):
        same_as_layer(SymmetricLayer)


class OneRank:
    """DeepEP's buffer with a single rank, which reverses the order of rows."""

    get_dispatch_config = get_combine_config = staticmethod(
        lambda _: SimpleNamespace(get_nvl_buffer_size_hint=lambda *sizes: sizes[0])
    )
    set_num_sms = staticmethod(lambda count: None)

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        assert size in (16 * 4, 256 * 4)  # bytes of a row

    def get_dispatch_layout(self, ids: Tensor, experts: int) -> tuple:
        counts = torch.bincount(ids.flatten(), minlength=experts)
        return torch.tensor([len(ids)]), None, counts, ids.new_ones(len(ids), 1).bool(), None

    def dispatch(self, x: Tensor, handle: tuple | None = None, **facts: Any) -> tuple:
        rows = handle[0] if handle else max(len(x), facts["num_worst_tokens"])
        sent = x.new_full((rows, x.shape[1]), torch.nan)
        sent[: len(x)] = x.flip(0)
        if handle:
            return sent, None, None, None, None, None
        assert facts["num_tokens_per_expert"].sum() == facts["topk_idx"].numel()
        ids = facts["topk_idx"].new_full((rows, facts["topk_idx"].shape[1]), -1)
        ids[: len(x)] = facts["topk_idx"].flip(0)
        scores = torch.zeros(ids.shape)
        scores[: len(x)] = facts["topk_weights"].flip(0)
        return sent, ids, scores, [], (rows, len(x)), None

    def combine(self, x: Tensor, handle: tuple, topk_weights: Tensor | None = None) -> tuple:
        mine = slice(0, handle[1])
        weights = None if topk_weights is None else topk_weights[mine].flip(0)
        return x[mine].flip(0), weights, None


def deepep_layer(rank: int) -> None:
    """DeepEP's layer, with exactly enough room for the tokens that come, and with more."""
    module = SimpleNamespace(Buffer=OneRank)
    with mock.patch.dict(sys.modules, {"deep_ep": module}):
        same_as_layer(DISPATCHERS["deepep"][0])
        with mock.patch.object(dist, "get_world_size", return_value=2):
            same_as_layer(DISPATCHERS["deepep-static"][0])


def torchtitan_layer(rank: int) -> None:
    """torchtitan's layer, where it is installed; how rows travel is up to torchtitan."""
    if importlib.util.find_spec("torchtitan") is not None:
        same_as_layer(DISPATCHERS["torchtitan"][0])
        with mock.patch.object(
            AsyncTorchtitanLayer, "make_dispatcher", TorchtitanLayer.make_dispatcher
        ):
            same_as_layer(AsyncTorchtitanLayer)


def absent_packages(rank: int) -> None:
    """Packages that are not installed are skipped, and the record says why."""
    shapes, device = {"toy": Shape(16, 32, 8, 8, 2)}, torch.device("cpu")
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        record = measure_parallel(
            shapes, "random", torch.float32, device, 1, 0.001, beside=["deepep", "torchtitan"]
        )
    assert record["engines"] == ["nccl"] and set(record["skipped"]) == {"deepep", "torchtitan"}
    assert record["skipped"]["deepep"] == "the package deep_ep is not installed"


def unfit_shapes(rank: int) -> None:
    """A shape that a library does not support is timed without it, and its case says why."""
    shapes = {"narrow": Shape(16, 32, 8, 8, 2), "wide": Shape(16, 256, 8, 8, 2)}
    module = SimpleNamespace(Buffer=OneRank)
    with (
        mock.patch.dict(sys.modules, {"deep_ep": module}),
        mock.patch("guild.bench.parallel.why_not", return_value=""),
    ):
        how = "random", torch.float32, torch.device("cpu"), 1, 0.001
        record = measure_parallel(shapes, *how, beside=["deepep"])
    narrow, wide = record["cases"]
    assert narrow["skipped"] == {
        "deepep": "DeepEP's combine takes multiples of 256 columns, not 32"
    }
    assert "forward deepep" not in narrow["tflops"]
    assert not wide["skipped"] and wide["tflops"]["forward deepep"] > 0
    show(record)


def test_dispatched_layers(tmp_path: Path) -> None:
    """Every dispatched layer on one rank, since several GPUs that share memory are not at hand."""
    checks = [symmetric_layer, deepep_layer, torchtitan_layer, absent_packages, unfit_shapes]
    run_on_ranks(checks, 1, tmp_path / "ranks")
