"""Text from a trained model, byte by byte, with a key-value cache.

The model looks back at most its context. When a text has filled it, its second half is read again
from the start, so that a byte always follows from one forward of the bytes before it: with the
cache and without, the text is the same.

On a GPU a byte is one replay of a CUDA graph, which includes the choice: the noise of all bytes is
drawn before the first, and the largest of logits / temperature + Gumbel noise is a draw from their
softmax. So the host waits for the GPU only when the text has filled the context.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from guild.train.model import LanguageModel
from guild.train.settings import BYTES, MOST_SEED

PROMPT = b'class Reader:\n    """Reads a file."""\n\n    def '  # unless another is given
MOST_BYTES = 2**20  # to write at once, as the noise of all choices is drawn at the start


class Sampling(NamedTuple):
    """How the next byte is chosen.

    Attributes
    ----------
    temperature : float
        Divides the logits; 0: the most likely byte.
    top_k : int
        Choose among this many of the most likely bytes; 0: among all.
    seed : int
        Of the choices.
    """

    temperature: float = 0.6
    top_k: int = 0
    seed: int = 0

    def expect_valid(self) -> None:
        """Raise ValueError, naming the option, unless bytes can be chosen this way."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature: expected a finite number of 0 or more, got {self.temperature}"
            )
        if not 0 <= self.top_k <= BYTES:
            raise ValueError(f"top_k: expected 0 (all) to {BYTES}, got {self.top_k}")
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed: expected 0 to {MOST_SEED}, got {self.seed}")

    def noise(self, count: int) -> torch.Tensor:
        """Gumbel noise (count, 256), the same on every machine; zeros at temperature 0."""
        if self.temperature == 0:
            return torch.zeros(count, BYTES)
        generator = torch.Generator().manual_seed(self.seed)
        return -torch.empty(count, BYTES).exponential_(generator=generator).log()

    def choose(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Logits and noise (..., 256) -> int64 (...)."""
        logits = logits.float()
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.top_k:
            best = logits.topk(self.top_k, -1)  # in 16 bits some tie with the last of them
            logits = torch.full_like(logits, -math.inf).scatter(-1, best.indices, best.values)
        # However low the temperature, the largest logit stays 0, and the others become -inf.
        below = (logits - logits.amax(-1, keepdim=True)).double()
        return (below / self.temperature + noise).argmax(-1)


def expect_tokens(count: int) -> None:
    """Raise ValueError unless so many tokens (bytes) can be written at once."""
    if not 1 <= count <= MOST_BYTES:
        raise ValueError(f"tokens: expected 1 to {MOST_BYTES}, got {count}")


def window_start(length: int, context: int) -> int:
    """The first byte that the model sees of a text: it moves by half a context at a time."""
    half = (context + 1) // 2
    return half * max(0, -(-(length - context) // half))


class Written(NamedTuple):
    """A text and how long it took.

    Attributes
    ----------
    text : bytes
        Prompt and continuation.
    seconds : float
        Duration of the continuation, from the prompt in memory to its last byte.
    """

    text: bytes
    seconds: float


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: bytes, count: int, context: int, sampling: Sampling
) -> Written:
    """Continue a text.

    Parameters
    ----------
    model : LanguageModel
        In evaluation mode; under autocast it computes in autocast's dtype.
    prompt : bytes
        At least one; only the end of one longer than the context is read.
    count : int
        Bytes to write.
    context : int
        How many bytes the model looks back at most.
    sampling : Sampling
        How they are chosen.

    Raises
    ------
    ValueError
        If there is nothing to continue or to write, or the sampling is not valid.
    """
    sampling.expect_valid()
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got an empty text")
    expect_tokens(count)
    with _autocast_without_cache(model.embedding.weight.device.type):
        writer = _Writer(model, count, context, sampling)
        start = time.perf_counter()
        while writer.made < count:
            text = prompt + writer.bytes()
            writer.write(text[window_start(len(text), context) :])
        return Written(prompt + writer.bytes(), time.perf_counter() - start)


def readable(text: bytes) -> str:
    r"""UTF-8 as text, without a character cut off at the end; anything unprintable as \x.."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in decoder.decode(text)
    )
    return shown.rstrip()


def _autocast_without_cache(kind: str) -> contextlib.AbstractContextManager:
    """The surrounding autocast without its cache: a graph's casts may not be reused outside."""
    if kind != "cuda" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


class _Writer:
    """The cache, the next byte and its position, all on the device; a step advances them."""

    def __init__(self, model: LanguageModel, count: int, context: int, sampling: Sampling) -> None:
        self._model, self._context, self._sampling = model, context, sampling
        device = self._device = model.embedding.weight.device
        self.made = 0
        self._cache = model.make_cache(1, context)
        self._noise = sampling.noise(count).to(device)
        self._out = torch.zeros(count, dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        # Positions of the token in the window, and of the byte that it produces in the output.
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._replay = self._captured() if device.type == "cuda" and count > 1 else self._step

    def write(self, seen: bytes) -> None:
        """Read the window, which has room, from its start; write until it or the text is full."""
        window = torch.tensor([[*seen, *bytes(self._context - len(seen))]], device=self._device)
        # One shape for every window: what lies past the text is overwritten before it is read.
        places = torch.arange(self._context, device=self._device)
        logits = self._model.continued(window, places, self._cache)
        self._position.fill_(len(seen) - 1)
        self._take(logits[:, len(seen) - 1])
        steps = min(len(self._noise) - self.made - 1, self._context - len(seen))
        for _ in range(steps):
            self._replay()
        self.made += 1 + steps

    def bytes(self) -> bytes:
        """What was written; waits for it."""
        return bytes(self._out[: self.made].tolist())

    def _step(self) -> None:
        logits = self._model.continued(self._token, self._position, self._cache)
        self._take(logits[:, 0])

    def _take(self, logits: torch.Tensor) -> None:
        """Choose the next byte by logits (1, 256); it is the next token."""
        noise = self._noise.index_select(0, self._number)
        token = self._sampling.choose(logits, noise)
        self._out.index_copy_(0, self._number, token.to(torch.uint8))
        self._token.copy_(token[None])
        self._position += 1
        self._number += 1

    def _captured(self) -> Callable[[], None]:
        """A call that replays a step as a CUDA graph; the steps run to make it have no effect."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()  # compiles, allocates, picks algorithms
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._position.zero_()
        self._number.zero_()
        return graph.replay
