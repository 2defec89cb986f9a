"""Seconds of the operations of a layer: each by the model of its kernel on the device, or by a plain roofline.

A model knows a kernel by its shape (tables, tile and wave quantisation, ramps). The drawn or calibrated rates of the
device scale it: a rate twice as high as stated halves the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainplan.costmodel.attention_rates import attention_model
from trainplan.costmodel.gemm import GemmModel, gemm_model
from trainplan.costmodel.grouped import grouped_gemm_s, grouped_weight_grad_s
from trainplan.costmodel.hardware import Precision
from trainplan.costmodel.memory_rates import memory_model
from trainplan.costmodel.rates import Rates, Value
from trainplan.costmodel.strategy import CHOICES
from trainplan.costmodel.work import Column, Mixer, Phase, Product, Shapes, Work

LOW: tuple[Precision, ...] = ("fp8", "nvfp4")
"""Precisions of products beside a job in bf16."""


class KernelSeconds:
    """Turns work into seconds for the strategies of one table."""

    def __init__(self, shapes: Shapes, rates: Rates) -> None:
        self.shapes, self.rates = shapes, rates
        self.device = shapes.job.cluster.device
        self.precision = shapes.job.workload.precision
        chosen = {low: shapes.table.chosen("precision", low) for low in LOW}
        self.low: dict[Precision, Column] = {low: rows for low, rows in chosen.items() if rows.any()}
        self.by_shape = self.device.kind == "gpu"
        self._known: dict[int, tuple[Work, Column]] = {}

    def total(self, work: Sequence[Work], phase: Phase) -> Column:
        """Seconds of a phase: its operations in turn; on a GPU not less than the host takes to launch them."""
        chosen = [w for w in work if w.phase == phase]
        device = np.asarray(sum((self._once(w) for w in chosen), start=np.zeros(())))
        if self.rates.sequential_issue:
            return device
        launches = sum((w.launches for w in chosen), start=np.zeros(()))
        return np.asarray(np.maximum(device, launches * self.shapes.stack.host_launch_s * self.rates.host))

    def _once(self, work: Work) -> Column:
        """`seconds`, remembered: recomputation asks for parts of what forward has summed."""
        if id(work) not in self._known:
            self._known[id(work)] = work, self.seconds(work)  # the work is kept, so that its id stays its own
        return self._known[id(work)][1]

    def seconds(self, work: Work) -> Column:
        """Seconds of one operation in one phase on the device."""
        if not self.by_shape:
            return self._roofline(work)
        if isinstance(work.shape, Product):
            return np.asarray(work.share * self._product(work, work.shape))
        if isinstance(work.shape, Mixer):
            return np.asarray(work.share * self._mixer(work, work.shape))
        if work.unit != "memory":
            return self._roofline(work)
        model = memory_model(self.device)
        stated = self.device.memory_bytes_per_s.value
        launches = np.maximum(work.launches, 1)
        seconds = launches * model.seconds(work.bytes / launches, "eager" if work.eager else "fused")
        return np.asarray(np.where(work.launches > 0, seconds, 0.0) * stated / self.rates.memory)

    def _roofline(self, work: Work) -> Column:
        """The slower of arithmetic and traffic; the time to call it comes on top on a CPU."""
        matmul: Column = np.asarray(self.rates.matmul[self.precision])
        for low, rows in self.low.items():
            matmul = np.where(rows, self.rates.matmul.get(low, self.rates.matmul[self.precision]), matmul)
        rate = {"matmul": matmul, "attention": self.rates.attention[self.precision], "memory": np.inf}[work.unit]
        busy = np.maximum(work.flops / rate, work.bytes / self.rates.memory)
        issue = work.launches * np.asarray(self.rates.op_overhead)
        return np.asarray(busy + issue if self.rates.sequential_issue else np.maximum(busy, issue))

    def _slower(self, precision: Precision) -> Value:
        """Stated over assumed rate of matrix products."""
        return np.asarray(self.device.matmul_flops_per_s[precision].value / self.rates.matmul[precision])

    def _product(self, work: Work, shape: Product) -> Column:
        plain = self._product_in(self.precision, work, shape)
        # Attention's products stay in the job's precision; so does the head under every recipe of fewer bits.
        if work.part == "core_attn" or work.name == "lm_head":
            return plain
        for low, rows in self.low.items():
            if low not in self.device.matmul_flops_per_s:
                return self._roofline(work)
            plain = np.asarray(np.where(rows, self._product_in(low, work, shape), plain))
        return plain

    def _product_in(self, precision: Precision, work: Work, shape: Product) -> Column:
        model = gemm_model(self.device, precision, self.shapes.stack.gemm_library)
        if np.all(np.asarray(shape.groups) == 1):
            seconds = _seconds(model, shape.m, shape.n, shape.k, shape.accumulates)
        elif self.shapes.stack.loops_over_experts:
            # One product per expert: m holds all experts' rows, of tokens or of a gradient.
            seconds = shape.groups * _seconds(model, shape.m / shape.groups, shape.n, shape.k, shape.accumulates)
        elif work.phase == "weight_grad":
            rows = shape.m / shape.groups  # of one gradient
            seconds = grouped_weight_grad_s(
                model, shape.k * shape.groups, shape.n, rows, shape.groups, shape.accumulates
            )
        else:
            imbalance = self.shapes.job.workload.routing_imbalance
            seconds = grouped_gemm_s(model, shape.m, shape.n, shape.k, shape.groups, imbalance)
        return np.asarray(seconds * self._slower(precision))

    def _mixer(self, work: Work, shape: Mixer) -> Column:
        stated = self.device.attention_flops_per_s[self.precision].value
        slower = np.asarray(stated / self.rates.attention[self.precision])
        codes = self.shapes.table["attention"]
        total = np.zeros(())
        for code in np.unique(codes):
            kernel = self.shapes.stack.attention.get(CHOICES["attention"][int(code)])
            if kernel is None:
                continue  # eager: priced as products
            model = attention_model(self.device, kernel)
            run = model.forward_s if work.phase == "forward" else model.backward_s
            seconds = run(
                shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len, shape.qk_width, shape.v_width,
                True, shape.window,
            )  # fmt: skip
            total = total + np.where(codes == code, seconds, 0.0)
        return np.asarray(total * slower)


def _seconds(model: GemmModel, m: Column, n: Column, k: Column, accumulates: bool) -> Column:
    """Seconds of products; each distinct shape is priced once."""
    if np.size(m) == np.size(n) == np.size(k) == 1:
        return np.asarray(
            model.one(float(np.squeeze(m)), float(np.squeeze(n)), float(np.squeeze(k)), bool(accumulates))
        )
    return model.seconds(m, n, k, accumulates)
