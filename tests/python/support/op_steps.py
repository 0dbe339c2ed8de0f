"""Runs every step of a layer as its own op, each on given inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from guild._torch.gradients import ops
from layers import Layer, pack
from oracle.experts import halves


class Steps:
    """Results of all steps in the concatenated layout, by the names of `oracle.steps.Computation`.

    Parameters
    ----------
    layer : Layer
        Its tensors and, by `stored`, what each step finds in memory.
    stored : dict
        The intermediate tensors (rows in use, width): what the steps before would have left.

    Attributes
    ----------
    routing : tuple
        offsets, row_token, slot_row, row_score of `sort_by_expert`.
    results : dict
        One tensor a step output, rows in use only; db_0, db_1 and db_down are those of the bias
        gradient, an op of its own.
    biases : dict
        db_0, db_1 and db_down as a layer with biases gets them: from the down gradient.
    """

    def __init__(self, layer: Layer, stored: dict[str, Tensor]) -> None:
        self.layer, self.stored = layer, stored
        self.gated = layer.gate is not None
        self.w_up = pack(layer.gate, layer.up, 1, "concatenated")
        self.routing = ops.sort_by_expert(layer.ids, layer.scores, layer.case.experts)
        self.used = int(self.routing[0][-1])
        self.results: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor] = {}
        self._forward()
        self._down_gradient()
        self._weight_gradients()
        self._up_gradient()

    def _input(self, *names: str) -> Tensor:
        """A step's input with all R rows: those that belong to nobody are NaN."""
        used = torch.cat([self.stored[name] for name in names], 1)
        rows = self.layer.case.tokens * self.layer.case.top_k
        full = used.new_full((rows, used.shape[1]), float("nan"))
        full[: used.shape[0]] = used
        return full.to(self.layer.x.device, self.layer.x.dtype)

    def _pair(self, name: str) -> Tensor:
        return self._input(*(f"{name}_{i}" for i in range(2 if self.gated else 1)))

    def _halves(self, name: str, value: Tensor, rows: int | None = None) -> dict[str, Tensor]:
        """Gate and up as name_0 and name_1."""
        parts = [t for t in halves(value, 1, "concatenated", self.gated) if t is not None]
        return {f"{name}_{i}": part[:rows] for i, part in enumerate(parts)}

    def _bias_gradients(self) -> tuple[Tensor, Tensor]:
        """Room for db1 and db2."""
        db_up = self.w_up.new_full(self.w_up.shape[:2], float("nan"))
        return db_up, db_up.new_full(self.layer.down.shape[:2], float("nan"))

    def _forward(self) -> None:
        layer, (offsets, row_token, slot_row, _) = self.layer, self.routing
        bias = layer.up_bias
        if bias is not None:
            bias = pack(layer.gate_bias, layer.up_bias, 1, "concatenated")
        flags = (*layer.activation.scalars, False, False)
        a, h = ops.up_projection(layer.x, offsets, row_token, self.w_up, None, bias, *flags, True)
        self.results |= self._halves("h", h, self.used)
        y = ops.down_projection(self._input("a"), offsets, layer.down, layer.down_bias, False)
        o = ops.combine(self._input("y"), slot_row, layer.scores)
        self.results |= {"a": a[: self.used], "y": y[: self.used], "o": o}

    def _down_gradient(self) -> None:
        layer, (offsets, row_token, slot_row, row_score) = self.layer, self.routing
        flags = (*layer.activation.scalars, False, False)
        rows = (layer.dout, self._pair("h"), offsets, row_token, row_score)
        biases = (None, None) if layer.down_bias is None else self._bias_gradients()
        dh, a_scaled, parts = ops.down_gradient(*rows, layer.down, *flags, *biases)
        if layer.down_bias is not None:
            self.biases = {**self._halves("db", biases[0]), "db_down": biases[1]}
        self.results |= self._halves("dh", dh, self.used)
        self.results["a_scaled"] = a_scaled[: self.used]
        self.results["dscores"] = ops.score_gradient(
            parts, slot_row, offsets, layer.dout, layer.down_bias, layer.case.intermediate
        )

    def _weight_gradients(self) -> None:
        layer, (offsets, row_token, _, row_score) = self.layer, self.routing
        dh, a_scaled = self._pair("dh"), self._input("a_scaled")
        nan = float("nan")
        dw_down, dw_up = torch.full_like(layer.down, nan), torch.full_like(self.w_up, nan)
        db_up, db_down = self._bias_gradients()
        ops.down_weight_gradient_out(
            layer.dout, a_scaled, offsets, row_token, dw_down, False, False
        )
        ops.up_weight_gradient_out(
            layer.x, dh, offsets, row_token, dw_up, None, self.gated, False, False, False
        )
        ops.bias_gradient_out(dh, offsets, None, None, db_up, False)
        ops.bias_gradient_out(layer.dout, offsets, row_token, row_score, db_down, False)
        self.results |= self._halves("dw", dw_up) | self._halves("db", db_up)
        self.results |= {"dw_down": dw_down, "db_down": db_down}

    def _up_gradient(self) -> None:
        offsets, _, slot_row, _ = self.routing
        dx_rows = ops.up_gradient(
            self._pair("dh"), offsets, self.w_up, None, self.gated, False, False
        )
        self.results["dx_rows"] = dx_rows[: self.used]
        self.results["dx"] = ops.combine(self._input("dx_rows"), slot_row, None)
