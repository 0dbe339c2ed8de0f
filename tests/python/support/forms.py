"""Options of a benchmark's layers, by a name for a test's id."""

from __future__ import annotations

from guild.bench.form import LayerForm

FORMS = {
    "default": LayerForm(),
    "gpt_oss": LayerForm("gpt_oss", bias=True, order="interleaved", transposed=True),
    "gelu": LayerForm("gelu", order="interleaved"),
    "gelu_tanh": LayerForm("gelu_tanh", bias=True, transposed=True),
}
