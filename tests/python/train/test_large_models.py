"""What models on several GPUs need: the loss of a large vocabulary, sizes by name, speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import guild
from guild.cli.main import main, make_parser
from guild.cli.train_command import plan_run, resume_command
from guild.train.head import _even_chunk, chunked_cross_entropy
from guild.train.learner import moe_factory
from guild.train.model import LanguageModel
from guild.train.plain_shared import PlainSharedMoE
from guild.train.presets import PRESETS
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings
from guild.train.speed import flops_per_token, speed_facts, speed_of, speed_summary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 1, 7, 40])
def test_chunked_cross_entropy(dtype: torch.dtype, chunk: int) -> None:
    """The loss and gradients of float32 logits for any chunk size, with a short last chunk."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=draw).to(dtype) for n in (33, 50))
    targets = torch.randint(0, 50, (33,), generator=draw)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    loss = chunked_cross_entropy(*leaves, targets, chunk)
    (3 * loss).backward()
    exact = [t.double().requires_grad_() for t in (x, weight)]
    truth = F.cross_entropy(F.linear(*exact), targets)
    (3 * truth).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    bound = 1e-6 if dtype == torch.float32 else 8e-3
    for leaf, expected in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == dtype
        assert (leaf.grad - expected.grad).norm() < bound * expected.grad.norm()
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(x, weight, targets, chunk), loss)


def test_gradient_of_a_part_of_a_batch() -> None:
    """A third in bfloat16 would be 0.2 % too large."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=draw), torch.randn(50, 128, generator=draw)
    targets = torch.randint(0, 50, (64,), generator=draw)
    leaf = x.bfloat16().requires_grad_()
    (chunked_cross_entropy(leaf, weight.bfloat16(), targets, 16) / 3).backward()
    exact = x.bfloat16().double().requires_grad_()
    (F.cross_entropy(F.linear(exact, weight.bfloat16().double()), targets) / 3).backward()
    ratio = (leaf.grad.double() * exact.grad).sum() / (exact.grad**2).sum()
    assert abs(ratio - 1) < 5e-4


def test_chunks_are_even() -> None:
    """All chunks have the same size where a size divides the number of tokens."""
    assert _even_chunk(16384, 2674) == 2048
    assert [_even_chunk(n, 10) for n in (0, 1, 10, 11, 21, 23)] == [1, 1, 10, 6, 7, 8]


def test_sizes_by_name() -> None:
    """SonicMoE's 7B has its paper's weights and operations; every name gives complete settings."""
    for preset in PRESETS.values():
        Settings(**preset)
    s = Settings(**PRESETS["fine7b"])
    with torch.device("meta"):
        factory = moe_factory("guild", torch.device("cpu"), s)
        sizes = s.hidden, s.layers, s.heads, s.intermediate, s.experts, s.top_k
        model = LanguageModel(*sizes, factory, s.vocabulary)
    weights = sum(weight.numel() for weight in model.parameters())
    assert 6.6e9 < weights < 7e9
    assert flops_per_token(s) == pytest.approx(8.14e9, rel=5e-3)


def test_speed() -> None:
    """Tokens per second are those of one rank; unknown figures are left out."""
    s = Settings(batch=8, context=100)
    assert speed_of(s, 0.5, 4, torch.device("cpu")) == {}
    speed = {"tokens_per_second_per_gpu": 400.0}
    rows = [speed | {"mfu": m, "memory_gib": g} for m, g in ((0.1, 5.0), (0.3, 7.0), (0.2, 6.0))]
    assert speed_summary(rows) == speed | {"mfu": 0.2, "memory_gib": 7.0}
    assert speed_facts(speed_summary(rows)) == "400 tokens/s/GPU  MFU 20.0 %  7.0 GiB"
    assert speed_summary([{"loss": 1.0}]) == {} and speed_facts({}) == ""


def test_plain_layer_with_shared_experts() -> None:
    """It computes the same as Guild's, with the same parameter names."""
    torch.manual_seed(0)
    ours = guild.MoE(16, 8, 4, 2, shared_intermediate=24)
    plain = PlainSharedMoE(16, 8, 4, 2, shared=24)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(3, 10, 16)
    torch.testing.assert_close(plain(x), ours(x), rtol=1e-5, atol=1e-6)


def plan_of(*words: str):
    return plan_run(vars(make_parser().parse_args(["train", "--device", "cpu", *words])))


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed sizes override a preset's; options for several ranks require --fsdp."""
    settings, plan = plan_of("--preset", "fine1b", "--layers", "3", "--fsdp", "--no-checkpoint")
    assert (settings.hidden, settings.layers, settings.context) == (1024, 3, 4096)
    assert plan.fsdp and plan.expert_parallel == 1 and plan.cuda_graph and not plan.checkpoints
    assert not plan_of("--no-cuda-graph")[1].cuda_graph
    for words, text in (
        (("--expert-parallel", "2"), "^--expert-parallel: needs --fsdp"),
        (("--keep-gathered",), "^--keep-gathered: needs --fsdp"),
        (("--fsdp", "--expert-parallel", "0"), "^expert_parallel: expected at least 1"),
        (("--fsdp", "--compare"), "^--compare: cannot be used with --fsdp"),
        (("--vocabulary", "100"), "^vocabulary: expected at least 256"),
        (("--shared", "12"), "^shared: expected a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_of(*words)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^--fsdp: needed where torchrun"):
        plan_of()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    typed = {"fsdp": True, "expert_parallel": 2, "keep_gathered": True, "no_cuda_graph": True}
    command = resume_command(typed, Path("a"))
    assert command == (
        "torchrun --nproc-per-node 2 -m guild train --resume --out a --expert-parallel 2 --fsdp "
        "--keep-gathered --no-cuda-graph"
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert resume_command({"fsdp": True}, Path("a")) == (
        "torchrun --nnodes 3 --rdzv-backend c10d --rdzv-endpoint node-0 --nproc-per-node 2 -m "
        "guild train --resume --out a --fsdp"
    )
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    odd = resume_command({"corpus": Path("-c"), "fsdp": True}, Path(os.fsdecode(b"a '\xff\\")))
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {odd}"], stdout=subprocess.PIPE, check=True
    ).stdout.splitlines()
    assert words[words.index(b"--out") + 1 :] == [b"a '\xff\\", b"--corpus=-c", b"--fsdp"]


@pytest.mark.parametrize("words", [("--shared", "12"), ("--nothing",), ("--resume",)])
def test_a_node_says_once_what_is_wrong(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        try:
            status = main(["train", "--device", "cpu", "--out", str(tmp_path), *words])
        except SystemExit as exit_:
            status = exit_.code
        assert status == 2
        said.append(capsys.readouterr().err)
    assert "guild train: " in said[0] and said[1] == ""


@pytest.mark.parametrize(
    "words, wrong",
    [
        (("--batch", "3"), "batch: expected a multiple of 2"),
        (("--expert-parallel", "3"), "expert_parallel: expected a divisor of 2"),
        (("--moe", "plain"), "moe: expected --balance 0"),
        (("--capacity", "1"), "capacity: expected 0 with --fsdp"),
    ],
)
def test_what_ranks_cannot_divide_is_said_before_they_meet(
    words: tuple[str, ...], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"^{wrong}"):
        plan_of("--device", "cpu", "--fsdp", "--out", str(tmp_path), *words)


@pytest.mark.parametrize("moe", [("fp8",), ("fp8", "guild"), ("guild", "plain")])
def test_ranks_refuse_checkpoints(moe: tuple[str, ...], tmp_path: Path) -> None:
    """Of what they cannot train."""
    state = {"step": 0, "settings": Settings().as_dict(), "dtype": "torch.bfloat16", "corpus": ""}
    RunFolder(tmp_path).save_checkpoint(state | {"learners": {name: {} for name in moe}})
    words = "--resume", "--out", str(tmp_path)
    assert plan_of(*words)[1].layers == moe
    with pytest.raises(
        ValueError, match=r"^--fsdp: cannot be used with a checkpoint of (two layers|FP8)$"
    ):
        plan_of(*words, "--fsdp")
