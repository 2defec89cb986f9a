"""Nothing fits: the nearest plans, and changes each of which makes one fit while a smaller one does not."""

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import NoPlanError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.step import estimate, memory_limit
from trainplan.costmodel.workload import Workload
from trainplan.planner.remedies import remedies
from trainplan.planner.search import NothingFitsError, Pins, tune


def job(model: str, cluster: str, seq_len: int = 4096, gbs: int = 64) -> Job:
    return Job(load_model(model), load_cluster(cluster), Workload(seq_len=seq_len, global_batch_size=gbs))


def test_each_remedy_has_a_plan_that_fits_and_is_the_smallest_of_its_kind() -> None:
    of = job("Qwen/Qwen3-32B", "8xH100")
    found = {remedy.options.split()[0]: remedy for remedy in remedies(of, "native", Pins())}
    assert set(found) == {"--seq-len", "--cluster"}
    assert found["--cluster"].options == "--cluster 16xH100-SXM5-80GB"
    seq_len = int(found["--seq-len"].options.split()[1])
    shorter = job("Qwen/Qwen3-32B", "8xH100", seq_len)
    assert estimate(shorter, "native", found["--seq-len"].plan.strategy).fits
    assert estimate(job("Qwen/Qwen3-32B", "16xH100"), "native", found["--cluster"].plan.strategy).fits
    with pytest.raises(NothingFitsError):
        tune(job("Qwen/Qwen3-32B", "8xH100", 2 * seq_len), "native", Pins())


def test_adapters_and_freed_knobs_are_remedies() -> None:
    of = job("Qwen/Qwen3-8B", "1xL4", seq_len=1024, gbs=8)
    found = [remedy.options for remedy in remedies(of, "accelerate", Pins())]
    assert "--lora-rank 16" in found
    kept = Pins(no_recompute=True, values={"micro_batch_size": (4,)})
    freed = next(iter(remedies(job("Qwen/Qwen3-8B", "8xH100", 8192), "native", kept)))
    assert freed.options in ("no --no-recompute", "no --micro-batch-size")


def test_the_error_names_the_nearest_plans_with_all_of_their_memory() -> None:
    of = job("Qwen/Qwen3-32B", "8xH100")
    with pytest.raises(NothingFitsError, match="Any of these would do: --seq-len") as caught:
        tune(of, "native", Pins())
    nearest = caught.value.nearest
    assert 2 <= len(nearest) <= 5
    assert caught.value.limit_bytes == memory_limit(of)
    assert [c.device_bytes for c in nearest] == sorted(c.device_bytes for c in nearest)
    for candidate in nearest:
        assert candidate.device_bytes > memory_limit(of)
        exact = estimate(of, "native", candidate.strategy).peak.device_bytes.high
        assert candidate.device_bytes == pytest.approx(exact, rel=1e-9)
    assert isinstance(caught.value, NoPlanError)
