"""Finding and loading the compiled library, and the errors where that fails."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import guild
from guild._torch import library


def test_the_named_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If GUILD_LIBRARY is set, it is the only candidate."""
    monkeypatch.setenv("GUILD_LIBRARY", str(tmp_path / "other.so"))
    assert library.candidates() == [tmp_path / "other.so"]
    assert library.find() is None


def test_the_newer_build_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own folder, then build/run and build/test by age."""
    package = tmp_path / "python/guild"
    monkeypatch.delenv("GUILD_LIBRARY", raising=False)
    monkeypatch.setattr(library, "__file__", str(package / "_torch/library.py"))
    built = {kind: tmp_path / "build" / kind / library.NAME for kind in ("run", "test")}
    for age, kind in enumerate(("test", "run")):
        built[kind].parent.mkdir(parents=True)
        built[kind].touch()
        stamp = time.time() - age
        os.utime(built[kind], (stamp, stamp))
    assert library.candidates() == [package / library.NAME, built["test"], built["run"]]
    assert library.find() == built["test"]
    package.mkdir(parents=True)
    (package / library.NAME).touch()
    assert library.find() == package / library.NAME


def test_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, a file that is not a library, a torch that is too old."""
    file = tmp_path / "x.so"
    monkeypatch.setenv("GUILD_LIBRARY", str(file))
    with pytest.raises(ImportError, match=r"libguild_torch.so was not found .*x.so.*make build"):
        library.load()
    file.write_text("no library")
    with pytest.raises(ImportError, match=r"x.so does not load into torch"):
        library.load()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"torch: expected 2.10 or later, got 2.9.1"):
        library.load()


def test_a_library_that_is_not_guilds() -> None:
    """It loads, but registers no operators."""
    torch_library = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    environment = {**os.environ, "GUILD_LIBRARY": str(torch_library)}
    call = [sys.executable, "-c", "import guild; guild.MoE"]
    result = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert "libc10.so is not Guild's compiled library: it registers no" in result.stderr


def test_the_package_imports_without_a_library() -> None:
    """`guild info` must be able to report what is missing."""
    code = "import guild, guild._torch.library; assert 'MoE' in dir(guild)\nguild.MoE"
    environment = {**os.environ, "GUILD_LIBRARY": "/nowhere/libguild_torch.so"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "ImportError: Guild's compiled library libguild_torch.so was not found" in result.stderr


def test_float8_is_reached_from_the_package() -> None:
    """By a fresh process, in which nothing else has imported it."""
    code = "import guild; guild.float8.regroup"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    """Every name in __all__ exists, and other names do not."""
    for name in guild.__all__:
        assert getattr(guild, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = guild.Nothing


def test_type_checkers_see_the_public_names() -> None:
    """The imports that type checkers see and the table used at run time hold the same names."""
    (seen,) = (n for n in ast.parse(Path(guild.__file__).read_text()).body if isinstance(n, ast.If))
    imported = {a.asname: line.module for line in seen.body for a in line.names}
    assert imported == {name: f"guild.{module}" for name, module in guild._MODULE_OF.items()}


def test_failed_allocations_on_a_gpu() -> None:
    """The library's message becomes torch's out-of-memory error; other errors stay as they are."""

    def op(message: str) -> None:
        raise RuntimeError(message)

    call = library.translated(op)
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate a tensor of shape"):
        call("CUDA out of memory: torch could not allocate a tensor of shape (3,) on cuda:0")
    with pytest.raises(RuntimeError, match="x: expected") as caught:
        call("x: expected 2 dimensions")
    assert not isinstance(caught.value, torch.OutOfMemoryError)


OUT_OF_MEMORY = """
import torch

import guild

make = {"device": "cuda", "dtype": torch.bfloat16}
x = torch.randn(16384, 1024, requires_grad=True, **make)
up, down = torch.randn(2, 8192, 1024, **make), torch.randn(2, 1024, 4096, **make)
ids, scores = torch.randint(2, (16384, 2), device="cuda"), torch.rand(16384, 2, device="cuda")
out = guild.routed_experts(x, ids, scores, up, down)
torch.cuda.empty_cache()
most = torch.cuda.memory_reserved() + (32 << 20)  # the pre-activations alone are 1 GiB
torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
flags = 0, True, 1.0, torch.inf, 0.0, False, False, False, True
calls = {
    "forward": lambda: guild.routed_experts(x, ids, scores, up, down),
    "backward": lambda: out.sum().backward(),
    "op": lambda: torch.ops.guild.moe_forward.default(
        x.detach(), ids, scores, None, None, up, None, down, None, None, *flags
    ),
}
for name, call in calls.items():
    try:
        call()
    except torch.OutOfMemoryError as error:
        print(name, str(error).split(":")[0])
torch.cuda.set_per_process_memory_fraction(1.0)
print(guild.routed_experts(x, ids, scores, up, down).shape == x.shape)
"""


def test_out_of_memory(gpu: str) -> None:
    """Forward, backward and a raw op, in a process of its own whose memory is limited."""
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True)
    said = "CUDA out of memory"
    expected = [f"{name} {said}" for name in ("forward", "backward", "op")] + ["True"]
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]
