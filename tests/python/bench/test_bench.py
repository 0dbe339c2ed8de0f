"""`guild bench`: shapes, routings, the check before timing, interleaving, record and table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import guild
from forms import FORMS
from guild import num_sms
from guild.bench.candidates import (
    Bound,
    Floor,
    Layer,
    LimitedLayer,
)
from guild.bench.form import LayerForm, PlainForm
from guild.bench.layers import figures, measure
from guild.bench.names import ACTIVATIONS, GPU_CANDIDATES, LIMITED, PRODUCTS
from guild.bench.plan import BenchPlan
from guild.bench.plots import plot_bench
from guild.bench.presets import PRESETS, Shape, parse_shape
from guild.bench.problem import ROUTINGS, make_problems, wanted_logits
from guild.bench.reference import RESULTS, TOLERANCE, relative_errors
from guild.bench.tables.layers import bench_table
from guild.bench.timing import interleaved, median_ratio

CPU = torch.device("cpu")
TINY = Shape(tokens=48, hidden=32, intermediate=16, experts=8, top_k=2)


def plan_of(**changes: Any) -> BenchPlan:
    plain = {
        "shapes": {"tiny": TINY},
        "routings": ("random",),
        "candidates": ("guild", "bound", "plain"),
        "device": CPU,
        "dtype": torch.float32,
        "rounds": 3,
        "calls": 1,
    }
    return BenchPlan(**{**plain, **changes})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=150)


def test_parse_shape() -> None:
    assert parse_shape("24576,1536,256,128,8") == PRESETS["fine7b"]
    assert PRESETS["fine7b"].flops() == (6 * 24576 * 8 * 1536 * 256, 12 * 24576 * 8 * 1536 * 256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "expected five numbers T,H,I,E,K, got '1,2,3'"),
        ("a,8,8,2,1", "expected five whole numbers"),
        ("0,8,8,2,1", "expected tokens of at least 1, got 0"),
        ("4,8,-8,2,1", "expected intermediate of at least 1, got -8"),
        ("4,8,8,2,3", "expected top_k of at most experts = 2, got 3"),
        ("4,12,8,2,1", "expected hidden to be a multiple of 8, got 12"),
    ],
)
def test_parse_shape_names_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"thiek: {message}"):
        parse_shape(text)


def loads(routing: str, shape: Shape) -> torch.Tensor:
    logits = wanted_logits(shape, routing, CPU, torch.Generator().manual_seed(0))
    ids = logits.topk(shape.top_k, -1).indices
    return torch.bincount(ids.flatten(), minlength=shape.experts)


@pytest.mark.parametrize("experts", [16, 15])  # top_k divides one of them
def test_balanced_routing_is_even(experts: int) -> None:
    counts = loads("balanced", Shape(240, 32, 16, experts, 4))
    assert counts.unique().tolist() == [240 * 4 // experts]


def test_zipf_routing_follows_the_ranks() -> None:
    counts = loads("zipf", Shape(20_000, 32, 16, 16, 1)).sort(descending=True).values
    expected = 20_000 / torch.arange(1, 17) / (1 / torch.arange(1, 17)).sum()
    torch.testing.assert_close(counts.float(), expected, rtol=0.12, atol=30)
    random = loads("random", Shape(20_000, 32, 16, 16, 1))
    assert random.max() < 1.1 * random.float().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_is_written_into_x(routing: str, dtype: torch.dtype) -> None:
    shape = Shape(500, 64, 16, 16, 3)
    (problem,) = make_problems(shape, routing, dtype, CPU, seed=5)
    logits = problem.x.float() @ problem.router.float().mT
    best = logits.topk(4, -1)
    assert (best.values[:, 2] - best.values[:, 3]).min() > 0.1  # no rounding flips a choice
    rounded = F.linear(problem.x, problem.router).topk(3, -1).indices
    assert torch.equal(rounded.sort().values, best.indices[:, :3].sort().values)
    assert 0.8 < problem.x.float().std() < 1.5


def test_problem_errors() -> None:
    with pytest.raises(ValueError, match="expected hidden of at least experts = 16, got 8"):
        make_problems(Shape(4, 8, 8, 16, 2), "random", torch.float32, CPU)
    with pytest.raises(ValueError, match=r"routing: expected one of .* got 'even'"):
        make_problems(TINY, "even", torch.float32, CPU)
    with pytest.raises(ValueError, match=r"needs about \d+ GiB, this machine has"):
        make_problems(PRESETS["dsv3"]._replace(tokens=10**8), "random", torch.float32, CPU)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_agrees_with_autograd_in_float64(routing: str) -> None:
    (problem,) = make_problems(TINY, routing, torch.float64, CPU)
    errors, counts = relative_errors(problem, Layer("plain", [problem]).results())
    # The plain layer takes its softmax in float32.
    assert max(errors.values()) < 1e-6
    assert errors.keys() == set(RESULTS)
    assert counts.sum() == TINY.tokens * TINY.top_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_a_token(dtype: torch.dtype) -> None:
    """The router's gradient is zero then; rounding errors in it do not count."""
    (problem,) = make_problems(TINY._replace(top_k=1), "random", dtype, CPU)
    results = list(Layer("guild", [problem]).results())
    errors, _ = relative_errors(problem, tuple(results))
    assert max(errors.values()) < TOLERANCE[dtype]
    results[RESULTS.index("router_gradient")] += 1
    errors, _ = relative_errors(problem, tuple(results))
    assert errors["router_gradient"] > TOLERANCE[dtype]


def check_layer(
    name: str, dtype: torch.dtype, device: torch.device, form: LayerForm | None = None
) -> None:
    problem = make_problems(TINY, "zipf", dtype, device, form=form)[0]
    layer = Layer(name, [problem])
    errors, _ = relative_errors(problem, layer.results())
    assert max(errors.values()) < TOLERANCE[dtype]
    for got, want in zip(layer.backward(), layer.results()[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["guild", "plain"])
def test_layers_pass_the_check(name: str, dtype: torch.dtype, form: LayerForm) -> None:
    check_layer(name, dtype, CPU, form)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", ["guild", "compiled", "eager"])
def test_layers_pass_the_check_on_a_gpu(name: str, gpu: str, form: LayerForm) -> None:
    check_layer(name, torch.bfloat16, torch.device(gpu), form)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_expert_of_a_form_is_that_of_the_layer(form: LayerForm) -> None:
    """One expert, whose score is 1, and the formula of `guild.Activation`."""
    (problem,) = make_problems(Shape(9, 32, 16, 1, 1), "random", torch.float64, CPU, form=form)
    weights = [w[0].detach() for w in problem.experts().values()]
    w_up, w_down = (w.mT if form.transposed else w for w in weights[:2])
    b_up, b_down = weights[2:] if form.bias else (None, None)
    h = F.linear(problem.x, w_up, b_up)
    activation = guild.Activation.named(form.activation)
    truth = F.linear(activation(h, form.order), w_down, b_down)
    torch.testing.assert_close(form.expert(problem.x, *weights), truth)


def test_every_activation_has_a_form() -> None:
    """So that the test above compares all that the command line offers."""
    assert {form.activation for form in FORMS.values()} == set(ACTIVATIONS)


def test_small_gpu_inputs_come_in_several_sets(gpu: str) -> None:
    assert len(make_problems(TINY, "random", torch.bfloat16, torch.device(gpu))) > 1


def test_measure_on_a_gpu(gpu: str) -> None:
    device = torch.device(gpu)
    plan = plan_of(candidates=GPU_CANDIDATES, device=device, dtype=torch.bfloat16)
    (case,) = measure(plan, quiet())["cases"]
    assert case["failures"] == {}
    assert case["figures"].keys() == set(GPU_CANDIDATES)
    assert case["figures"]["guild"]["backward"]["speedup_over"].keys() == {"compiled", "eager"}


@pytest.mark.parametrize("which", range(len(RESULTS)))
def test_the_check_sees_every_result(which: int) -> None:
    (problem,) = make_problems(TINY, "random", torch.float32, CPU)
    results = list(Layer("plain", [problem]).results())
    results[which] = results[which] * 1.01
    errors, _ = relative_errors(problem, tuple(results))
    assert errors.pop(RESULTS[which]) == pytest.approx(0.01, rel=1e-2)
    assert max(errors.values()) < TOLERANCE[torch.float32]
    results[which] = results[which].clone()
    results[which].view(-1)[3] = float("nan")
    errors, _ = relative_errors(problem, tuple(results))
    assert not errors[RESULTS[which]] <= TOLERANCE[torch.bfloat16]


def test_bound_multiplies_balanced_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: products.append((a, b)) or real(a, b))
    bound = Bound(make_problems(TINY, "random", torch.float32, CPU))
    bound.forward()
    bound.backward()
    done = [a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2] for a, b in products]
    forward, backward = TINY.flops()
    assert 2 * sum(done[:2]) == forward
    assert 2 * sum(done[2:]) == backward


@pytest.mark.parametrize(("tokens", "rows"), [(48, 12), (47, 12), (45, 12), (44, 11)])
def test_bound_holds_every_row(tokens: int, rows: int) -> None:
    """Rows that experts cannot share evenly are rounded up: each takes as many as the fullest."""
    bound = Bound(make_problems(TINY._replace(tokens=tokens), "random", torch.float32, CPU))
    assert bound.calls({})["up"]().shape == (8, rows, 32)
    assert bound.calls({})["down"]().shape == (8, rows, 32)
    assert rows * TINY.experts >= tokens * TINY.top_k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floor_copies_what_the_bound_leaves_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, in pieces no larger than the limit; logits are float32."""
    copied = []
    real = torch.neg
    monkeypatch.setattr(torch, "neg", lambda a, out: copied.append(a) or real(a, out=out))
    monkeypatch.setattr(Floor, "_MOST", 1000)
    floor = Floor(make_problems(TINY, "random", dtype, CPU))
    t, h, i, e, k = TINY
    size = dtype.itemsize
    both = (t * k * h + t * h + t * h) * size
    for run, moved in (
        (floor.forward, both + 4 * t * e + t * k * i * size),
        (floor.backward, both + (t * e + 4 * t * k * i) * size),
    ):
        copied.clear()
        run()
        assert 2 * sum(a.nbytes for a in copied) == moved
        assert max(a.numel() for a in copied) == 1000


def test_bound_products_alone() -> None:
    """The six products are timed by name, and each writes to the result tensor that it is given."""
    bound = Bound(make_problems(TINY, "random", torch.float32, CPU))
    out = torch.full((8, 16, 32), float("nan"))
    calls = bound.calls({"dW2": out})
    assert tuple(calls) == PRODUCTS
    assert calls["dW2"]() is out and out.isfinite().all()
    assert calls["up"]().shape == (8, 12, 32)


def test_rounds_are_interleaved_in_orders_drawn_anew() -> None:
    log: list[str] = []
    calls = {name: (lambda n=name: log.append(n)) for name in "abc"}
    orders = []
    for _ in range(2):  # the same in every process: ranks take their turns together
        times = interleaved(calls, rounds=20, seconds=1e-9, device=CPU, calls_a_round=2)
        orders.append("".join(log)[-120:])
    assert orders[0] == orders[1]
    rounds = [orders[0][i : i + 6] for i in range(0, 120, 6)]
    assert {"".join(sorted(order)) for order in rounds} == {"aabbcc"}
    assert all(order[::2] == order[1::2] for order in rounds)
    assert len(set(rounds)) == 6
    assert [len(taken) for taken in times.values()] == [20, 20, 20]


def test_ratios_are_taken_round_by_round() -> None:
    found = median_ratio([2.0, 40.0, 4.0], [1.0, 10.0, 4.0])
    assert found == {"median": 2.0, "low": 1.0, "high": 4.0}


def test_figures() -> None:
    times = {
        "guild": {"forward": [1.0, 2.0, 6.0], "backward": [4.0, 4.0, 4.0]},
        "bound": {"forward": [1.0, 1.0, 2.0], "backward": [2.0, 2.0, 2.0]},
        "plain": {"forward": [6.0, 8.0, 5.0], "backward": [4.0, 4.0, 4.0]},
    }
    found = figures(times, Shape(1000, 100, 100, 8, 2))
    assert found["guild"]["forward"]["tflops"] == pytest.approx(6e-5 * 1e3)
    assert found["guild"]["backward"]["over_bound"]["median"] == 2
    assert found["guild"]["forward"]["speedup_over"]["plain"]["median"] == 4
    assert found["plain"]["forward"]["ms"] == {"median": 6.0, "low": 5.0, "high": 8.0}
    assert "over_bound" not in found["bound"]["forward"]


def test_measure_record_table_and_plot(tmp_path: Path) -> None:
    record = measure(plan_of(routings=("balanced", "zipf")), quiet())
    assert json.loads(json.dumps(record)) == record
    balanced, zipf = record["cases"]
    assert balanced["failures"] == zipf["failures"] == {}
    assert balanced["busiest_expert_over_mean"] == 1 < zipf["busiest_expert_over_mean"]
    assert balanced["shape"] == TINY._asdict()
    for case in (balanced, zipf):
        rows = case["figures"]["guild"]["forward"]
        assert rows["ms_per_1000_rows"] == pytest.approx(1e3 * rows["ms"]["median"] / (48 * 2))
    assert balanced["figures"]["guild"]["forward"]["over_balanced"]["median"] == 1
    assert balanced["figures"]["bound"] == zipf["figures"]["bound"]  # timed once for both
    assert record["device"]
    assert record["torch"] == torch.__version__
    for name in ("guild", "bound", "plain"):
        for direction in ("forward", "backward"):
            row = zipf["figures"][name][direction]
            assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
            assert len(row["rounds_ms"]) == 3
    console = quiet()
    console.print(bench_table(record))
    text = console.file.getvalue()
    assert "tiny" in text
    assert "1.000" in text  # balanced over balanced, per row
    assert f"{zipf['figures']['guild']['forward']['ms']['median']:.3f}" in text
    plot_bench(record, tmp_path / "bench.png")
    assert matplotlib.image.imread(tmp_path / "bench.png")[..., :3].std() > 0.05


def test_routings_share_weights() -> None:
    """Routings differ in tokens and router; the experts' weights are the same."""
    (first,) = make_problems(TINY, "balanced", torch.float32, CPU)
    (second,) = make_problems(TINY, "zipf", torch.float32, CPU, weights_of=[first])
    assert second.w_up is first.w_up and second.w_down is first.w_down
    assert not torch.equal(second.x, first.x)


def test_fewer_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies during the limited layer's calls and not after them."""
    seen: list[int] = []
    problems = make_problems(TINY, "random", torch.float32, CPU)
    layer = LimitedLayer(problems, 7)
    real = layer._modules[0].forward
    monkeypatch.setattr(layer._modules[0], "forward", lambda x: seen.append(num_sms()) or real(x))
    layer.forward()
    layer.backward()
    layer.results()
    assert seen == [7, 7, 7]
    assert num_sms() == 0
    times = {name: {"forward": [ms], "backward": [ms]} for name, ms in (("guild", 2), (LIMITED, 3))}
    found = figures(times, TINY)
    assert found[LIMITED]["forward"]["over_guild"]["median"] == 1.5
    assert found["guild"]["forward"]["speedup_over"] == {}


def test_measure_with_fewer_multiprocessors(gpu: str) -> None:
    device = torch.device(gpu)
    names = ("guild", LIMITED)
    plan = plan_of(candidates=names, device=device, dtype=torch.bfloat16, num_sms=16)
    (case,) = measure(plan, quiet())["cases"]
    assert case["failures"] == {}
    assert case["figures"].keys() == set(names)


class _WrongMoE(PlainForm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * super().forward(x)


class _BrokenMoE(PlainForm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this\nand a second line")


@pytest.mark.parametrize(
    ("layer", "message"),
    [(_WrongMoE, "wrong out: relative error 1.00e-03"), (_BrokenMoE, "no kernel for this")],
)
def test_what_fails_is_reported_and_not_timed(
    layer: type, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("guild.MoE", layer)
    record = measure(plan_of(), quiet())
    (case,) = record["cases"]
    assert case["failures"].keys() == {"guild"}
    assert case["failures"]["guild"].startswith(message)
    assert "\n" not in case["failures"]["guild"]
    assert case["figures"].keys() == {"bound", "plain"}
    console = quiet()
    console.print(bench_table(record))
    plot_bench(record, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000
