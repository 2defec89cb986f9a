"""Physical factors: whose they are, what they multiply, and how sure they are."""

import numpy as np
import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.factors import SECONDS_OF_KIND, FittedFactors, factor, multipliers, scopes, shipped
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.rates import Multipliers, rates
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.workload import Workload

NAMES = {"matmul": ("matmul", "matmul/A100"), "memory": ("memory",)}


def test_factors_belong_to_a_die_a_fabric_or_a_stack() -> None:
    found = scopes(load_cluster("2x8xA100"), STACKS["megatron"], Strategy(dp_replicate=16, attention="flash"))
    assert found["matmul"] == ("matmul", "matmul/A100", "matmul/megatron")
    assert found["attention"] == ("attention/flash2", "attention/flash2/A100")
    assert found["scale_up"] == ("scale_up", "scale_up/NVLink3/NVSwitch")
    assert found["host"] == ("host/megatron",)
    fp8 = scopes(load_cluster("8xH100"), STACKS["megatron"], Strategy(dp_replicate=8, precision="fp8"))
    assert "matmul/fp8" in fp8["matmul"]


def test_a_run_is_slowed_by_the_product_of_its_scopes() -> None:
    index = {"matmul": 0, "matmul/A100": 1}
    found = multipliers(NAMES, index, np.log([[1.1, 1.2], [1.0, 0.9]]))
    assert found.matmul == pytest.approx(np.array([[1.32], [0.9]]))
    assert found.memory == pytest.approx(np.ones((2, 1)))


def test_no_product_leaves_its_physical_limits() -> None:
    _, low, high, _ = SECONDS_OF_KIND["matmul"]
    found = multipliers(NAMES, {"matmul": 0}, np.log([[10.0], [0.01]]))
    assert found.matmul == pytest.approx(np.array([[high], [low]]))


def test_draws_spread_as_the_covariance_and_priors_say() -> None:
    """Log matmul: 4 % known of one scope and the prior's width of the other, which nothing has measured."""
    fitted = FittedFactors(("matmul",), np.zeros(1), np.array([[0.04**2]]), 0.06)
    drawn = np.log(fitted.at(NAMES, draws=4000).matmul)
    expected = np.hypot(0.04, factor("matmul/A100").prior_log_sd)
    assert drawn.std() == pytest.approx(expected, rel=0.05)
    assert fitted.at(NAMES).matmul == pytest.approx(1.0)


def test_shipped_factors_are_whole_and_physical() -> None:
    factors = shipped()
    assert len(factors.names) == len(factors.theta) == len(factors.cov) > 40
    assert np.linalg.eigvalsh(factors.cov).min() > 0
    for name, theta in zip(factors.names, factors.theta, strict=True):
        prior = factor(name)
        assert prior.low - 1e-9 <= np.exp(theta) <= prior.high + 1e-9
        assert np.sqrt(factors.cov[factors.index[name], factors.index[name]]) <= prior.prior_log_sd * 1.001


@pytest.mark.parametrize("kind", [kind for kind in SECONDS_OF_KIND if kind not in ("step", "scale_out")])
def test_a_slower_kind_of_work_never_makes_a_step_faster(kind: str) -> None:
    """One node, ZeRO-3: every kind of work but the network and the host's step time is there."""
    job = Job(load_model("Qwen/Qwen2.5-0.5B"), load_cluster("8xA100"), Workload(seq_len=512, global_batch_size=16))
    strategy = Strategy(dp_shard=8, sharding="parameters", reshard_after_forward=True, grad_accum=2)
    table, stated = StrategyTable.from_strategies([strategy]), rates(job.cluster, "bf16")

    def step_s(by: float) -> float:
        return float(price(job, "native", table, stated.slowed(Multipliers(**{kind: by}))).step_s().item())

    assert step_s(1.0) <= step_s(1.5)
    if kind in ("host", "scale_up", "contention"):
        assert step_s(1.0) < step_s(3.0)


def test_tables_measured_in_training_have_a_factor_of_their_own() -> None:
    """The B200 has bf16 products timed through Transformer Engine; its fp8 table, and every H100 table, is torch's."""
    b200 = scopes(load_cluster("8xB200"), STACKS["megatron"], Strategy(dp_replicate=8))
    fp8 = scopes(load_cluster("8xB200"), STACKS["megatron"], Strategy(dp_replicate=8, precision="fp8"))
    h100 = scopes(load_cluster("8xH100"), STACKS["megatron"], Strategy(dp_replicate=8))
    assert b200["matmul"][0] == "matmul/training"
    assert (fp8["matmul"][0], h100["matmul"][0]) == ("matmul", "matmul")
