"""One rank of `trainplan.executor.measure`: times what a step is made of, beside the other ranks.

Times are medians. FLOP and bytes are counted as the cost model counts them, so that its seconds come out as measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainplan.costmodel.kernel_sets import EAGER_BF16, EAGER_FP32, KernelSet
from trainplan.executor.attention import Sdpa
from trainplan.executor.decoder import RmsNorm
from trainplan.executor.parallel import DTYPES

SIZES_CPU = ((1024, 256, 768), (1024, 768, 256), (512, 512, 1536), (1024, 256, 4096))
SIZES_GPU = ((8192, 4096, 12288), (8192, 12288, 4096), (8192, 4096, 6144), (4096, 4096, 151936))
"""Tokens, inputs and outputs of linear layers: of a small model where a CPU trains, of an 8B one on a GPU."""
MESSAGES = (1 << 10, 1 << 23)
"""Bytes of a small and a large collective: the one shows latency, the other bandwidth."""
SHARES = 12
"""Measurements that share the time about equally."""


class Clock:
    """Times a function on this rank while the others do the same."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds / SHARES
        self.done = 0

    def sync(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, what: str, function: Callable[[], object], repeats: int = 0) -> float:
        """Median seconds of one call: for a share of the time, or ``repeats`` times where ranks must agree."""
        if dist.get_rank() == 0:
            print(f"{self.done / (SHARES + 8 * (dist.get_world_size() > 1)):.2f} {what}", flush=True)
        self.done += 1
        for _ in range(3):
            function()
        self.sync()
        dist.barrier()
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < (repeats or 5) or (not repeats and time.perf_counter() - started < self.seconds):
            start = time.perf_counter()
            function()
            self.sync()
            samples.append(time.perf_counter() - start)
        return median(samples)


def op_overhead_s(clock: Clock) -> float:
    """Seconds per operation on tensors too small to matter: a chain of products and sums, forward and backward."""
    x = torch.ones(8, device=clock.device, requires_grad=True)
    chain = 40

    def run() -> None:
        y = x
        for _ in range(chain // 2):
            y = y * x + x
        y.sum().backward()

    # Per product and sum: 2 operations forward; backward 2 products and 2 accumulations of the gradient of x.
    return clock.time("operation overhead", run) / (chain / 2 * 6)


def matmul_flops_per_s(clock: Clock, dtype: torch.dtype, overhead_s: float) -> tuple[float, float]:
    """(median, best) rate of linear layers, forward and both gradients: 6 m n k FLOP."""
    rates = []
    for tokens, inputs, outputs in SIZES_GPU if clock.device.type == "cuda" else SIZES_CPU:
        x = torch.randn(tokens, inputs, device=clock.device, dtype=dtype, requires_grad=True)
        weight = torch.randn(outputs, inputs, device=clock.device, dtype=dtype, requires_grad=True)
        grad = torch.randn(tokens, outputs, device=clock.device, dtype=dtype)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight, grad: torch.Tensor = grad) -> None:
            torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

        seconds = clock.time(f"matrix products {tokens} x {inputs} x {outputs} {dtype}", run)
        rates.append(6 * tokens * inputs * outputs / max(seconds - 3 * overhead_s, seconds / 2))
    return median(rates), max(rates)


def attention_flops_per_s(clock: Clock, dtype: torch.dtype) -> float:
    """Causal attention: forward 2 T S width FLOP (the causal half of both products), backward 2.5 times that."""
    rows, heads, tokens, width = (2, 32, 4096, 128) if clock.device.type == "cuda" else (4, 8, 256, 32)
    q, k, v = (
        torch.randn(rows, heads, tokens, width, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad, sdpa = torch.randn_like(q), Sdpa()

    def run() -> None:
        torch.autograd.grad(sdpa(q, k, v, None), (q, k, v), grad)

    return 3.5 * 2 * rows * tokens * tokens * heads * width / clock.time(f"attention {dtype}", run)


def memory_bytes_per_s(clock: Clock, dtype: torch.dtype, overhead_s: float) -> float:
    """Bytes per second that a layer's memory-bound operations count: two norms, a gated activation, two residuals."""
    tokens, hidden, ffn = (8192, 4096, 12288) if clock.device.type == "cuda" else (1024, 256, 768)
    kernels: KernelSet = EAGER_FP32 if dtype == torch.float32 else EAGER_BF16
    x = torch.randn(tokens, hidden, device=clock.device, dtype=dtype, requires_grad=True)
    gate, up = (torch.randn(tokens, ffn, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(2))
    norm = RmsNorm(hidden, 1e-6).to(clock.device, dtype)
    torch.nn.init.ones_(norm.weight)

    def run() -> None:
        y = x + norm(x)
        y = y + norm(y)
        torch.autograd.backward([y, F.silu(gate) * up], [torch.ones_like(y), torch.ones_like(gate)])
        for tensor in (x, gate, up, norm.weight):
            tensor.grad = None

    seconds = clock.time(f"memory-bound operations {dtype}", run)
    e = dtype.itemsize
    moved, launches = 0.0, 0
    for kernel, elements, count in (
        (kernels.norm, tokens * hidden, 2),
        (kernels.residual, tokens * hidden, 2),
        (kernels.glu, tokens * ffn, 1),
    ):
        (fa, fb), (ba, bb) = kernel.forward, kernel.backward
        moved += count * elements * ((fa + ba) * e + fb + bb)
        launches += count * (kernel.forward_launches + kernel.backward_launches)
    return moved / max(seconds - launches * overhead_s, seconds / 2)


def link_rates(clock: Clock) -> dict[str, float]:
    """Bus bandwidths and the time of a hop, from a small and a large message of each collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    seconds: dict[str, list[float]] = {}
    for size in MESSAGES:
        whole = torch.zeros(size // 4 // n * n, device=clock.device)
        part = torch.zeros(len(whole) // n, device=clock.device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),  # type: ignore[misc]
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),  # type: ignore[misc]
            "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),  # type: ignore[misc]
            "p2p": lambda whole=whole: _exchange(whole, rank, n),  # type: ignore[misc]
        }
        for name, call in calls.items():
            seconds.setdefault(name, []).append(clock.time(f"{name} of {size} bytes", call, repeats=15))
    large = MESSAGES[1]
    moved = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "all_to_all": (n - 1) / n, "p2p": 1.0}
    rates = {
        f"{name}_bytes_per_s": large * share / max(seconds[name][1] - seconds[name][0], seconds[name][1] / 2)
        for name, share in moved.items()
    }
    return {**rates, "latency_s": seconds["all_gather"][0] / (n - 1)}


def _exchange(tensor: torch.Tensor, rank: int, n: int) -> None:
    """Send to the next rank while receiving from the one before."""
    received = torch.empty_like(tensor)
    operations = [dist.P2POp(dist.isend, tensor, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def describe(device: torch.device) -> dict[str, object]:
    """Name, kind, architecture and memory of this rank's device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "kind": "gpu",
            "arch": f"sm_{properties.major}{properties.minor}",
            "memory_bytes": properties.total_memory,
        }
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    free = pages * os.sysconf("SC_PAGE_SIZE")
    return {"name": "cpu", "kind": "cpu", "arch": platform.machine(), "memory_bytes": free / dist.get_world_size()}


def main() -> None:
    """Measure, and on rank 0 write the means over all ranks as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    result = measure(Clock(device, arguments.seconds), device)
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(clock: Clock, device: torch.device) -> dict[str, object]:
    """Every number of this machine, each the mean over the ranks."""
    own: dict[str, float] = {"op_overhead_s": op_overhead_s(clock)}
    overhead_s = own["op_overhead_s"]
    for precision in ("fp32", "bf16"):
        dtype = DTYPES[precision]
        typical, best = matmul_flops_per_s(clock, dtype, overhead_s)
        own[f"matmul_flops_per_s.{precision}"], own[f"peak_flops_per_s.{precision}"] = typical, best
        own[f"attention_flops_per_s.{precision}"] = attention_flops_per_s(clock, dtype)
    own["memory_bytes_per_s"] = memory_bytes_per_s(clock, torch.float32, overhead_s)
    if dist.get_world_size() > 1:
        own |= {f"link.{name}": value for name, value in link_rates(clock).items()}
    values = torch.tensor(list(own.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values)
    result: dict[str, object] = {
        **describe(device),
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "link": {},
    }
    for name, value in zip(own, (values / dist.get_world_size()).tolist(), strict=True):
        group, _, entry = name.partition(".")
        if entry:
            inner = result.setdefault(group, {})
            assert isinstance(inner, dict)  # names with a dot are groups
            inner[entry] = value
        else:
            result[group] = value
    return result


if __name__ == "__main__":
    main()
