"""`guild bench --decode`: a layer's work is counted right, and wrong candidates are not timed."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from rich.console import Console

import guild
from forms import FORMS
from guild.bench.decode import measure as bench_decode
from guild.bench.decode.candidates import expected_output, own_candidate
from guild.bench.decode.changes import add_changes
from guild.bench.decode.layers import (
    experts_hit,
    layer_count,
    make_layers,
    make_weights,
    set_count,
)
from guild.bench.decode.measure import decode_figures, measure_decode, work_of
from guild.bench.decode.rates import Rates, measured_rates
from guild.bench.decode.table import decode_table
from guild.bench.form import LayerForm
from guild.bench.plan import BenchPlan, decode_tokens, plan_bench
from guild.bench.plots import plot_decode
from guild.bench.presets import DECODE_PRESETS, PRESETS, Shape
from guild.bench.problem import DECODE_ROUTINGS
from guild.bench.report import report
from guild.cli.main import main, make_parser

CPU = torch.device("cpu")
TINY = Shape(tokens=6, hidden=32, intermediate=16, experts=8, top_k=2)
PEER = """
from __future__ import annotations

from dataclasses import dataclass

import torch

@dataclass
class Unused:
    number: int

def decode_candidates(layers, part):
    if part == "layer":
        return {}
    def loops(layer):
        out = torch.zeros_like(layer.x)
        for t, (ids, scores) in enumerate(zip(layer.ids, layer.scores)):
            for e, score in zip(ids.tolist(), scores):
                gate, up = (layer.w_up[e] @ layer.x[t]).chunk(2)
                out[t] += score * (layer.w_down[e] @ (torch.nn.functional.silu(gate) * up))
        return out
    return {"loops": loops, "doubled": lambda layer: 2 * loops(layer)}
"""


def plan_of(**changes: Any) -> BenchPlan:
    plain = {
        "shapes": {"tiny": TINY},
        "routings": ("random",),
        "candidates": ("guild", "torch"),
        "device": CPU,
        "dtype": torch.float32,
        "rounds": 2,
        "calls": 1,
        "tokens": (1, 5),
    }
    return BenchPlan(**{**plain, **changes})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=260)


@pytest.fixture
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up rates, which save the second that measuring them takes."""
    machine = {"read_tbps": 1e-3, "matrix_tflops": 1.0}
    monkeypatch.setattr(bench_decode, "measured_rates", lambda *_: (Rates(1e3, 1e6), machine))


def layers_of(
    routing: str,
    device: torch.device = CPU,
    dtype: Any = torch.float64,
    form: LayerForm | None = None,
) -> list:
    generator = torch.Generator(device).manual_seed(3)
    weights = make_weights(TINY, form or LayerForm(), dtype, device, generator)
    return make_layers(weights, TINY, routing, 2 * len(weights), generator)


def test_routings() -> None:
    """The routings of one layer's tokens; another layer chooses other experts."""
    hot = layers_of("hot")
    assert any(all(e in ids for ids in hot[0].ids.tolist()) for e in range(TINY.experts))
    assert hot[0].ids.unique().numel() > TINY.top_k
    same = layers_of("same")
    assert all(layer.ids.unique().numel() == TINY.top_k for layer in same)
    assert len({tuple(sorted(layer.ids[0].tolist())) for layer in same}) > 1
    assert experts_hit(same) == TINY.top_k


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("routing", DECODE_ROUTINGS)
@pytest.mark.parametrize("part", ["experts", "layer"])
@pytest.mark.parametrize("name", ["guild", "torch"])
def test_candidates_agree_with_float64(name: str, part: str, routing: str, form: LayerForm) -> None:
    """Every layer of the graph has its own tokens and weights."""
    layers = layers_of(routing, form=form)
    call = own_candidate(name, layers, part)
    with torch.inference_mode():
        for layer in layers:
            torch.testing.assert_close(call(layer), expected_output(layer), rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected_output(layers[0]), expected_output(layers[1]))


def test_work_by_hand() -> None:
    """Bytes of the experts hit, of tokens, output and router; the longer of the two floors."""
    rates = Rates(read=100.0, matrix=1e9)
    expert = 3 * 32 * 16 * 2
    found = work_of(TINY, "experts", torch.bfloat16, 4.5, rates)
    assert found["bytes"] == 4.5 * expert + 2 * 6 * 32 * 2
    assert found["flops"] == 6 * 6 * 2 * 32 * 16
    assert (found["floor_us"], found["bound_by"]) == (found["bytes"] / 100, "memory")
    routed = work_of(TINY, "layer", torch.bfloat16, 4.5, rates)
    assert routed["bytes"] - found["bytes"] == 8 * 32 * 2
    assert routed["flops"] - found["flops"] == 2 * 6 * 32 * 8
    slow = work_of(TINY, "experts", torch.bfloat16, 4.5, Rates(1e9, 10.0))
    assert (slow["floor_us"], slow["bound_by"]) == (slow["flops"] / 10, "compute")


def test_figures_by_hand() -> None:
    """The graph's time counts where there is one; ratios are taken round by round."""
    times = {
        ("guild", "graph"): [0.010, 0.020, 0.040],
        ("guild", "eager"): [0.1, 0.2, 0.3],
        ("other", "eager"): [0.020, 0.025, 0.040],
    }
    found = decode_figures(times, moved=4e7, floor_us=8.0)
    assert found["guild"]["us"] == {"median": 20.0, "low": 10.0, "high": 40.0}
    assert found["guild"]["share_of_floor"]["median"] == 0.4
    assert found["guild"]["tbps"] == pytest.approx(2.0)
    assert found["guild"]["eager_us"]["median"] == 200.0
    assert (found["guild"]["how"], found["other"]["how"]) == ("graph", "eager")
    assert found["other"]["guild_over"] == pytest.approx({"median": 0.8, "low": 0.5, "high": 1})
    assert "guild_over" not in found["guild"]


def test_changes_by_hand() -> None:
    """Steps from one token count to the next, in any order of cases; skew beside random routing."""

    def case(routing: str, tokens: int, floor: float, **times: float) -> dict[str, Any]:
        figures = {name: {"us": {"median": us}} for name, us in times.items()}
        head = {"name": "tiny", "part": "layer", "routing": routing, "floor_us": floor}
        return {**head, "shape": {"tokens": tokens}, "figures": figures}

    random, zipf = case("random", 1, 2.0, guild=4.0, other=9.0), case("zipf", 1, 1.0, guild=3.0)
    later = case("random", 8, 6.0, guild=24.0)
    add_changes([later, zipf, random])
    assert later["figures"]["guild"]["step"] == pytest.approx(2.0)
    assert zipf["figures"]["guild"]["skew"] == pytest.approx(1.5)
    assert random["figures"]["guild"].keys() == {"us"} == random["figures"]["other"].keys()
    assert "step" not in zipf["figures"]["guild"] and "skew" not in later["figures"]["guild"]


def test_sets_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set is reused after four times the cache; weights leave memory free; graphs are long."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: type("Properties", (), {"L2_cache_size": 50_000_000}),
    )
    for free in (140_000_000_000, 78_000_000_000):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        for shape in DECODE_PRESETS.values():
            sets = set_count(shape, torch.bfloat16, gpu)
            expert = 6 * shape.hidden * shape.intermediate
            assert (sets - 1) * shape.top_k * expert >= 4 * 50_000_000
            assert sets * shape.experts * expert <= 0.6 * free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000_000_000,) * 2)
    assert set_count(PRESETS["dsv3"], torch.bfloat16, gpu) == 1  # too large a set is left to fail
    assert layer_count(4, floor_us=20.0, device=gpu) == 48
    assert layer_count(3, floor_us=100.0, device=gpu) == 21
    assert layer_count(4, floor_us=5000.0, device=gpu) == 12
    with pytest.raises(ValueError, match=r"needs about \d+ GiB, this machine has"):
        set_count(PRESETS["dsv3"]._replace(experts=10**6), torch.float32, CPU)


def test_rates() -> None:
    """The best of several ways to read counts; the record has them all."""
    rates, found = measured_rates(torch.float32, CPU)
    assert rates.read / 1e6 == found["read_tbps"] == max(found["reads_tbps"].values())
    assert found["reads_tbps"].keys() == {"sum", "product", "copy"}
    assert rates.matrix / 1e6 == found["matrix_tflops"] > 0


@pytest.mark.usefixtures("quick_rates")
def test_record_table_and_plot(tmp_path: Path) -> None:
    """A candidate from a file is timed too; a wrong candidate is not, and the others still are."""
    (tmp_path / "peer.py").write_text(PEER)
    plan = plan_of(routings=("random", "same"), peers=(tmp_path / "peer.py",))
    record = measure_decode(plan, quiet())
    assert json.loads(json.dumps(record)) == record
    at = [(c["routing"], c["shape"]["tokens"], c["part"]) for c in record["cases"]]
    parts = ("experts", "layer")
    assert at == [(r, t, p) for r in ("random", "same") for t in (1, 5) for p in parts]
    for case in record["cases"]:
        alone = case["part"] == "experts"
        assert case["figures"].keys() == (
            {"guild", "torch", "loops"} if alone else {"guild", "torch"}
        )
        assert list(case["failures"]) == (["doubled"] if alone else [])
        assert ("router_us" in case["figures"]["guild"]) != alone
        assert case["figures"]["torch"]["guild_over"]["median"] > 0
        assert ("step" in case["figures"]["guild"]) == (case["shape"]["tokens"] == 5)
        assert ("skew" in case["figures"]["guild"]) == (case["routing"] == "same")
    assert record["cases"][-1]["experts_hit"] == TINY.top_k
    assert "wrong out: relative error 1.0" in record["cases"][0]["failures"]["doubled"]
    console = quiet()
    console.print(decode_table(record))
    text = console.file.getvalue()
    assert "with the router" in text and "Guild / loops" in text and "failed" in text
    assert "step" in text and "skew" in text
    assert "same routing" in report(record | {"driver": "1"})
    plot_decode(record, tmp_path / "decode.png")
    assert matplotlib.image.imread(tmp_path / "decode.png")[..., :3].std() > 0.05


@pytest.mark.usefixtures("quick_rates")
def test_own_tokens_of_a_shape() -> None:
    """A shape's own token counts unless others are given; only requested parts are timed."""
    record = measure_decode(plan_of(tokens=(), parts=("layer",)), quiet())
    (case,) = record["cases"]
    assert (case["shape"]["tokens"], case["part"]) == (6, "layer")
    assert "router_us" not in case["figures"]["guild"]


@pytest.mark.usefixtures("quick_rates")
def test_candidate_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(guild, "routed_experts", fail)
    record = measure_decode(plan_of(tokens=(1,), parts=("experts",)), quiet())
    (case,) = record["cases"]
    assert case["failures"] == {"guild": "out of"}
    assert case["figures"].keys() == {"torch"}


LATE = """
calls = []

def decode_candidates(layers, part):
    def late(layer):
        calls.append(1)
        if len(calls) > 2:
            raise KeyError("late")
        return layer.x * 0 + want(layer)
    def want(layer):
        from guild.bench.decode.candidates import expected_output
        return expected_output(layer).to(layer.x.dtype)
    return {"late": late}
"""


@pytest.mark.usefixtures("quick_rates")
def test_a_candidate_that_fails_while_it_is_timed(tmp_path: Path) -> None:
    """With any error; the others' figures are complete."""
    (tmp_path / "peer.py").write_text(LATE)
    peers = (tmp_path / "peer.py",)
    record = measure_decode(plan_of(tokens=(1,), parts=("experts",), peers=peers), quiet())
    (case,) = record["cases"]
    assert case["failures"] == {"late": "'late'"}
    assert case["figures"].keys() == {"guild", "torch"}


@pytest.mark.usefixtures("quick_rates")
def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text("def decode_candidates(*_): return {3: print}")
    peers = (tmp_path / "peer.py",)
    record = measure_decode(plan_of(tokens=(1,), parts=("experts",), peers=peers), quiet())
    assert record["cases"][0]["failures"] == {"peer": "peer: expected names, got 3"}


def test_tokens_of_presets_and_of_a_shape() -> None:
    """A preset has the usual numbers, a shape of one's own has its own; or both those given."""
    words = ["bench", "--decode", "--device", "cpu", "--preset", "trainer"]
    words += ["--thiek", "7,16,8,4,2"]
    for more, expected in (([], [(1, 4, 16), (7,)]), (["--tokens", "2"], [(2,), (2,)])):
        plan = plan_bench(make_parser().parse_args([*words, *more]))
        assert [decode_tokens(plan, name) for name in plan.shapes] == expected


def test_times_are_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's time is divided by its number of layers."""
    monkeypatch.setattr(
        bench_decode, "interleaved", lambda calls, *rest: dict.fromkeys(calls, [24.0])
    )
    calls = {("experts", "guild", how): lambda: None for how in ("graph", "eager")}
    counts = {("experts", "guild", "graph"): 12, ("experts", "guild", "eager"): 1}
    times = bench_decode._time(calls, counts, plan_of())
    assert times == {("experts", "guild", "graph"): [2.0], ("experts", "guild", "eager"): [24.0]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 1,x", "tokens: expected whole numbers A,B, got '1,x'"),
        ("--tokens 0", "tokens: expected 1 to 65536, got 0"),
        (f"--tokens 1,{10**20}", f"tokens: expected 1 to 65536, got {10**20}"),
        ("--parts router", "parts: expected any of experts, layer, got 'router'"),
        ("--routing balanced", "routing: expected any of random, zipf, hot, same, or all, got"),
        ("--candidates bound", "candidates: expected any of guild, torch on cpu, got 'bound'"),
        ("--num-sms 3", "--num-sms: cannot be used with --decode"),
        ("--peer {tmp}/none.py", "peer: expected a Python file, got '.*none.py'"),
        ("--peer {tmp}/empty.py", "peer: expected a function decode_candidates in '.*empty.py'"),
        (
            "--peer {tmp}/empty.py --peer {tmp}/more/empty.py",
            "peer: expected files of different names, got 'empty' twice",
        ),
        ("--peer {tmp}/broken.py", "peer: '.*broken.py' cannot be run"),
        ("--peer {tmp}/exits.py", "peer: '.*exits.py' cannot be run"),
        ("--peer {tmp}/torch.py", "peer: expected a file of another name than 'torch'"),
        ("--thiek 4,8,8,16,2", "thiek: expected hidden of at least experts = 16, got 8"),
    ],
)
@pytest.mark.usefixtures("quick_rates")
def test_wrong_words(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    given = words.format(tmp=tmp_path).split()
    assert main(["bench", "--decode", "--device", "cpu", *given]) == 2
    assert re.search(f"guild bench: {message}", capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--tokens 1", "--parts layer", "--peer a.py"])
def test_options_of_decode_alone(option: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "--device", "cpu", *option.split()]) == 2
    assert "needs --decode" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_rates")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command writes JSON and a plot, which --report draws again."""
    words = "bench --decode --thiek 3,32,16,8,2 --device cpu --rounds 1 --calls 1".split()
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"decode.json", "decode.png"}
    record = json.loads((tmp_path / "decode.json").read_text())
    assert [case["shape"]["tokens"] for case in record["cases"]] == [3, 3]
    (tmp_path / "decode.png").unlink()
    words = ["bench", "--report", str(tmp_path / "decode.json"), "--out", str(tmp_path)]
    assert main(words) == 0
    assert (tmp_path / "decode.png").exists()
    assert "experts alone" in capsys.readouterr().out


def test_on_a_gpu(gpu: str) -> None:
    """Times in graphs, of single launches, and the host's share."""
    device = torch.device(gpu)
    shape = Shape(tokens=6, hidden=64, intermediate=64, experts=8, top_k=2)
    plan = plan_of(shapes={"tiny": shape}, device=device, dtype=torch.bfloat16)
    for case in measure_decode(plan, quiet())["cases"]:
        assert case["failures"] == {}
        assert case["layers"] >= 10 and case["weight_sets"] > 1
        for found in case["figures"].values():
            assert found["how"] == "graph" and found["host_us"] > 0
