"""`guild train` on the command line: arguments to a plan, the run, and the summary as a table."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from guild.cli.console import CommandConsole
from guild.cli.failures import said_once
from guild.options import excludes, needs
from guild.provenance import make_current, pick_device, set_threads
from guild.train.interrupt import INTERRUPTED, StopRequest
from guild.train.loop import Plan, Training
from guild.train.names import NAMES
from guild.train.presets import PRESETS
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings
from guild.train.speed import speed_facts
from guild.train.world import (
    SharedStop,
    all_ranks,
    device_of_rank,
    expect_layout,
    is_started_by_torchrun,
    joined,
    local_ranks,
    rendezvous,
    run_folder,
    writes,
    written_by_one,
)

_FLAGS = ("fsdp", "keep_gathered", "no_cuda_graph")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_train(args: argparse.Namespace) -> int:
    """Train, show the results, return the exit status."""
    console = CommandConsole()
    typed = vars(args)
    if "threads" in typed:
        set_threads(typed["threads"])
    with said_once():
        settings, plan = plan_run(typed)
    if plan.fsdp:
        return _train_on_ranks(settings, plan, typed, console)
    make_current(plan.device)
    with RunFolder(plan.out).claimed():
        return _train(settings, plan, typed, console)


def _train_on_ranks(settings: Settings, plan: Plan, typed: dict[str, Any], console: Console) -> int:
    """Run as one of torchrun's processes; only the first one has the folder and the console."""
    plan = dataclasses.replace(plan, device=device_of_rank(plan.device))
    with joined(plan.device), contextlib.ExitStack() as claim:
        if not writes():
            console = Console(file=io.StringIO())
        with written_by_one():
            claim.enter_context(run_folder(plan.out).claimed())
        return _train(settings, plan, typed, console)


def _train(settings: Settings, plan: Plan, typed: dict[str, Any], console: Console) -> int:
    with said_once():
        training = Training(settings, plan, console)
    if training.is_finished:
        _say(
            console,
            f"the run in {plan.out} is finished: all of its {settings.steps} steps are done; to go "
            f"on: {resume_command(typed, plan.out)} --steps {2 * settings.steps}",
        )
        return 0
    with SharedStop(plan.device) if plan.fsdp else StopRequest() as stop:
        summary = training.run(stop)
    if summary is None:
        stopped = f"stopped at step {training.step} of {settings.steps}"
        if training.saved is None:
            _say(console, f"{stopped}, without a checkpoint")
        else:
            where = "" if training.saved == training.step else f" from step {training.saved}"
            nodes = ", on every node" if plan.fsdp and rendezvous() else ""
            _say(console, f"{stopped}; to continue{where}{nodes}:")
            _say(console, f"  {resume_command(typed, plan.out)}")
        return INTERRUPTED
    if summary:
        show(summary, plan.out, console)
    return 0


def resume_command(typed: dict[str, Any], out: Path) -> str:
    """The command that continues a run, as it can be typed, on every node if there are several.

    It repeats what the checkpoint does not hold: where the bytes come from, and how to compute.
    """
    words = command_of("guild", "guild")
    if typed.get("fsdp"):
        torchrun = command_of("torchrun", "torch.distributed.run")
        words = [*torchrun, *rendezvous(), "--nproc-per-node", str(local_ranks()), "-m", "guild"]
    words += ["train", "--resume", *_option("out", out)]
    for name in ("corpus", "device", "check_every", "threads", "expert_parallel"):
        if name in typed:
            words += _option(name, typed[name])
    words += ["--" + name.replace("_", "-") for name in _FLAGS if typed.get(name)]
    return " ".join(map(_quoted, words))


def _option(name: str, value: object) -> list[str]:
    """An option and its value, as one word where the value would pass for an option."""
    option, text = "--" + name.replace("_", "-"), str(value)
    return [f"{option}={text}"] if text.startswith("-") else [option, text]


def _quoted(word: str) -> str:
    """A word for a shell; bytes of a path that are no UTF-8 as bash, ksh and zsh write them."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "$'" + "".join(_escaped(byte) for byte in os.fsencode(word)) + "'"
    return shlex.quote(word)


def _escaped(byte: int) -> str:
    if 0x20 <= byte < 0x7F and chr(byte) not in "'\\":
        return chr(byte)
    return f"\\x{byte:02x}"


def command_of(name: str, module: str) -> list[str]:
    """How to call a command of this Python: by its name only if the shell finds this one."""
    script = Path(sys.executable).parent / name
    if not script.exists():
        return [sys.executable, "-m", module]
    found = shutil.which(name)
    if found and Path(found).samefile(script):
        return [name]
    here = Path.cwd()
    return [str(script.relative_to(here)) if script.is_relative_to(here) else str(script)]


def _say(console: Console, line: str) -> None:
    """Print a line that may hold a path or a command, without wrapping it."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def plan_run(typed: dict[str, Any]) -> tuple[Settings, Plan]:
    """Settings and plan from what was typed; a resumed run takes the rest from its checkpoint.

    Raises
    ------
    ValueError
        For a value out of range, a device that does not exist, a missing checkpoint.
    """
    out = typed.get("out", Path("runs/train"))
    resume = typed.get("resume", False)
    saved = RunFolder(out).load_checkpoint() if resume else None
    known = Settings().as_dict()
    chosen = {name: typed[name] for name in known if name in typed}
    if "preset" in typed:
        chosen = PRESETS[typed["preset"]] | chosen
    settings = Settings(**{**(saved["settings"] if saved else {}), **chosen})
    device = pick_device(typed.get("device", "auto"))
    dtype = typed.get("dtype", "auto")
    moe, compare, fp8 = _trained(typed, list(saved["learners"]) if saved else [])
    if resume and typed.get("no_checkpoint"):
        raise excludes("no_checkpoint", "--resume")
    if saved and dtype == "auto":
        dtype = saved["dtype"].removeprefix("torch.")
    _expect_ranks(typed, compare, fp8 or moe == "fp8")
    if typed.get("fsdp") and is_started_by_torchrun():
        expect_layout(moe, settings, all_ranks(), typed.get("expert_parallel", 1))
    if dtype == "auto":
        narrow = device.type == "cuda" or fp8 or moe == "fp8"
        dtype = "bfloat16" if narrow else "float32"
    of_checkpoint = saved is not None and typed.get("dtype", "auto") == "auto"
    if dtype == "float32" and (fp8 or moe == "fp8") and not of_checkpoint:
        raise ValueError("dtype: expected bfloat16 in FP8, got float32")
    if device.type == "cuda" and dtype == "float32" and moe != "plain":
        raise ValueError(
            "dtype: expected bfloat16 on a GPU (Guild's kernels are 16-bit), got float32"
        )
    check_every = typed.get("check_every", 100)
    if check_every < 1:
        raise ValueError(f"check_every: expected at least 1, got {check_every}")
    return settings, Plan(
        out=out,
        device=device,
        dtype=_DTYPES[dtype],
        moe=moe,
        compare=compare,
        fp8=fp8,
        resume=resume,
        corpus=typed.get("corpus"),
        check_every=check_every,
        fsdp=typed.get("fsdp", False),
        expert_parallel=typed.get("expert_parallel", 1),
        keep_gathered=typed.get("keep_gathered", False),
        checkpoints=not typed.get("no_checkpoint", False),
        cuda_graph=not typed.get("no_cuda_graph", False),
    )


def _trained(typed: dict[str, Any], saved: list[str]) -> tuple[str, bool, bool]:
    """The layer to train, and whether --compare or --fp8 has two trained.

    What was typed counts; without any of it, what the checkpoint to resume holds.
    """
    moe, compare, fp8 = typed.get("moe"), typed.get("compare", False), typed.get("fp8", False)
    if compare and moe in ("plain", "fp8"):
        raise excludes("compare", f"--moe {moe}: it trains both layers")
    if fp8 and (compare or moe):
        other = "--compare" if compare else f"--moe {moe}"
        raise excludes("fp8", f"{other}: it trains two layers")
    if len(saved) > 1 and not (moe or compare or fp8):
        fp8 = "fp8" in saved
        compare = not fp8
    return moe or (saved[0] if saved else "guild"), compare, fp8


def _expect_ranks(typed: dict[str, Any], compare: bool, fp8: bool) -> None:
    """Raise for options that need several ranks if there are none, and for what ranks cannot do."""
    count = typed.get("expert_parallel", 1)
    if count < 1:
        raise ValueError(f"expert_parallel: expected at least 1, got {count}")
    if typed.get("fsdp"):
        for name in ("compare", "fp8"):
            if typed.get(name):
                raise excludes(name, "--fsdp")
        if typed.get("moe") == "fp8":
            raise excludes("moe fp8", "--fsdp")
        if compare or fp8:
            raise excludes("fsdp", f"a checkpoint of {'two layers' if compare else 'FP8'}")
        return
    for name in ("expert_parallel", "keep_gathered"):
        if typed.get(name):
            raise needs(name, "--fsdp")
    if is_started_by_torchrun():
        raise ValueError("--fsdp: needed where torchrun starts several processes")


def show(summary: dict[str, Any], out: Path, console: Console) -> None:
    """Print the summary, the comparison if there was one, and the generated text."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "training loss", f"{summary['final_train_loss']:.3f}", summary["final_train_loss_is"]
    )
    table.add_row(
        "validation loss",
        f"{summary['final_validation_loss']:.3f}",
        summary["final_validation_loss_is"],
    )
    table.add_row(
        "speed",
        f"{summary['tokens_per_second']:,.0f}",
        f"tokens/s, {summary['training_seconds']:.0f} s for {summary['tokens']:,} tokens",
    )
    if speed_facts(summary):
        table.add_row("on a GPU", "", speed_facts(summary))
    table.add_row(
        "expert load",
        f"{summary['busiest_expert_over_mean']:.2f}",
        "rows of the busiest expert over the mean, worst layer",
    )
    if "compare" in summary:
        _add_comparison(table, summary["compare"], summary["moe"])
    console.print(table)
    for title, text in (("prompt", "prompt"), ("written by the model", "sample")):
        console.print(Panel(Text(summary[text].rstrip()), title=title, expand=False))
    files = ("loss.png", "summary.json", "sample.txt", "metrics.jsonl", "checkpoint.pt")
    there = ", ".join(name for name in files if (out / name).exists())  # --no-checkpoint
    _say(console, f"results in {out}: {there}")


def _add_comparison(table: Table, found: dict[str, Any], first: str) -> None:
    second = "guild" if first == "fp8" else "plain"
    ours, theirs = NAMES[first], NAMES[second]
    low, high = found["step_time_ratio_quartiles"]
    table.add_row(
        f"{ours}: step",
        f"{found[f'{first}_step_ms']:.1f} ms",
        f"{found[f'{first}_tokens_per_second']:,.0f} tokens/s",
    )
    table.add_row(
        f"{theirs}: step",
        f"{found[f'{second}_step_ms']:.1f} ms",
        f"{found[f'{second}_tokens_per_second']:,.0f} tokens/s, training loss "
        f"{found[f'{second}_train_loss']:.3f}, validation loss "
        f"{found[f'{second}_validation_loss']:.3f}",
    )
    table.add_row(
        "time ratio",
        f"{found['step_time_ratio']:.3f}",
        f"{ours} over {theirs}, quartiles {low:.3f} to {high:.3f}",
    )
    table.add_row(
        "loss difference",
        f"{found['largest_loss_difference']:.5f}",
        f"largest of the first {found['largest_loss_difference_steps']} steps",
    )
