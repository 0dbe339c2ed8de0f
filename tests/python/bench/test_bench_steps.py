"""`guild bench --steps`: every step is correct, its work is counted, and figures follow from it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from guild.bench import quack
from guild.bench import steps as bench_steps
from guild.bench.chain import StepChain, in_turn, step_work
from guild.bench.form import LayerForm
from guild.bench.names import PRODUCTS
from guild.bench.plan import BenchPlan
from guild.bench.presets import PRESETS, Shape
from guild.bench.problem import make_problems
from guild.bench.reference import BIAS_RESULTS, RESULTS, relative_errors
from guild.bench.steps import Yardsticks, measure_steps, step_figures
from guild.bench.tables.steps import steps_table
from guild.bench.timing import Replay, replayed

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
TINY = Shape(tokens=48, hidden=32, intermediate=136, experts=8, top_k=2)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=170)


def plan_of(device: torch.device, dtype: torch.dtype, **changes: Any) -> BenchPlan:
    plain = {
        "shapes": {"tiny": TINY},
        "routings": ("balanced",),
        "candidates": (),
        "device": device,
        "dtype": dtype,
        "rounds": 3,
        "calls": 1,
    }
    return BenchPlan(**{**plain, **changes})


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("routing", ["random", "zipf"])
def test_chain_is_right(routing: str, bias: bool) -> None:
    """The steps, run one after the other, give the layer's output and all gradients."""
    (problem,) = make_problems(TINY, routing, torch.float64, CPU, form=LayerForm(bias=bias))
    chain = StepChain(problem)
    for call in chain.calls.values():
        call()  # calling a step again changes nothing
    errors, _ = relative_errors(problem, chain.results())
    assert errors.keys() == set(RESULTS + BIAS_RESULTS if bias else RESULTS)
    assert max(errors.values()) < 1e-12


def test_the_check_sees_a_wrong_bias_gradient() -> None:
    (problem,) = make_problems(TINY, "random", torch.float64, CPU, form=LayerForm(bias=True))
    chain = StepChain(problem)
    chain.db_up.fill_(float("nan"))
    chain.calls["down gradient"]()  # which computes them
    results = list(chain.results())
    results[-1] = results[-1] * 1.01
    errors, _ = relative_errors(problem, tuple(results))
    assert errors.pop("b_down_gradient") == pytest.approx(0.01, rel=1e-2)
    assert max(errors.values()) < 1e-12


def test_work() -> None:
    """The FLOPs of the six products add up to the layer's."""
    work = step_work(TINY, torch.bfloat16, bias=True)
    assert sum(work[name].flops for name in PRODUCTS) == sum(TINY.flops())
    router = 2 * TINY.tokens * TINY.hidden * TINY.experts
    assert work["logits"].flops == work["logits gradient"].flops == router


class Operands(TorchDispatchMode):
    """Records every tensor that ops called inside it read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}  # by address
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = op(*args, **(kwargs or {}))
        self.ops.append(str(op))
        for tensor in tree_leaves((args, kwargs, results)):
            if isinstance(tensor, Tensor):
                self.bytes[tensor.data_ptr()] = tensor.nbytes
        return results


def bytes_not_moved(chain: StepChain, step: str) -> int:
    """Bytes of a step's operands that only describe where things are, or are not read."""
    t, _, _, e, k = chain.shape
    unread = 0 if step in ("logits", "route", "sort") else chain.offsets.nbytes
    if step in ("combine", "combine gradient", "router gradient", "logits gradient"):
        unread = 0  # they take no offsets
    if step == "score gradient" and chain.b_down is None:
        unread += chain.dout.nbytes  # dO is there for the bias alone
    if step == "dW2":
        unread += chain.x.nbytes + chain.dh.nbytes  # operands of dW1, computable here too
    if step == "dW1":
        unread += chain.dout.nbytes + chain.a_scaled.nbytes
    if step == "router gradient":
        unread += chain.x.nbytes  # x only tells the dtype
    if step == "combine gradient":
        unread += t * (e - k) * chain.x.itemsize  # logits of experts that were not chosen
    return unread


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("intermediate", [136, 520])
def test_bytes_are_those_of_the_tensors(intermediate: int, dtype: torch.dtype, bias: bool) -> None:
    """The bytes counted are those that the library's ops take and return, each once."""
    shape = TINY._replace(intermediate=intermediate)
    (problem,) = make_problems(shape, "random", dtype, CPU, form=LayerForm(bias=bias))
    chain = StepChain(problem)
    counted = {name: work.bytes for name, work in step_work(shape, dtype, bias).items()}
    held = {}
    for name, call in chain.calls.items():
        with torch.no_grad(), Operands() as operands:
            kept = call()  # kept alive, so that no address is reused
        held[name] = sum(operands.bytes.values()) - bytes_not_moved(chain, name)
        del kept
    assert counted == held


@pytest.mark.parametrize("name", ["dW2", "dW1"])
def test_weight_gradients_are_timed_with_their_schedule(name: str) -> None:
    """Weight gradients are timed with the op that makes their schedule, each one alone."""
    (problem,) = make_problems(TINY, "random", torch.float32, CPU)
    chain = StepChain(problem)
    written = {"dW1": chain.dw_up, "dW2": chain.dw_down}
    right = {step: dw.clone() for step, dw in written.items()}
    for dw in written.values():
        dw.fill_(float("nan"))
    with Operands() as operands:
        chain.calls[name]()
    assert operands.ops == ["guild.weight_gradients_out.default"]
    for step, dw in written.items():
        assert torch.equal(dw, right[step]) if step == name else dw.isnan().all()


def test_yardsticks_count_what_they_do() -> None:
    """The yardsticks count one product of square matrices, and one copy that reads and writes."""
    yardsticks = Yardsticks(torch.float32, CPU)
    product, copy = yardsticks.work["matrix"], yardsticks.work["copy"]
    assert (product.flops, product.bytes) == (2 * yardsticks.size**3, 0)
    with Operands() as operands:
        yardsticks.calls["copy"]()
    assert (copy.flops, copy.bytes) == (0, sum(operands.bytes.values()))
    with Operands() as operands:
        yardsticks.calls["matrix"]()
    assert set(operands.bytes.values()) == {4 * yardsticks.size**2}


def test_calls_go_round_the_input_sets() -> None:
    chains = [SimpleNamespace(calls={"up": lambda i=i: i}) for i in range(3)]
    turn = in_turn(chains)["up"]
    assert [turn() for _ in range(4)] == [0, 1, 2, 0]


def test_figures() -> None:
    """One step is bound by products, one by bytes; QuACK's times are scaled by the bounds."""
    times = {
        ("yardstick", "matrix"): [1.0, 2.0, 1.0],
        ("yardstick", "copy"): [1.0, 2.0, 1.0],
        ("guild", "up"): [3.0, 8.0, 4.0],
        ("guild", "combine"): [8.0, 16.0, 8.0],
        ("guild", "dW2"): [2.0, 2.0, 2.0],
        **{("bmm", name): [2.0, 4.0, 2.0] for name in PRODUCTS},
    }
    work = step_work(TINY, torch.bfloat16, bias=False)
    rates = {"matrix": work["up"]._replace(bytes=0), "copy": work["combine"]._replace(flops=0)}
    recorded = {
        "ms": dict.fromkeys(PRODUCTS, 0.9),
        "bound_ms": {"forward": 2.0, "backward": 4.0},
    }
    found = step_figures(times, {**work, **rates}, recorded)
    up, combine = found["steps"]["up"], found["steps"]["combine"]
    for step, name, ms in ((up, "up", 4.0), (combine, "combine", 8.0)):
        assert (step["flops"], step["bytes"]) == work[name]
        assert step["tflops"] == pytest.approx(work[name].flops / (1e-3 * ms) / 1e12)
        assert step["tbps"] == pytest.approx(work[name].bytes / (1e-3 * ms) / 1e12)
    assert combine["floor_ms"] == pytest.approx(1.0)  # the copy moves as many bytes
    assert combine["share_of_floor"]["median"] == pytest.approx(1 / 8)
    assert combine["tflops"] == 0 and "bmm_ms" not in combine and "quack" not in combine
    assert up["share_of_floor"]["median"] >= 1 / 4
    assert up["over_bmm"]["median"] == 2
    # The bound forward is 4 now and was 2 then.
    assert up["quack"]["scaled_ms"] == pytest.approx(1.8)
    assert up["quack"]["over"]["median"] == pytest.approx(4 / 1.8)
    assert found["passes"]["forward"]["over_bound"]["median"] == 3
    measured = step_figures({**times, ("quack", "up"): [2.0, 2.0, 4.0]}, {**work, **rates})
    assert measured["steps"]["up"]["quack"]["over"]["median"] == 1.5
    assert "quack" not in measured["steps"]["dW2"]


STEP_RECORDS = [
    (file.stem, record)
    for file in sorted((ROOT / "bench/results").glob("*.json"))
    if (record := json.loads(file.read_text())).get("mode") == "steps"
]


@pytest.mark.parametrize(("name", "record"), STEP_RECORDS, ids=[name for name, _ in STEP_RECORDS])
def test_recorded_rates_follow_from_times(name: str, record: dict[str, Any]) -> None:
    """A step without products has the share of the floor that its rate has of a copy's."""
    for case in record["cases"]:
        for step in case["steps"].values():
            assert step["tflops"] == pytest.approx(step["flops"] / step["ms"]["median"] / 1e9)
            assert step["tbps"] == pytest.approx(step["bytes"] / step["ms"]["median"] / 1e9)
            if not step["flops"]:
                share = step["tbps"] / case["machine"]["copy_tbps"]
                assert step["share_of_floor"]["median"] == pytest.approx(share, rel=0.05)


def check_record(record: dict[str, Any], bias: bool) -> None:
    assert json.loads(json.dumps(record)) == record
    (case,) = record["cases"]
    assert case["failures"] == {}
    assert case["steps"].keys() == step_work(TINY, torch.float32, bias).keys()
    for name in PRODUCTS:
        assert case["steps"][name]["over_bmm"]["median"] > 0
    assert case["machine"]["matrix_tflops"] > 0 and case["machine"]["copy_tbps"] > 0
    console = quiet()
    console.print(steps_table(record))
    text = console.file.getvalue()
    assert all(name in text for name in case["steps"])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_measure_record_and_table(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    record = measure_steps(plan_of(CPU, torch.float32, form=LayerForm(bias=bias)), quiet())
    assert record["mode"] == "steps"
    check_record(record, bias)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_measure_on_a_gpu(bias: bool, gpu: str) -> None:
    plan = plan_of(torch.device(gpu), torch.bfloat16, form=LayerForm(bias=bias))
    check_record(measure_steps(plan, quiet(), quack.importable()), bias)


def test_a_replay_is_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's time is divided by its calls, a whole number of rounds over the input sets."""
    captured: list[int] = []

    def replay(call: Any, count: int, pool: None) -> Any:
        captured.append(count)
        return call

    monkeypatch.setattr(bench_steps, "Replay", replay)
    monkeypatch.setattr(bench_steps, "replayed", lambda call, count: (call, 1))
    monkeypatch.setattr(
        bench_steps, "interleaved", lambda calls, *rest: dict.fromkeys(calls, [9.0])
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    plan = plan_of(torch.device("cuda"), torch.bfloat16)
    calls = {("guild", "up"): lambda: None, ("quack", "up"): lambda: None}
    assert bench_steps._time(calls, plan, 3) == {("guild", "up"): [1.0], ("quack", "up"): [9.0]}
    assert captured == [9]


def test_what_cannot_be_captured_is_called(gpu: str) -> None:
    counter = torch.zeros((), device=gpu)

    def waits() -> float:
        return counter.item()

    assert replayed(waits, 3) == (waits, 1)
    assert replayed(lambda: counter.add_(1), 3)[1] == 3


def test_replay(gpu: str) -> None:
    """The graph really runs its calls, as often as asked."""
    counter = torch.zeros((), device=gpu)
    replay = Replay(lambda: counter.add_(1), 3, torch.cuda.graph_pool_handle())
    before = counter.item()
    replay()
    assert counter.item() == before + 3


def test_what_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong step is named, and nothing of its case is timed."""
    monkeypatch.setattr(StepChain, "_combine", lambda self: torch.zeros_like(self.x))
    record = measure_steps(plan_of(CPU, torch.float32), quiet())
    (case,) = record["cases"]
    assert case["failures"]["guild"].startswith("wrong out: relative error")
    assert "steps" not in case
    quiet().print(steps_table(record))


# ---- QuACK --------------------------------------------------------------------------------------


def test_recorded_figures_cover_the_presets() -> None:
    for name, shape in PRESETS.items():
        entry = quack.entry(shape)
        assert entry["preset"] == name
        assert entry["ms"].keys() == set(PRODUCTS)
    assert quack.entry(TINY) is None


def test_quack_is_asked_for_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="quack: expected a GPU and the package quack"):
        measure_steps(plan_of(CPU, torch.float32), quiet(), with_quack=True)


def grouped(a: Tensor, b: Tensor, out: Tensor, config: Any, **how: Tensor) -> None:
    """QuACK's plain product, in plain torch."""
    assert config.cluster_m == 2
    summed = "cu_seqlens_k" in how
    ends = how["cu_seqlens_k" if summed else "cu_seqlens_m"].tolist()
    a = a[:, how["A_idx"].long()] if summed else a
    for e, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        if summed:
            out[e] = a[:, first:last] @ b[first:last]
        else:
            out[first:last] = a[first:last] @ b[e]


def test_quack_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of the six products, checked with a stand-in; a product that fails is left out."""
    seen: dict[str, tuple] = {}

    def act(x: Tensor, w: Tensor, preact_out: Tensor, postact_out: Tensor, **how: Any) -> None:
        seen["up"] = (w.shape, preact_out.shape, postact_out.shape)

    def dact(*operands: Tensor, **how: Any) -> None:
        raise RuntimeError("no such tile")

    interface = SimpleNamespace(
        gemm_act=act, gemm_dact=dact, gemm_tuned=SimpleNamespace(fn=grouped)
    )
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    config = SimpleNamespace(GemmConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "quack.gemm_config", config)
    (problem,) = make_problems(TINY, "random", torch.float64, CPU)
    chain = StepChain(problem)
    dw_up, dw_down = chain.dw_up.clone(), chain.dw_down.clone()
    calls, failures = quack.best_calls(chain)
    assert failures == {"down gradient": "no such tile"}
    assert calls.keys() == set(PRODUCTS) - {"down gradient"}
    assert seen["up"] == ((8, 32, 272), (96, 272), (96, 136))
    for name, written, right in (
        ("dW1", chain.dw_up, dw_up),
        ("dW2", chain.dw_down, dw_down),
    ):
        written.zero_()
        calls[name]()
        torch.testing.assert_close(written, right)
    calls["down"](), calls["up gradient"]()
