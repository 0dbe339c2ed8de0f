"""The parts of a training run: corpus, settings, model, plain PyTorch layer."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

import guild
from guild.train.corpus import load_corpus, source_files, standard_library
from guild.train.dropping import DroppingMoE
from guild.train.embedding import Embedding
from guild.train.learner import Learner
from guild.train.model import Block
from guild.train.plain_moe import PlainMoE
from guild.train.rotary import rotary_tables, turned_heads, turned_heads_gradient
from guild.train.settings import MOST_SEED, Settings
from oracle.experts import Experts
from oracle.layer import moe
from training import small_settings, write_corpus

CPU = torch.device("cpu")


def model_of(**changes: int) -> torch.nn.Module:
    return Learner("plain", small_settings(**changes), CPU, torch.float32).model


def test_corpus_is_the_standard_library() -> None:
    names = {p.relative_to(standard_library()).as_posix() for p in source_files(standard_library())}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [n for n in names if n.startswith(("site-packages/", "test/", "idlelib/"))]
    corpus = load_corpus()
    assert corpus.train.numel() > 3_000_000
    assert 0.05 < corpus.held_out.numel() / corpus.train.numel() < 0.3
    assert load_corpus().digest == corpus.digest


def test_corpus_holds_out_whole_files(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "text")
    corpus = load_corpus(folder)
    whole = sum(path.stat().st_size for path in folder.glob("*.py"))
    assert corpus.train.numel() + corpus.held_out.numel() == whole
    # Adding or removing a file leaves the other files in their part.
    (folder / "zzz.py").write_text("x = 1\n" * 50)
    more = load_corpus(folder)
    assert {more.train.numel(), more.held_out.numel()} & {
        corpus.train.numel(),
        corpus.held_out.numel(),
    }


def test_digest_covers_both_parts(tmp_path: Path) -> None:
    """So that no run goes on with other bytes held out."""
    folder = write_corpus(tmp_path / "text")
    digests = {load_corpus(folder).digest}
    for path in source_files(folder):
        text = path.read_bytes()
        path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        digests.add(load_corpus(folder).digest)
        path.write_bytes(text)
    assert len(digests) == 1 + len(source_files(folder))


def test_corpus_skips_what_differs_between_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the standard library alone."""
    for name in ("a.py", "test/b.py", "site-packages/c.py", "config-3/d.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert len(source_files(tmp_path)) == 5
    monkeypatch.setattr("guild.train.corpus.standard_library", lambda: tmp_path)
    assert [path.name for path in source_files(tmp_path)] == ["a.py"]


def test_corpus_reads_files_alone(tmp_path: Path) -> None:
    """Folders, pipes and broken links are skipped whatever their names; names may be any bytes."""
    folder = write_corpus(tmp_path / "text")
    expected = load_corpus(folder)
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder / ".#link.py").symlink_to("user@host.1234")
    (folder / "loop.py").symlink_to("loop.py")
    found = load_corpus(folder)
    assert (found.digest, found.files) == (expected.digest, expected.files)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).write_text("x = 1\n")
    assert load_corpus(folder).files == expected.files + 1


def test_corpus_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus: expected a folder"):
        load_corpus(tmp_path / "missing")
    with pytest.raises(ValueError, match="0 training bytes, expected at least 130"):
        load_corpus(tmp_path)


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path))
    inputs, targets = corpus.batch(0, 5, 4, 32)
    assert not torch.equal(corpus.batch(MOST_SEED - 1, 1, 4, 32)[0], corpus.batch(0, 1, 4, 32)[0])
    assert inputs.shape == targets.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    corpus.batch(0, 6, 4, 32)
    assert torch.equal(corpus.batch(0, 5, 4, 32)[0], inputs)
    assert not torch.equal(corpus.batch(0, 6, 4, 32)[0], inputs)
    assert not torch.equal(corpus.batch(1, 5, 4, 32)[0], inputs)


def test_validation_windows_lie_in_the_held_out_bytes(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path))
    inputs, targets = corpus.held_out_windows(7, 32)
    assert torch.equal(inputs[0], corpus.held_out[:32].long())
    assert torch.equal(targets[-1], corpus.held_out[-32:].long())


def test_learning_rate_rises_then_falls() -> None:
    settings = Settings(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [settings.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=1e-2)
    assert max(rates) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("top_k", 9),
        ("hidden", 100),
        ("lr", math.nan),
        ("final_lr", 2.0),
        ("seed", -1),
    ],
)
def test_settings_name_what_is_wrong(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .* got {value}"):
        Settings(**{name: value})


def test_model_reads_no_later_byte() -> None:
    model = model_of()
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] ^= 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    # Not bit for bit: other choices of later tokens move the rows of earlier ones.
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-5)
    assert (before[:, 10] - after[:, 10]).abs().max() > 1e-3


def test_positions_matter() -> None:
    model = model_of()
    with torch.no_grad():
        logits = model(torch.tensor([[7, 9, 9, 9]]))
    assert not torch.allclose(logits[0, 1], logits[0, 2])


def test_gradients_of_turned_heads() -> None:
    """Gradients that are written in place equal autograd's, for parts of any layout."""
    tables = rotary_tables(torch.arange(6), 8, torch.float64)
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    parts = [torch.randn(2, 4, 6, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    expected = torch.autograd.grad(turned_heads(qkv, *tables), qkv, parts)
    compiled = torch.compile(turned_heads, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(qkv, *tables), qkv, parts), expected, rtol=0, atol=1e-14
    )
    torch.library.opcheck(turned_heads_gradient, (*parts, *tables))


def test_imbalance_is_one_for_an_even_load() -> None:
    block = model_of().blocks[0]
    x = torch.randn(8, 32)
    block.moe.router.weight.data.zero_()
    block.moe.expert_counts = torch.tensor([4, 4, 4, 4])
    assert block.imbalance(x).item() == pytest.approx(1.0)
    block.moe.router.weight.data[0] = 100 * x[0]
    block.moe.expert_counts = torch.tensor([16, 0, 0, 0])
    assert block.imbalance(x[:1]).item() == pytest.approx(4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_imbalance_is_of_the_routers_own_logits(dtype: torch.dtype) -> None:
    """The router's bias is included, and autocast leaves the logits in float32."""
    moe = guild.MoE(32, 16, 4, 2, router_bias=True)
    moe.router.bias.data.copy_(torch.tensor([3.0, 0.0, 0.0, -3.0]))
    block, x = Block(32, 2, moe), torch.randn(2, 8, 32)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        _, routing = moe(x, return_routing=True)
        found = block.imbalance(x)
    share = torch.bincount(routing.ids.flatten(), minlength=4) / routing.ids.numel()
    mean = routing.logits.flatten(0, 1).softmax(-1).mean(0)
    torch.testing.assert_close(found, 4 * (share * mean).sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("capacity", [0.1, 0.75, 1.0])
def test_capacity_counts_real_slots_alone(device: str, capacity: float) -> None:
    """Padding affects neither which slots are dropped nor the result, even if all is padding."""
    torch.manual_seed(6)
    place = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    layer = DroppingMoE(32, 16, 4, 2, capacity=capacity, **place)
    x, padding = torch.randn(24, 32, **place), torch.full((40, 32), float("nan"), **place)
    mask = torch.arange(64, device=device) < 24
    out, padded = layer(x), layer(torch.cat((x, padding)), mask)
    counts = layer.expert_counts
    assert torch.equal(padded[:24], out) and not padded[24:].any()
    assert 0 < counts.max() <= math.ceil(capacity * 48 / 4) < 48
    assert not layer(padding, mask[24:]).any() and not layer.expert_counts.any()


@pytest.mark.parametrize("router_bias", [False, True])
def test_training_without_gradients_drops_too(router_bias: bool) -> None:
    torch.manual_seed(8)
    layer = DroppingMoE(32, 16, 4, 2, capacity=0.5, router_bias=router_bias)
    x = torch.randn(24, 32)
    out = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), out)
        assert not torch.equal(layer.eval()(x), out)


def test_plain_layer_is_the_sum_over_choices() -> None:
    torch.manual_seed(0)
    layer = PlainMoE(16, 8, 5, 3).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    leaves = dict(layer.named_parameters())
    experts = Experts.of(leaves, guild.Activation(), "concatenated", False)
    tokens, real, router = x.view(18, 16), torch.arange(18), guild.Router()
    results = moe(leaves, tokens, real, experts, 3, router, None, 1, False, "concatenated")
    expected = results.out.view_as(x)
    out = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert layer.expert_counts.sum() == 2 * 9 * 3
    weights = (x, *layer.parameters())
    weight = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, weights, weight),
        torch.autograd.grad(expected, weights, weight),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_plain_layer_rejects_top_k() -> None:
    with pytest.raises(ValueError, match=r"top_k: expected 1 .. 4 \(experts\), got 5"):
        PlainMoE(16, 8, 4, 5)


@pytest.mark.parametrize("rows", [3, 256])
def test_embedding_gradient(rows: int, device: str) -> None:
    """PyTorch's, in the same order every time, whatever the mode; the mode stays as it was."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, rows, (64, 256), generator=draw).to(device)
    dout = torch.randn(64, 256, 32, generator=draw).to(device)
    layer = Embedding(rows, 32).to(device)
    torch.nn.init.normal_(layer.weight)
    assert torch.equal(layer(tokens), layer.weight[tokens])
    found = [torch.autograd.grad(layer(tokens), layer.weight, dout)[0] for _ in range(5)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.are_deterministic_algorithms_enabled()
    weight = layer.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(weight[tokens], weight, dout.double())
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-4)
