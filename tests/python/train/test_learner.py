"""What a training step and a validation do, and which bytes each of them reads."""

from __future__ import annotations

import pytest
import torch

from guild.train.corpus import Corpus
from guild.train.learner import Learner
from training import small_settings

CPU = torch.device("cpu")


def two_part_corpus() -> Corpus:
    """A corpus with training bytes below 100 and held-out bytes from 100 on."""
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(0, 100, (3000,), dtype=torch.uint8, generator=generator)
    held_out = torch.randint(100, 256, (5000,), dtype=torch.uint8, generator=generator)
    return Corpus(train, held_out, files=2, digest="00000000")


def test_training_reads_no_held_out_byte() -> None:
    corpus = two_part_corpus()
    inputs, targets = corpus.batch(seed=0, step=3, batch=200, context=32)
    assert inputs.shape == targets.shape == (200, 32)
    assert max(inputs.max(), targets.max()) < 100
    checked, wanted = corpus.held_out_windows(50, 32)
    assert min(checked.min(), wanted.min()) >= 100
    for x, y in ((inputs, targets), (checked, wanted)):
        assert torch.equal(x[:, 1:], y[:, :-1])  # shifted by one byte
    assert torch.equal(wanted[-1], corpus.held_out[-32:].long())  # up to the last byte
    short = Corpus(torch.arange(40, dtype=torch.uint8), corpus.held_out, files=2, digest="00000000")
    inputs, targets = short.batch(seed=0, step=0, batch=200, context=32)
    assert inputs.unique().tolist() == list(range(39))
    assert targets.unique().tolist() == list(range(1, 40))


def test_learner_takes_its_bytes_from_the_right_part() -> None:
    """Steps read the training part, validations the other."""
    learner = Learner("guild", small_settings(), CPU, torch.float32)
    read, loss = [], learner.model.loss
    learner.model.loss = lambda x, y: (read.append((x, y)), loss(x, y))[1]
    learner.round(two_part_corpus(), 0, 2)
    assert len(read) == 2 and all(max(x.max(), y.max()) < 100 for x, y in read)
    read.clear()
    learner.validate(two_part_corpus(), 8)
    assert len(read) == 2 and all(min(x.min(), y.min()) >= 100 for x, y in read)


def test_matrices_alone_decay() -> None:
    learner = Learner("guild", small_settings(weight_decay=0.25), CPU, torch.float32)
    decay = {
        weight: group["weight_decay"]
        for group in learner.optimizer.param_groups
        for weight in group["params"]
    }
    assert len(decay) == len(list(learner.model.parameters()))
    norms = [name for name, w in learner.model.named_parameters() if decay[w] == 0]
    assert norms and all("norm" in name for name in norms)
    for name, weight in learner.model.named_parameters():
        assert decay[weight] == (0 if "norm" in name else 0.25), name


def test_gradient_is_clipped() -> None:
    """It is clipped to the setting; the norm reported is the one before clipping."""
    learner, gradients = Learner("guild", small_settings(clip=0.01), CPU, torch.float32), []

    def keep(*_) -> None:
        weights = learner.model.parameters()
        gradients.extend(w.grad.flatten() for w in weights if w.grad is not None)

    learner.optimizer.register_step_pre_hook(keep)
    row = learner.round(two_part_corpus(), 0, 1)[0]
    assert all(w.grad is None for w in learner.model.parameters())  # none is kept
    norm = torch.linalg.vector_norm(torch.cat(gradients)).item()
    assert row["gradient_norm"] > 0.1
    assert abs(norm - 0.01) < 1e-4


def test_validation_is_of_plain_top_k() -> None:
    """Rounding is used in training alone: it affects no validation, and stays on after one."""
    losses = {}
    for rounding in ("none", "up"):
        settings = small_settings(round=rounding, tile=64)
        learner = Learner("guild", settings, CPU, torch.float32)
        losses[rounding] = learner.validate(two_part_corpus(), 8)
        assert learner.model.training
    assert losses["none"] == losses["up"]


def test_parts_of_a_batch() -> None:
    """Losses, gradients and the load that moves selection biases are those of the whole batch."""
    rows, biases = [], []
    for parts in (1, 4):
        settings = small_settings(accumulate=parts, balance=0.0, router="sigmoid")
        learner = Learner("guild", settings, CPU, torch.float32)
        rows.append(learner.round(two_part_corpus(), 0, 3))
        biases.append([block.moe.router.selection_bias for block in learner.model.blocks])
    for one, other in zip(*rows, strict=True):
        for name in ("loss", "gradient_norm", "load", "rows_over_choices"):
            assert one[name] == pytest.approx(other[name], rel=2e-5)
    for one, other in zip(*biases, strict=True):
        assert one.any() and torch.equal(one, other)
