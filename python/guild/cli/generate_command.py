"""`guild generate` on the command line: text from the checkpoint that `guild train` left."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from guild.cli.streams import write_out
from guild.provenance import device_name, make_current, pick_device, set_threads
from guild.train.generation import (
    PROMPT,
    Sampling,
    expect_tokens,
    generate,
    readable,
    window_start,
)
from guild.train.learner import moe_factory
from guild.train.model import LanguageModel
from guild.train.run_folder import RunFolder
from guild.train.settings import Settings


def run_generate(args: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it; the speed goes to standard error."""
    if args.threads is not None:
        set_threads(args.threads)
    prompt = prompt_bytes(args.prompt)
    sampling = Sampling(args.temperature, args.top_k, args.seed)
    sampling.expect_valid()
    expect_tokens(args.tokens)
    device = pick_device(args.device)
    make_current(device)
    state = read_run(args.run)
    settings = Settings(**state["settings"])
    model = trained_model(state, settings, device)
    if start := window_start(len(prompt), settings.context):
        _note(
            f"the prompt has {len(prompt)} bytes, more than the model's context of "
            f"{settings.context}: it sees only the last {len(prompt) - start}, as what it sees "
            "moves on by half a context at a time"
        )
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        written = generate(model, prompt, args.tokens, settings.context, sampling)
    write_out(readable(written.text))
    _note(
        f"{args.tokens} tokens (bytes) in {written.seconds:.2f} s: "
        f"{args.tokens / written.seconds:,.0f} tokens/s on {device_name(device)}, step "
        f"{state['step']} of {args.run}"
    )
    return 0


def prompt_bytes(text: str | None) -> bytes:
    """The prompt in UTF-8; bytes of the command line that are not UTF-8 stay as they are.

    Raises
    ------
    ValueError
        If it is empty, or holds something that cannot be encoded.
    """
    if text is None:
        return PROMPT
    try:
        prompt = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected characters that UTF-8 can encode, got {text[error.start]!r} at "
            f"position {error.start}"
        ) from None
    if not prompt:
        raise ValueError("prompt: expected at least one character, got an empty text")
    return prompt


def read_run(folder: Path) -> dict[str, Any]:
    """The checkpoint in a folder that `guild train` wrote; ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"run: expected a folder that guild train wrote, got {str(folder)!r}")
    return RunFolder(folder).load_checkpoint("run")


def trained_model(state: dict[str, Any], settings: Settings, device: torch.device) -> LanguageModel:
    """A checkpoint's model, with its first learner's weights in Guild's layers.

    Raises
    ------
    ValueError
        If the weights are not those of the settings.
    """
    s = settings
    sizes = s.hidden, s.layers, s.heads, s.intermediate, s.experts, s.top_k
    model = LanguageModel(*sizes, moe_factory("guild", device, s), s.vocabulary)
    learner = next(iter(state["learners"].values()))
    try:
        model.load_state_dict(learner["model"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise ValueError(
            "run: the checkpoint's weights do not fit its settings; another version of Guild may "
            "have written it"
        ) from None
    return model.to(device).eval()


def _note(line: str) -> None:
    print(f"guild generate: {line}", file=sys.stderr)
