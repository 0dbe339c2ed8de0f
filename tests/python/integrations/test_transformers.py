"""Guild in Transformers' registry, and what it leaves to others."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers.integrations import finegrained_fp8, moe  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

import guild.integrations.transformers as guild_transformers  # noqa: E402
from calls import (  # noqa: E402
    FAMILIES,
    both,
    expect_same,
    inputs,
    layouts,
    odd_gate,
    results,
    routing,
)
from families import Family, make_experts  # noqa: E402
from guild.integrations.transformers import experts as experts_module  # noqa: E402

# ---- the registry -------------------------------------------------------------------------------


def test_nothing_is_imported_until_asked_for() -> None:
    code = (
        "import sys, guild, guild.integrations; guild.MoE; "
        "assert not [m for m in sys.modules if m.startswith('transformers')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register_makes_the_name_known() -> None:
    guild_transformers.register()
    guild_transformers.register()
    assert moe.ALL_EXPERTS_FUNCTIONS["guild"] is guild_transformers.experts_forward
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is moe.grouped_mm_experts_forward


def test_enable_takes_the_place_of_the_default_and_disable_restores() -> None:
    functions, own = moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward
    others = {name: f for name, f in functions.items() if name not in ("guild", "grouped_mm")}
    guild_transformers.enable()
    guild_transformers.enable()
    assert functions["grouped_mm"] is guild_transformers.experts_forward
    guild_transformers.disable()
    assert functions["grouped_mm"] is own
    guild_transformers.disable()
    assert functions["grouped_mm"] is own
    assert others == {n: f for n, f in functions.items() if n not in ("guild", "grouped_mm")}


def test_enabled_leaves_things_as_they_were() -> None:
    functions, own = moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward
    with pytest.raises(RuntimeError, match="inside"), guild_transformers.enabled():
        assert functions["grouped_mm"] is guild_transformers.experts_forward
        raise RuntimeError("inside")
    assert functions["grouped_mm"] is own
    guild_transformers.enable()
    with guild_transformers.enabled():
        pass
    assert functions["grouped_mm"] is guild_transformers.experts_forward


def test_enable_gives_back_what_another_package_registered(monkeypatch) -> None:
    def theirs(*args: object) -> None: ...

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "grouped_mm", theirs)
    with guild_transformers.enabled():
        pass
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is theirs


def test_enable_comes_before_what_was_set_without_registering_it() -> None:
    functions, registered = moe.ALL_EXPERTS_FUNCTIONS, moe.ExpertsInterface()

    def theirs(*args: object) -> None: ...

    functions["grouped_mm"] = theirs
    with guild_transformers.enabled():
        assert functions["grouped_mm"] is guild_transformers.experts_forward
    assert functions["grouped_mm"] is theirs
    assert registered["grouped_mm"] is moe.grouped_mm_experts_forward
    with guild_transformers.enabled():
        functions["grouped_mm"] = len  # a later choice
    assert functions["grouped_mm"] is len
    del functions["grouped_mm"]
    assert functions["grouped_mm"] is moe.grouped_mm_experts_forward


# ---- what Guild leaves to others ----------------------------------------------------------------


@layouts
def test_unknown_activation_runs_unfused_with_one_warning(family: Family) -> None:
    torch.manual_seed(0)
    first, second = (odd_gate(make_experts(family)) for _ in range(2))
    second.__class__ = type(first)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for experts in (first, second, first):
            eager, ours = both(experts, *inputs())
            expect_same(ours, eager)
    assert len(said) == 1 and type(first).__name__ in str(said[0].message)


def make_wide(
    experts: int, hidden: int = 4, intermediate: int = 8, of_class: type = MixtralExperts
) -> nn.Module:
    config = SimpleNamespace(
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        hidden_act="silu",
    )
    wide = of_class(config)
    for parameter in wide.parameters():
        nn.init.normal_(parameter)
    return wide


def test_what_guild_cannot_do_is_left_to_transformers_with_one_warning() -> None:
    torch.manual_seed(0)
    experts = make_wide(4097)
    call = torch.randn(6, 4), *routing(6, experts=4097)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        eager, ours = both(experts, *call)
        expect_same(ours, eager)
        both(experts, *call)
    assert len(said) == 1 and "4096 experts" in str(said[0].message)


@pytest.mark.parametrize(
    ("of_class", "dtype", "hidden", "intermediate"),
    [
        (MixtralExperts, torch.float32, 3, 8),
        (MixtralExperts, torch.bfloat16, 4, 8),
        (MixtralExperts, torch.float64, 4, 8),
        (GptOssExperts, torch.float32, 4, 6),
    ],
)
def test_what_grouped_mm_refuses_too_is_left_to_the_model(
    of_class: type, dtype: torch.dtype, hidden: int, intermediate: int, monkeypatch
) -> None:
    """torch's grouped_mm has no float64, and only takes rows of whole 16 bytes."""
    monkeypatch.setitem(experts_module.MOST_EXPERTS, "cpu", 3)
    torch.manual_seed(0)
    experts = make_wide(4, hidden, intermediate, of_class).to(dtype)
    call = torch.randn(6, hidden, dtype=dtype), *routing(6)
    eager = results("eager", experts, *call)
    with pytest.warns(UserWarning, match="to the model's own loop: it takes at most 3 experts"):
        ours = results("guild", experts, *call)
    assert all(torch.equal(ours[name], eager[name]) for name in eager)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"device": "meta"}, "meta tensors"),
        ({"dtype": torch.float8_e4m3fn}, "torch.float8_e4m3fn"),
    ],
)
def test_devices_and_dtypes_without_kernels(place: dict, words: str, monkeypatch) -> None:
    called = []
    monkeypatch.setattr(
        experts_module, "grouped_mm_experts_forward", lambda *call: called.append(call)
    )
    experts = make_wide(4, 16, 16).to(**place)
    x, (ids, scores) = torch.randn(6, 16), routing(6)
    if "device" in place:
        x, ids, scores = (t.to(place["device"]) for t in (x, ids, scores))
    with pytest.warns(UserWarning, match=words):
        guild_transformers.experts_forward(experts, x, ids, scores)
    assert len(called) == 1


def test_features_of_later_interfaces_are_left_to_transformers(monkeypatch) -> None:
    """Such as the norm after each expert that Transformers 5.23 added."""

    def decorator(experts_class=None, *, has_gate=True, has_post_expert_norm=False) -> None: ...

    features = experts_module._other_features(decorator)
    assert features == {"has_post_expert_norm": False}
    monkeypatch.setattr(experts_module, "_OTHER_FEATURES", features)
    monkeypatch.setattr(experts_module, "grouped_mm_experts_forward", lambda *call: call)
    experts, call = make_experts(FAMILIES[0]), inputs()
    experts.has_post_expert_norm = True
    with pytest.warns(UserWarning, match="does not know has_post_expert_norm"):
        assert guild_transformers.experts_forward(experts, *call) == (experts, *call)
    experts.has_post_expert_norm = False
    assert guild_transformers.experts_forward(experts, *call).shape == call[0].shape


def test_rows_that_no_grouped_product_takes_are_left_to_the_model(monkeypatch) -> None:
    """As on a GPU: torch's grouped_mm refuses rows of 6 bytes too, the model's loop does not."""
    monkeypatch.setattr(experts_module, "_takes_any_rows", lambda device: False)
    torch.manual_seed(0)
    experts = make_wide(4, hidden=3)
    call = torch.randn(6, 3), *routing(6)
    eager = results("eager", experts, *call)
    with pytest.warns(UserWarning, match="multiples of 16 bytes"):
        ours = results("guild", experts, *call)
    assert all(torch.equal(ours[name], eager[name]) for name in eager)


CUDA_CALLS = {
    "float32": (dict(dtype=torch.float32), 4, 16, "not in torch.float32", "grouped_mm"),
    "float64": (dict(dtype=torch.float64), 4, 16, "not in torch.float64", "the loop"),
    "too many experts": (dict(dtype=torch.bfloat16), 1025, 16, "1024 experts", "grouped_mm"),
    "another GPU": (dict(dtype=torch.bfloat16), 4, 16, "of this GPU", "grouped_mm"),
    "rows of 24 bytes": (dict(dtype=torch.bfloat16), 4, 12, "multiples of 16 bytes", "the loop"),
}


@pytest.mark.parametrize("case", CUDA_CALLS)
def test_what_runs_on_a_gpu(case: str, monkeypatch) -> None:
    """Checked with tensors that merely claim to be on a GPU."""
    options, count, hidden, words, runs_on = CUDA_CALLS[case]
    reason = "of this GPU: too old" if case == "another GPU" else ""
    monkeypatch.setattr(experts_module, "missing_kernels", lambda device: reason)
    monkeypatch.setattr(experts_module, "grouped_mm_experts_forward", lambda *call: "grouped_mm")
    monkeypatch.setattr(experts_module, "routed_experts", lambda x, *_, **__: x)
    monkeypatch.setattr(MixtralExperts.forward, "__wrapped__", lambda *call: "the loop")

    def call(count: int, hidden: int, **options: torch.dtype) -> object:
        with FakeTensorMode():
            experts = make_wide(count, hidden)
            for name, parameter in list(experts.named_parameters()):
                fake = torch.empty(parameter.shape, device="cuda", **options)
                setattr(experts, name, nn.Parameter(fake))
            x = torch.empty(6, hidden, device="cuda", **options)
            ids = torch.zeros(6, 2, dtype=torch.int64, device="cuda")
            return guild_transformers.experts_forward(experts, x, ids, ids.float())

    with pytest.warns(UserWarning, match=words):
        assert call(count, hidden, **options) == runs_on
    if not reason:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for dtype in (torch.bfloat16, torch.float16):
                assert call(1024, 16, dtype=dtype).shape == (6, 16)


def test_the_products_dtype() -> None:
    x, weight = torch.empty(1), torch.empty(1, dtype=torch.float16)
    assert experts_module._dtype(x, weight) == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts_module._dtype(x, weight) == torch.bfloat16
        assert experts_module._dtype(x.double(), weight.double()) == torch.float64


def test_fp8_experts_stay_with_transformers(monkeypatch) -> None:
    own = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    monkeypatch.setitem(own._global_mapping, "grouped_mm", lambda *call: call)
    experts = make_experts(FAMILIES[0])
    with pytest.warns(UserWarning, match="FP8"):
        assert own["guild"](experts, 1, 2, 3) == (experts, 1, 2, 3)
