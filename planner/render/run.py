"""What did a run do, beside what was predicted?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from trainplan.costmodel.plan import Plan
from trainplan.planner.render.console import heading, line, table
from trainplan.planner.render.format import by_unit, factor, tokens_per_s
from trainplan.planner.summary import causes, compare, is_close

if TYPE_CHECKING:
    from trainplan.executor.measurement import Measurement


def print_comparison(to: Console, plan: Plan, measured: Measurement) -> None:
    """Predicted and measured side by side; the likely causes where the step time is far off."""
    compared = compare(plan, measured)
    heading(to, f"Predicted and measured ({len(measured.samples_s)} steps after {measured.warmup_steps} of warm-up)")
    table(
        to,
        [(c.label, _written(c.name, c.predicted), _written(c.name, c.measured), factor(c.factor)) for c in compared],
        headers=("", "predicted", "measured", "measured/predicted"),
        right=(1, 2, 3),
    )
    if not is_close(compared[0]):
        line(to, "The step time is more than a factor of 2 off. Likely causes:")
        for cause in causes(plan, measured):
            line(to, f"- {cause}")


def _written(name: str, value: float) -> str:
    return tokens_per_s(value) if name == "tokens_per_s" else by_unit(name, value)
