"""In what order are the families of a space searched? By a bound that knows only their meshes, the least first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainplan.costmodel.bounds import FUSED_BACKWARD
from trainplan.planner.space import Family, Space
from trainplan.planner.unit_book import UnitBook


@dataclass(frozen=True)
class Order:
    """The families of a space, least mesh bound first.

    Attributes:
        families: All of them.
        bounds: Seconds that no strategy on each mesh of each family can beat.
        covered: Strategies of all families.
    """

    families: list[Family]
    bounds: list[np.ndarray]
    covered: int

    @classmethod
    def of(cls, space: Space, book: UnitBook) -> Order:
        """The order of a space."""
        families = list(space.families())
        bounds = [mesh_bound_s(space, book, family) for family in families]
        order = sorted(range(len(families)), key=lambda i: (float(bounds[i].min()), i))
        covered = sum(space.count(family) for family in families)
        return cls([families[i] for i in order], [bounds[i] for i in order], covered)

    @property
    def least_s(self) -> float:
        """Seconds that no strategy can beat; infinite where there is none."""
        return float(self.bounds[0].min()) if self.bounds else np.inf

    @cached_property
    def checksum(self) -> str:
        """Changes with the space, and with what the cost model says of it."""
        digest = hashlib.sha256(str(self.covered).encode())
        for bound in self.bounds:
            digest.update(",".join(f"{seconds:.9g}" for seconds in bound).encode())
        return digest.hexdigest()[:16]


def mesh_bound_s(space: Space, book: UnitBook, family: Family) -> np.ndarray:
    """Seconds that no strategy on each mesh of a family can beat.

    All layers shared out evenly over the ranks; or the work of the rank with the head, which waits for one forward of
    each stage before it and, where backwards are whole, is waited for by one backward of each.
    """
    forward, backward, head = book.least_s(book.rows(family))
    pp, m, model = family.pp, family.grad_accum, space.job.model
    bound = m * (model.num_layers * (forward + backward) + head) / pp
    if len(set(model.layer_kinds())) == 1:  # then the mean layer is every layer
        fewest = min(min(sizes) for sizes in space.stage_sizes(family))
        whole, in_line = family.schedule in FUSED_BACKWARD, family.schedule not in ("zbv", "dualpipev")
        fill = in_line * (pp - 1) * fewest * (forward + whole * backward)
        bound = np.maximum(bound, fill + m * (fewest * family.vpp * (forward + backward) + head))
    return np.asarray(bound)
