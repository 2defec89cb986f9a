"""Seconds of one product per expert: a grouped matrix product over tokens that a router has sorted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.gemm import GemmModel

Array = npt.NDArray[np.float64]
GROUPED_SLOWER: Mapping[int, float] = {256: 1.15}
"""Rows of a tile -> seconds over one product with the padded rows of all groups, 1 elsewhere: medians of SimuMax's
grouped tables over its single ones are 1.05 to 1.2 on the B200, whose tiles have 256 rows, and 0.9 on the A100 PCIe;
benchmarks/kernel_accuracy.py prints them."""


def _slower(model: GemmModel) -> float:
    return GROUPED_SLOWER.get(model.group_rows, 1.0)


def grouped_gemm_s(
    model: GemmModel,
    tokens: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    groups: npt.ArrayLike,
    imbalance: float = 1.0,
) -> Array:
    """Seconds of ``groups`` products of tokens / groups rows each, run as one kernel.

    Experts' tiles fill the machine together, so the waves are those of one product with all rows, each expert's rows
    padded to whole tiles; every expert's weights are read.

    Args:
        model: Of the device's single products.
        tokens: Rows of all groups.
        n: Columns.
        k: Summed length.
        groups: Weight sets.
        imbalance: Rows of the busiest rank's experts over the mean.
    """
    tokens, n, k = np.asarray(tokens, float), np.asarray(n, float), np.asarray(k, float)
    groups = np.asarray(groups, float)
    each = np.ceil(tokens / groups / model.group_rows) * model.group_rows
    seconds = model.seconds(each * groups * imbalance, n, k)
    weights = (groups - 1) * n * k * model.element_bytes / model.base.bytes_per_s
    return np.asarray(np.where(tokens > 0, np.maximum(_slower(model) * seconds, weights), 0.0))


def grouped_weight_grad_s(
    model: GemmModel,
    tokens: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    groups: npt.ArrayLike,
    accumulates: bool,
) -> Array:
    """Seconds of the weight gradients [k, n] of ``groups`` experts in one kernel: single products, launched once.

    Args:
        model: Of the device's single products.
        tokens: Rows of all groups, the summed length of the products.
        n: Columns of a gradient.
        k: Rows of a gradient.
        groups: Weight sets.
        accumulates: The gradients are added to fp32 ones.
    """
    groups = np.asarray(groups, float)
    alone = replace(model, base=replace(model.base, fixed_s=0.0, floor_s=0.0))
    each = alone.seconds(k, n, np.asarray(tokens, float) / groups, accumulate_fp32=accumulates)
    return np.asarray(_slower(model) * groups * each + model.base.fixed_s + model.base.floor_s)
