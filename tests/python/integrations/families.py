"""Every class of Transformers whose experts follow its experts interface, as tiny random modules.

Run as a program, it writes the table of them into docs/integrations/transformers.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import transformers
from torch import nn

from guild import Activation
from guild.integrations.transformers.gate import Gate, gate_of

HIDDEN, INTERMEDIATE, EXPERTS = 16, 8, 4
SIZES = {
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "moe_latent_size": None,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
}


class Family(NamedTuple):
    """One experts class of one model."""

    model: str  # the folder in transformers.models
    class_name: str

    def __str__(self) -> str:
        return f"{self.model}-{self.class_name}"


@cache
def families() -> tuple[Family, ...]:
    """The classes that carry the decorator in the installed Transformers."""
    found = []
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        text = path.read_text()
        if "@use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(map(_is_interface, node.decorator_list)):
                found.append(Family(path.parent.name, node.name))
    return tuple(found)


def _is_interface(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(name, ast.Name) and name.id == "use_experts_implementation"


def make_experts(family: Family, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Tiny random experts of this class, with the activation of the model's own config."""
    package = f"transformers.models.{family.model}"
    experts_class = getattr(
        importlib.import_module(f"{package}.modeling_{family.model}"), family.class_name
    )
    sizes = inspect.signature(experts_class).parameters
    given = {"intermediate_size": INTERMEDIATE} if "intermediate_size" in sizes else {}
    for config in _configs(importlib.import_module(f"{package}.configuration_{family.model}")):
        try:
            experts = experts_class(config, **given)
        except (AttributeError, TypeError, KeyError):  # the config of another part of the model
            continue
        if experts.down_proj.numel() == EXPERTS * HIDDEN * INTERMEDIATE:
            with torch.no_grad():
                for parameter in experts.parameters():
                    parameter.normal_(std=0.5)
            return experts.to(dtype)
    raise LookupError(f"no config of {package} makes tiny {family.class_name}")


def _configs(module: ModuleType) -> list[transformers.PreTrainedConfig]:
    made = []
    for _, config_class in inspect.getmembers(module, inspect.isclass):
        if config_class.__module__ != module.__name__:
            continue
        if not issubclass(config_class, transformers.PreTrainedConfig):
            continue
        config = config_class()
        config.allow_global_per_layer_attribute_access = True  # where layers differ
        for name, size in SIZES.items():
            if hasattr(config, name) and not isinstance(getattr(config, name), list):
                setattr(config, name, size)
        config._experts_implementation = "eager"
        made.append(config)
    return made


# ---- the table in the docs ----------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[3] / "docs/integrations/transformers.md"
_TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)


def table() -> str:
    """The families by model: the layout of their weights, and which activation Guild recognises."""
    rows = [
        "| model | weights | activation |",
        "|---|---|---|",
    ]
    for family in families():
        experts = make_experts(family)
        gate = gate_of(experts)
        row = (f"`{family.model}`", _layout(experts, gate), _activation(gate))
        line = f"| {' | '.join(row)} |"
        if line not in rows:  # two classes of one model
            rows.append(line)
    return "\n".join(rows) + "\n"


def _layout(experts: nn.Module, gate: Gate | None) -> str:
    words = [gate.order] if experts.has_gate and gate else []
    words += ["transposed"] * experts.is_transposed + ["biases"] * experts.has_bias
    return ", ".join(words) or "one up projection"


def _activation(gate: Gate | None) -> str:
    if gate is None:
        return "the model's own"
    activation = gate.activation
    name = activation.kind if activation.gated else f"{activation.kind}, no gate"
    plain = Activation(activation.kind, activation.gated)
    changed = [
        f"{field} {getattr(activation, field):g}"
        for field in ("alpha", "limit", "up_offset")
        if getattr(activation, field) != getattr(plain, field)
    ]
    return ", ".join([name, *changed, *["clamp_after"] * activation.clamp_after])


def written_table() -> str:
    """The table as it stands in the docs."""
    return _TABLE.search(PAGE.read_text())[0]


def is_listed(family: Family) -> bool:
    """Whether it is in that table; later versions of Transformers have others besides."""
    return f"| `{family.model}` |" in written_table()


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text()))
