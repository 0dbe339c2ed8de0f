"""Fifty steps with Transformers' Trainer, and with PEFT's LoRA on experts: the same curves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from calls import error  # noqa: E402
from guild.integrations.transformers import replace_moe_blocks  # noqa: E402
from models import expect_same, make_model, step, tokens  # noqa: E402

QWEN3 = "Qwen3MoeConfig"
STEPS = 50
ROWS = 8
# How experts run, by name; "blocks" has the router on Guild as well.
IMPLEMENTATIONS = ("eager", "guild", "blocks")


def model_with(implementation: str) -> transformers.PreTrainedModel:
    own = "eager" if implementation == "blocks" else implementation
    model = make_model(QWEN3, experts_implementation=own)
    if implementation == "blocks":
        assert len(replace_moe_blocks(model)) == 2
    return model


def expect_one_curve(losses_of: Callable[[str], list[float]]) -> None:
    """Expect falling losses, the same whichever implementation runs the experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Guild")
        curves = {name: torch.tensor(losses_of(name)) for name in IMPLEMENTATIONS}
    assert all(len(curve) == STEPS for curve in curves.values())
    assert curves["eager"][-5:].mean() < curves["eager"][:5].mean() - 0.2
    for name in ("guild", "blocks"):
        assert 0 < (curves[name] - curves["eager"]).abs().max() < 1e-4, name


def train(model: nn.Module, rate: float) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- Trainer ------------------------------------------------------------------------------------


def test_trainer_gives_the_same_losses(tmp_path: Path) -> None:
    """Includes the router's balancing loss, which is computed from its logits."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def losses_of(implementation: str) -> list[float]:
        model = model_with(implementation)
        model.config.output_router_logits = True
        losses: list[float] = []

        class Noted(transformers.Trainer):
            def training_step(self, *call: object, **options: object) -> Tensor:
                loss = super().training_step(*call, **options)
                losses.append(loss.item())
                return loss

        rows = torch.randint(2, 64, (ROWS, 11), generator=torch.Generator().manual_seed(0))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        Noted(model=model, args=arguments, train_dataset=data).train()
        return losses

    expect_one_curve(losses_of)


# ---- PEFT ---------------------------------------------------------------------------------------


def adapted(model: nn.Module, target_modules: list[str] | None = None) -> nn.Module:
    """The model under PEFT, with adapters on the weights of the experts."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=target_modules or [],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,  # nothing is zero
        ),
    )


def test_lora_on_experts_gives_the_same_losses() -> None:
    def losses_of(implementation: str) -> list[float]:
        model = adapted(model_with(implementation), ["q_proj", "v_proj"])
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        losses = train(model, 3e-2)
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
        return losses

    expect_one_curve(losses_of)


@pytest.mark.parametrize("implementation", ["guild", "blocks"])
def test_lora_is_the_same_in_every_gradient(implementation: str) -> None:
    theirs = step(adapted(model_with("eager")))
    assert sum("lora" in name for name in theirs) == 8  # A and B of two weights in two layers
    expect_same(step(adapted(model_with(implementation))), theirs)


def test_blocks_are_replaced_under_adapters() -> None:
    model = adapted(model_with("eager"))
    theirs = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(replace_moe_blocks(model)) == 2
    expect_same(step(model), theirs)


@pytest.mark.parametrize("implementation", ["guild", "blocks"])
def test_adapters_are_saved_loaded_turned_off_and_merged(
    implementation: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = adapted(model_with(implementation)).eval()
    plain, changed = model_with("eager").eval()(tokens()).logits, model(tokens()).logits
    assert error(changed, plain) > 1e-3
    model.save_pretrained(tmp_path)
    with model.disable_adapter():
        assert error(model(tokens()).logits, plain) < 1e-5
    loaded = peft.PeftModel.from_pretrained(model_with(implementation), tmp_path).eval()
    assert error(loaded(tokens()).logits, changed) < 1e-5
    merged = loaded.merge_and_unload()
    assert error(merged(tokens()).logits, changed) < 1e-5
