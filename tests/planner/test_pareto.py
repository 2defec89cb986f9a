"""Plans that trade speed for memory: each the fastest under its limit, none beaten in both."""

from itertools import pairwise

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.workload import Workload
from trainplan.planner.pareto import SMALLER_FRAC, front
from trainplan.planner.search import NothingFitsError, Pins, tune

OF = Job(load_model("Qwen/Qwen3-8B"), load_cluster("8xH100"), Workload(seq_len=4096, global_batch_size=64))


def test_each_point_is_the_fastest_under_its_limit() -> None:
    points = list(front(OF, "native", Pins(), points=50))
    assert len(points) > 3
    for faster, smaller in pairwise(points):
        assert faster.step_s <= smaller.step_s
        assert smaller.device_bytes <= faster.device_bytes * (1 - SMALLER_FRAC)
        limit = faster.device_bytes * (1 - SMALLER_FRAC)
        alone = tune(OF, "native", Pins(memory_limit_bytes=limit), top=1).candidates[0]
        assert alone.step_s == pytest.approx(smaller.step_s, rel=1e-9)
    with pytest.raises(NothingFitsError):
        tune(OF, "native", Pins(memory_limit_bytes=points[-1].device_bytes * (1 - SMALLER_FRAC)))


def test_the_first_point_is_the_plan_and_no_more_are_given_than_asked_for() -> None:
    points = list(front(OF, "native", Pins(), points=2))
    assert len(points) == 2
    assert points[0].step_s == pytest.approx(tune(OF, "native", Pins()).candidates[0].step_s)
