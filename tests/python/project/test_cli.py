"""The `guild` command from the outside: help, errors, exit statuses, Ctrl-C, files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from guild.cli.main import main
from guild.train.interrupt import INTERRUPTED
from training import StopAfter, write_corpus

PACKAGE = Path(__import__("guild").__file__).parent.parent
SMALL = (
    "--batch 4 --context 32 --hidden 32 --layers 1 --heads 2 --experts 4 --intermediate 16 "
    "--warmup 2 --device cpu --threads 1"
).split()


def start(*command: str, **environment: str) -> subprocess.Popen:
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, guild.cli.main\n"
        "parser = guild.cli.main.make_parser()\n"
        "assert 'bench' in parser.format_help()\n"
        "print('heavy:', {'torch', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    output, _ = start("-c", code).communicate(timeout=60)
    assert output == "heavy: set()\n"


def test_layers_load_no_distributed_tensors() -> None:
    """Which take as long to import as all of Guild several times over."""
    code = (
        "import sys, guild\n"
        "guild.MoE, guild.routed_experts\n"
        "print('heavy:', {'torch.distributed.tensor', 'torch.distributed.fsdp'} & set(sys.modules))"
    )
    output, _ = start("-c", code).communicate(timeout=60)
    assert output == "heavy: set()\n"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("info", 0, ""),
        ("generate nowhere", 2, "guild generate: run: expected a folder .* got 'nowhere'\n"),
        ("bench", 1, "guild bench: .*rich.*; pip install 'guild\\[cli\\]' brings it\n"),
        ("train", 1, "guild train: .*rich.*; pip install 'guild\\[cli\\]' brings it\n"),
    ],
)
def test_without_the_commands_packages(command: str, status: int, message: str) -> None:
    """The library, `guild info` and `guild generate` need nothing but torch."""
    block = "sys.modules |= dict.fromkeys(('matplotlib', 'numpy', 'rich'))"
    code = (
        f"import sys; {block}; from guild.cli.main import main; sys.exit(main({command.split()}))"
    )
    run = start("-W", "ignore", "-c", code)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == status, output
    if message:
        assert re.fullmatch(message, output), output


@pytest.mark.parametrize("command", [[], ["train"], ["generate"], ["bench"], ["info"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert "usage: guild" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "train", "generate run", "bench", "info"])
def test_unknown_option_shows_the_commands_own_usage(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--stesp", "9"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    command = command.split(" ")[0]
    name = f"guild {command}".rstrip()
    assert printed.startswith(f"usage: {name} [-h]")
    if command:
        assert printed.endswith(f"{name}: error: unrecognized arguments: --stesp 9\n")


@pytest.mark.parametrize("command", ["train", "generate", "bench"])
def test_help_calls_numbers_n_or_x(command: str, capsys: pytest.CaptureFixture) -> None:
    """Help never repeats an option's name for its value, as in `--rounds ROUNDS`."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    for option, value in re.findall(r"--([a-z-]+) ([A-Z_]+)\b", capsys.readouterr().out):
        assert value != option.replace("-", "_").upper()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --steps 0", "steps: expected at least 1, got 0"),
        ("train --top-k 9", "top_k: expected at most experts = 8, got 9"),
        ("train --hidden 100", "hidden: expected a multiple of 8 .* got 100"),
        ("train --heads 5 --device cpu", "heads: expected a divisor of hidden 128 .* got 5"),
        ("train --lr -1", r"lr: expected a positive number, got -1\.0"),
        ("train --device tpu", "device: expected auto, cpu, cuda or cuda:<index>, got 'tpu'"),
        ("train --device cpu:5", "device: expected auto, cpu, cuda or cuda:<index>, got 'cpu:5'"),
        ("train --device cuda:99", "device: 'cuda:99' asked for, this machine has"),
        ("train --corpus /nowhere", "corpus: expected a folder of .py files, got '/nowhere'"),
        ("train --threads 0", "threads: expected 1 to 4096, got 0"),
        (f"train --threads {10**20}", f"threads: expected 1 to 4096, got {10**20}"),
        (f"train --seed {10**20}", f"seed: expected 0 to {2**62}, got {10**20}"),
        (f"train --batch {2**62}", f"batch: expected at most {2**31 - 1}, got {2**62}"),
        (f"train --warmup {10**20}", f"warmup: expected at most {2**31 - 1}, got {10**20}"),
        (f"train --shared {10**21}", f"shared: expected at most {2**31 - 1}, got {10**21}"),
        (
            "train --router deepseek_v3 --experts 4",
            "router: deepseek_v3 does not fit 4 experts of which a token goes to 2: groups: ex",
        ),
        ("train --check-every 0", "check_every: expected at least 1, got 0"),
        (
            "train --compare --moe plain",
            "--compare: cannot be used with --moe plain: it trains both",
        ),
        ("train --resume --out nowhere", r"resume: no checkpoint\.pt in 'nowhere'"),
        ("bench --thiek 1,2", "thiek: expected five numbers"),
        ("bench --rounds 0", "rounds: expected at least 1, got 0"),
        ("bench --calls 0", "calls: expected at least 1, got 0"),
        ("bench --seed -1", f"seed: expected 0 to {2**62}, got -1"),
        (f"bench --seed {2**64}", f"seed: expected 0 to {2**62}, got {2**64}"),
        ("bench --seconds 0", r"seconds: expected a positive number, got 0\.0"),
        ("bench --quack", "--quack: needs --steps"),
        ("bench --memory --bias", "--bias: cannot be used with --memory"),
        ("bench --steps --bias --transposed", "--transposed: cannot be used with --steps"),
        ("bench --fp8 --activation gpt_oss", "--activation: cannot be used with --fp8"),
        ("bench --sonicmoe --order interleaved", "--order: cannot be used with --sonicmoe"),
        ("bench --memory --rounds 1", "--rounds: cannot be used with --memory"),
        ("bench --memory --seconds 1", "--seconds: cannot be used with --memory"),
        ("bench --memory --calls 1", "--calls: cannot be used with --memory"),
        ("bench --steps --num-sms 9", "--num-sms: cannot be used with --steps"),
        ("bench --memory --num-sms 9", "--num-sms: cannot be used with --memory"),
        ("bench --rounding --num-sms 9", "--num-sms: cannot be used with --rounding"),
        ("bench --rounding --candidates bound", "--candidates: cannot be used with --rounding"),
        ("bench --sweep 0", "sweep: expected at least 1, got 0"),
        ("bench --sweep 2 --thiek 8,8,8,2,1", "--sweep: cannot be used with --preset or --thiek"),
        ("bench --report /nowhere.json", "report: expected a JSON file, got '/nowhere.json'"),
        ("bench --report /nowhere.json --rounds 2", "--rounds: cannot be used with --report"),
        ("bench --report /nowhere.json --preset dsv3", "--preset: cannot be used with --report"),
        ("bench --routing=", "routing: expected any of balanced, .*, or all, got ''"),
        ("bench --device cpu --candidates=", "candidates: expected any of .*, got ''"),
        ("bench --device cpu --decode --tokens=", "tokens: expected whole numbers A,B, got ''"),
        ("bench --device cpu --decode --parts=", "parts: expected any of experts, layer, got ''"),
        ("bench --tokens=", "--tokens: needs --decode"),
        ("bench --steps --quack --device cpu --preset trainer", "quack: expected a GPU and the"),
        ("bench --num-sms 0", "num_sms: expected at least 1, got 0"),
        ("bench --device cpu --seconds 1 --calls 2", "--seconds: cannot be used with --calls"),
        ("bench --device cpu --num-sms 9", "num_sms: expected a GPU to limit, got the device cpu"),
        ("bench --routing zipf,even", "routing: expected any of balanced, .*, or all, got 'even'"),
        ("bench --device cpu --candidates guild,fast", "candidates: expected any of .*'fast'"),
    ],
)
def test_bad_arguments(
    command: str, message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    words = command.split()
    if words[0] == "train" and "--out" not in words:
        words += ["--out", str(tmp_path)]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(rf"guild {words[0]}: {message}.*\n", printed)


@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_cannot_be_written(buffered: bool) -> None:
    """A full disk is named; that nobody reads any more, as after `| head`, changes no status."""
    guild = [sys.executable, *([] if buffered else ["-u"]), "-m", "guild", "info"]
    place = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    with open("/dev/full", "w") as full:
        run = subprocess.run(guild, stdout=full, stderr=subprocess.PIPE, text=True, env=place)
    expected = "guild info: standard output: No space left on device\n"
    assert (run.returncode, run.stderr) == (2, expected)
    reader, writer = os.pipe()
    os.close(reader)
    for library, status in ({}, 0), ({"GUILD_LIBRARY": "/nowhere"}, 1):
        run = subprocess.run(
            guild, stdout=writer, stderr=subprocess.PIPE, text=True, env=place | library
        )
        assert (run.returncode, run.stderr) == (status, "")
    os.close(writer)


def test_errors_do_not_go_to_standard_output() -> None:
    """Where standard error is closed, print() would write to it."""
    command = f"{sys.executable} -m guild generate nowhere 2>&-"
    run = subprocess.run(
        command, shell=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PACKAGE)}
    )
    assert (run.returncode, run.stdout) == (2, b"")


def test_float32_is_for_the_cpu(gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "--dtype", "float32", "--device", gpu, "--out", str(tmp_path)]
    assert main(words) == 2
    assert "dtype: expected bfloat16 on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 8 bytes"
        ),
        torch.OutOfMemoryError("can't allocate memory: you tried to allocate 8 bytes\nmore"),
    ],
)
def test_no_memory_left(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("guild.cli.info.run_info", Mock(side_effect=error))
    assert main(["info"]) == 1
    expected = "out of memory: can't allocate memory: you tried to allocate 8 bytes"
    assert capsys.readouterr().err == f"guild info: {expected}\n"
    monkeypatch.setattr("guild.cli.info.run_info", Mock(side_effect=RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        main(["info"])


@pytest.mark.parametrize("command", ["train --out", "train --corpus", "bench --out", "generate"])
def test_a_path_is_not_empty(command: str, capsys: pytest.CaptureFixture) -> None:
    """As from an unset variable; it would stand for the current folder."""
    with pytest.raises(SystemExit):
        main([*command.split(), ""])
    assert "expected a path, got an empty text" in capsys.readouterr().err


def test_out_must_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    corpus = str(write_corpus(tmp_path / "corpus"))
    assert main(["train", *SMALL, "--corpus", corpus, "--out", str(file)]) == 2
    assert "out: expected a folder" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--out", str(file)]) == 2
    assert "out: expected a folder, got the file" in capsys.readouterr().err


def test_train_interrupted_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    corpus = str(write_corpus(tmp_path / "corpus"))
    files = ["--corpus", corpus, "--out", str(out)]
    run = start("-m", "guild", "train", *SMALL, "--steps", "200", *files)
    deadline = time.monotonic() + 120
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED, output
    assert "--resume" in output
    reached = len((out / "metrics.jsonl").read_text().splitlines())
    assert 0 < reached < 200
    # The settings come from the checkpoint.
    again = start("-m", "guild", "train", "--resume", *files, "--device", "cpu")
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert "continuing at step" in output
    assert "written by the model" in output
    listed = output[output.index("results in ") :].replace(",", " ").split()
    assert {path.name for path in out.iterdir()} <= set(listed)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 200
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 201))


def test_stopped_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guild.cli.train_command.StopRequest", lambda: StopAfter(1))
    files = ["--out", str(tmp_path / "run"), "--corpus", str(write_corpus(tmp_path / "corpus"))]
    assert main(["train", *SMALL, *files, "--no-checkpoint"]) == INTERRUPTED
    printed = capsys.readouterr().out
    assert "without a checkpoint" in printed and "--resume" not in printed


def test_train_compare_prints_both_speeds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = str(write_corpus(tmp_path / "corpus"))
    out = ["--out", str(tmp_path / "run"), "--corpus", corpus]
    assert main(["train", "--compare", "--steps", "10", *SMALL, *out]) == 0
    printed = capsys.readouterr().out
    for line in ("Guild: step", "plain PyTorch: step", "time ratio", "loss difference"):
        assert line in printed


def test_train_in_fp8_beside_bf16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One run trains both curves and can be resumed; their losses are close, but not equal."""
    out = ["--out", str(tmp_path / "run"), "--corpus", str(write_corpus(tmp_path / "corpus"))]
    assert main(["train", "--fp8", "--steps", "3", *SMALL, *out]) == 0
    printed = capsys.readouterr().out
    for line in ("Guild in FP8: step", "Guild: step", "Guild in FP8 over Guild"):
        assert line in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["moe"] == "fp8" and summary["dtype"] == "bfloat16"
    assert 0 < summary["compare"]["largest_loss_difference"] < 0.2
    assert main(["train", "--resume", "--steps", "4", *out]) == 0
    capsys.readouterr()
    for words, message in (
        (["--fp8", "--compare"], "--fp8: cannot be used with --compare: it trains two layers"),
        (["--fp8", "--fsdp"], "--fp8: cannot be used with --fsdp"),
        (["--moe", "fp8", "--fsdp"], "--moe fp8: cannot be used with --fsdp"),
        (["--fp8", "--dtype", "float32"], "dtype: expected bfloat16 in FP8, got float32"),
    ):
        assert main(["train", *words, *SMALL, *out]) == 2
        assert message in capsys.readouterr().err


def test_bench_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = "bench --thiek 16,16,8,4,2 --device cpu --rounds 1 --calls 1 --json --out".split()
    assert main([*words, str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "bench.json").read_text())
    assert printed["cases"][0]["name"] == "16,16,8,4,2"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_steps_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = "bench --steps --thiek 16,16,8,4,2 --device cpu --rounds 1 --calls 1 --json --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "steps.json").read_text())
    assert printed["cases"][0]["routing"] == "balanced"


def test_info(capsys: pytest.CaptureFixture) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^library +\S+libguild_torch\.so$", printed, re.MULTILINE)
    assert re.search(r"^CPU path +used for CPU tensors$", printed, re.MULTILINE)
    assert re.search(r"^CUDA path +(used|not used: \w)", printed, re.MULTILINE)


def test_info_says_why_there_is_no_library(tmp_path: Path) -> None:
    missing = str(tmp_path / "libguild_torch.so")
    run = start("-m", "guild", "info", GUILD_LIBRARY=missing)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert f"was not found (looked for {missing})" in output
    assert re.search(r"^CPU path +not used: no library$", output, re.MULTILINE)
