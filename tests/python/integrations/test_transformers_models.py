"""Whole models from their configs, tiny and random: the model's own loop beside Guild."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.integrations import moe  # noqa: E402

import guild  # noqa: E402
import guild.integrations.transformers as guild_transformers  # noqa: E402
from calls import error  # noqa: E402
from guild.integrations.transformers import experts as experts_module  # noqa: E402
from models import CONFIGS, expect_same, make_model, step, tokens  # noqa: E402

models = pytest.mark.parametrize("name", CONFIGS)


@models
def test_model_is_the_same(name: str) -> None:
    theirs = step(make_model(name, experts_implementation="eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_same(step(make_model(name, experts_implementation="guild")), theirs)


@models
def test_models_that_exist_change_and_change_back(name: str, monkeypatch) -> None:
    calls = []

    def counted(*call: object, **options: object) -> Tensor:
        calls.append(call)
        return guild.routed_experts(*call, **options)

    monkeypatch.setattr(experts_module, "routed_experts", counted)
    model = make_model(name)  # nothing is asked for: grouped_mm
    plain = step(model)
    with guild_transformers.enabled():
        ours = step(model)
    moe_layers = 2 - CONFIGS[name].get("first_k_dense_replace", 0)
    assert len(calls) == moe_layers
    expect_same(ours, plain)
    again = step(model)
    assert all(torch.equal(again[key], plain[key]) for key in plain)
    model.set_experts_implementation("guild")
    assert model.get_experts_implementation()[""] == "guild"
    expect_same(step(model), plain)
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(step(model)["logits"], plain["logits"])
    assert len(calls) == 2 * moe_layers


@models
def test_checkpointing_changes_no_bit(name: str) -> None:
    model = make_model(name, experts_implementation="guild").train()
    plain = step(model)
    model.gradient_checkpointing_enable()
    checkpointed = step(model)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(checkpointed[key], plain[key]) for key in plain)


@models
def test_generation_gives_the_same_tokens(name: str) -> None:
    made = {}
    for implementation in ("eager", "guild"):
        model = make_model(name, experts_implementation=implementation).eval()
        options = dict(max_new_tokens=6, do_sample=False, output_logits=True)
        made[implementation] = model.generate(
            tokens()[:, :5], return_dict_in_generate=True, **options
        )
    eager, ours = made["eager"], made["guild"]
    assert torch.equal(ours.sequences, eager.sequences)
    for a, b in zip(ours.logits, eager.logits, strict=True):
        assert error(a, b) < 1e-5


def test_autocast_keeps_float32_masters() -> None:
    model = make_model("Qwen3MoeConfig", experts_implementation="guild")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = step(model)
    exact = step(model)
    assert all(ours[key].dtype == torch.float32 for key in ours if key != "logits")
    experts = "model.layers.0.mlp.experts.down_proj"
    assert 1e-5 < error(ours[experts], exact[experts]) < 0.1


def test_fifty_steps_of_training_give_the_same_losses() -> None:
    curves = {}
    for implementation in ("eager", "guild"):
        model = make_model("Qwen3MoeConfig", experts_implementation=implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves[implementation] = torch.tensor(losses)
    assert curves["eager"][-1] < curves["eager"][0] - 0.5
    assert (curves["guild"] - curves["eager"]).abs().max() < 1e-4


def test_the_name_is_refused_before_it_is_registered(monkeypatch) -> None:
    monkeypatch.delitem(moe.ExpertsInterface._global_mapping, "guild")
    fp8 = transformers.integrations.finegrained_fp8.FP8ExpertsInterface._global_mapping
    monkeypatch.delitem(fp8, "guild")
    with pytest.raises(ValueError, match='experts_implementation="guild"'):
        make_model("MixtralConfig", experts_implementation="guild")
    guild_transformers.register()
    make_model("MixtralConfig", experts_implementation="guild")
