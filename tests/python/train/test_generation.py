"""Text from a trained model: the cache changes nothing, choices follow the settings, errors."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch

from guild.cli.generate_command import prompt_bytes, trained_model
from guild.cli.main import main
from guild.train import generation
from guild.train.generation import Sampling, generate, readable, window_start
from guild.train.learner import Learner
from guild.train.loop import PROMPT
from guild.train.model import LanguageModel
from guild.train.run_folder import RunFolder
from training import small_settings, train, write_corpus

CONTEXT = 16


def model_of(layer: str = "guild", device: str = "cpu", **changes: object) -> LanguageModel:
    learner = Learner(layer, small_settings(**changes), torch.device(device), torch.float32)
    return learner.model.eval()


@torch.no_grad()
def recomputed(
    model: LanguageModel, prompt: bytes, count: int, context: int, sampling: Sampling
) -> bytes:
    """Every byte from a forward pass over all visible bytes, without a cache."""
    text = bytearray(prompt)
    for noise in sampling.noise(count):
        seen = text[window_start(len(text), context) :]
        logits = model(torch.tensor([list(seen)]))[0, -1]
        text.append(int(sampling.choose(logits, noise)))
    return bytes(text)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8, seed=3), Sampling(2.0, 5)])
@pytest.mark.parametrize("context", [1, 2, 15, 16])
@pytest.mark.parametrize("prompt", [b"d", 15 * b"ab", b"=" * 16])
def test_the_cache_changes_nothing(prompt: bytes, context: int, sampling: Sampling) -> None:
    """Shorter than the context, at its length, just above it, and far beyond."""
    model = model_of()
    written = generate(model, prompt, 30, context, sampling)
    assert written.text == recomputed(model, prompt, 30, context, sampling)
    assert written.seconds > 0
    assert sampling.temperature == 0 or len(set(written.text)) > 3


@pytest.mark.parametrize(
    "changes",
    [
        {"router": "deepseek_v4"},
        {"router": "llama4", "top_k": 1},
        {"capacity": 1.0},
        {"shared": 16, "vocabulary": 300},
    ],
)
def test_other_routers(changes: dict) -> None:
    model, sampling = model_of(**changes), Sampling(0.0)
    text = generate(model, b"def ", 30, CONTEXT, sampling).text
    assert text == recomputed(model, b"def ", 30, CONTEXT, sampling)


def test_layers_write_the_same() -> None:
    """Guild's layer and the plain one, which start from the same weights."""
    texts = {
        generate(model_of(n), b"def ", 30, CONTEXT, Sampling()).text for n in ("guild", "plain")
    }
    assert len(texts) == 1


def test_one_token_at_a_time() -> None:
    """Logits of new tokens are those of the whole text; later cache entries are not read."""
    model, text = model_of(), torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        whole = model(text)
        cache = model.make_cache(2, 12).fill_(1e4)
        logits = [model.continued(text[:, :4], torch.arange(4), cache)]
        for place in range(4, 9):
            logits.append(model.continued(text[:, [place]], torch.tensor([place]), cache))
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-4, atol=1e-4)


def test_window() -> None:
    """The window is at most the context, at least half of it, and only moves forward."""
    for context in (1, 2, 5, 16):
        starts = [window_start(length, context) for length in range(100)]
        assert starts == sorted(starts) and starts[context] == 0
        for length, start in enumerate(starts):
            assert length - start <= context
            assert start == 0 or length - start > context // 2 - 1


def test_seed_temperature_and_top_k() -> None:
    model = model_of()

    def text(**sampling: float) -> bytes:
        return generate(model, b"def ", 20, CONTEXT, Sampling(**sampling)).text

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text(temperature=0.0) == text(temperature=0.0, seed=4)
    assert text(temperature=1e-4, seed=1) == text(temperature=0.0) == text(top_k=1, seed=2)


def test_no_more_bytes_than_top_k() -> None:
    """Equal logits, as 16 bits bring about, are no reason to choose among more."""
    logits, noise = torch.zeros(200, 256), Sampling(temperature=1.0, seed=5).noise(200)
    chosen = Sampling(temperature=1.0, top_k=3).choose(logits, noise)
    assert len(chosen.unique()) == 3


def test_choices_follow_the_softmax() -> None:
    """Choices come from the most likely bytes, at the temperature; frequencies over many draws."""
    logits = torch.full((256,), -20.0)
    logits[[7, 8, 9]] = torch.tensor([1.0, 2.0, 0.0])
    many = Sampling(temperature=0.5, seed=1)
    chosen = many.choose(logits.expand(10_000, 256), many.noise(10_000))
    expected = (logits / 0.5).softmax(0)
    share = torch.bincount(chosen, minlength=256) / 10_000
    torch.testing.assert_close(share, expected, rtol=0, atol=0.02)
    for least in (1e-39, 1e-46, 5e-324):  # logits / least overflows, or least is 0 in float32
        cold = Sampling(temperature=least, seed=1)
        assert cold.choose(logits.expand(50, 256) + 30, cold.noise(50)).eq(8).all(), least
    two = Sampling(temperature=50.0, top_k=2)
    assert set(two.choose(logits.expand(500, 256), two.noise(500)).tolist()) == {7, 8}


@pytest.mark.parametrize(
    ("prompt", "count", "sampling", "message"),
    [
        (b"", 1, Sampling(), "prompt: expected at least one byte, got an empty text"),
        (b"a", 0, Sampling(), "tokens: expected 1 to 1048576, got 0"),
        (b"a", 1, Sampling(-1.0), "temperature: expected a finite number of 0 or more, got -1.0"),
        (b"a", 1, Sampling(float("nan")), "temperature: expected .* got nan"),
        (b"a", 1, Sampling(top_k=257), r"top_k: expected 0 \(all\) to 256, got 257"),
        (b"a", 1, Sampling(seed=-1), f"seed: expected 0 to {2**62}, got -1"),
    ],
)
def test_wrong_calls(prompt: bytes, count: int, sampling: Sampling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model_of(), prompt, count, CONTEXT, sampling)


def test_graph_on_a_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay per byte writes what separate launches write, beyond the context as well."""
    model = model_of(device=gpu)
    with torch.autocast(gpu, torch.bfloat16):
        for sampling in (Sampling(0.0), Sampling(seed=2)):
            graphed = generate(model, b"def ", 50, CONTEXT, sampling).text
            with monkeypatch.context() as patch:
                patch.setattr(generation._Writer, "_captured", lambda self: self._step)
                assert generate(model, b"def ", 50, CONTEXT, sampling).text == graphed


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with both layers."""
    folder = tmp_path_factory.mktemp("generate")
    corpus = write_corpus(folder / "corpus")
    train(small_settings(), folder / "run", corpus, compare=True)
    return folder / "run"


def generated(capsys: pytest.CaptureFixture, *words: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", *words]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_command(run: Path, capsys: pytest.CaptureFixture) -> None:
    """Text on standard output, speed on standard error; the trainer's sample is reproduced."""
    words = [str(run), "--tokens", "8", "--device", "cpu"]
    out, err = generated(capsys, *words)
    summary = RunFolder(run).read_summary()
    assert out.rstrip() == readable(PROMPT + summary["sample"].encode())
    speed = r"guild generate: 8 tokens \(bytes\) in .* tokens/s on .*, step 12 of .*"
    assert re.fullmatch(speed, err.splitlines()[-1])
    out, err = generated(capsys, *words, "--prompt", "naïve " * 20, "--temperature", "0")
    assert out.startswith("naïve naïve")
    context = "the prompt has 140 bytes, more than the model's context of 32"
    assert f"{context}: it sees only the last 28, as what it sees moves on by half" in err
    assert (
        len({generated(capsys, *words, "--seed", str(s), "--top-k", "9")[0] for s in (1, 2)}) == 2
    )


def test_a_terminal_without_utf8(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that its encoding lacks are escaped."""
    for encoding, expected in (("ascii", rb"\u2192 na\xefve"), ("latin-1", b"\\u2192 na\xefve")):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", out)
        words = ["generate", str(run), "--tokens", "1", "--device", "cpu", "--prompt", "→ naïve"]
        assert main(words) == 0
        out.flush()
        assert out.buffer.getvalue().startswith(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{run} --prompt=", "prompt: expected at least one character, got an empty text"),
        ("{run} --tokens 0", "tokens: expected 1 to 1048576, got 0"),
        ("{run} --tokens 1048577", "tokens: expected 1 to 1048576, got 1048577"),
        ("{run} --temperature -1", "temperature: expected a finite number of 0 or more, got -1.0"),
        ("{run} --top-k 300", "top_k: expected 0 (all) to 256, got 300"),
        ("{run} --seed -1", f"seed: expected 0 to {2**62}, got -1"),
        (f"{{run}} --seed {2**63}", f"seed: expected 0 to {2**62}, got {2**63}"),
        ("{run} --threads 0", "threads: expected 1 to 4096, got 0"),
        ("{run} --device tpu", "device: expected auto, cpu, cuda or cuda:<index>, got 'tpu'"),
        ("/nowhere", "run: expected a folder that guild train wrote, got '/nowhere'"),
        ("{run}/checkpoint.pt", "run: expected a folder that guild train wrote, got"),
        ("{run}/..", "run: no checkpoint.pt in "),
        ("{tmp}", "is damaged or not a checkpoint\n"),
    ],
)
def test_wrong_words(
    words: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "checkpoint.pt").write_text("text")
    given = [word.format(run=run, tmp=tmp_path) for word in words.split()]
    assert main(["generate", *given]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("guild generate: ") and message in printed


def test_weights_of_other_sizes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    state = RunFolder(run).load_checkpoint()
    state["settings"]["layers"] = 3
    (tmp_path / "other").mkdir()
    RunFolder(tmp_path / "other").save_checkpoint(state)
    assert main(["generate", str(tmp_path / "other"), "--device", "cpu"]) == 2
    assert "run: the checkpoint's weights do not fit its settings" in capsys.readouterr().err


def test_more_rows_than_bytes() -> None:
    """A checkpoint with a larger vocabulary and shared experts gives logits of the 256 bytes."""
    changes = {"shared": 16, "vocabulary": 300}
    trained = model_of(**changes)
    state = {"learners": {"guild": {"model": trained.state_dict()}}}
    model = trained_model(state, small_settings(**changes), torch.device("cpu"))
    seen = torch.tensor([list(b"def ")])
    assert torch.equal(model(seen), trained(seen)) and model(seen).shape[-1] == 256


def test_prompts_as_bytes() -> None:
    """Bytes that are not UTF-8 stay as they are; a character that has no bytes is an error."""
    assert prompt_bytes("é") == "é".encode()
    assert prompt_bytes("a\udcff") == b"a\xff"
    with pytest.raises(
        ValueError, match=r"prompt: .* UTF-8 can encode, got '\\ud800' at position 1"
    ):
        prompt_bytes("a\ud800")
