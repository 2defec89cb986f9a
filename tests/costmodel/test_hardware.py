"""Known GPUs: datasheet numbers by hand, and every sustained rate against a hand count from the published rows."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from pydantic import ValidationError

from trainplan.costmodel.hardware import Cluster, Device, Link, Quantity
from trainplan.costmodel.hardware_presets import (
    default_node,
    device,
    gpu_facts,
    gpu_names,
    node_facts,
    node_shape,
    preset_devices,
    scale_up_link,
    software,
)

H100, H200, A100 = "H100-SXM5-80GB", "H200-SXM-141GB", "A100-SXM4-80GB"
TABLED = (A100, H100, H200, "B200-SXM-180GB", "B300-SXM-288GB", "GB200-186GB", "GB300-288GB")  # with an NCCL table


def check(quantity: Quantity | None, value: float, provenance: str) -> None:
    assert quantity is not None
    assert quantity.value == pytest.approx(value, rel=1e-5)  # derived numbers keep six significant digits
    assert quantity.provenance == provenance


def test_there_are_23_gpus_and_each_is_whole() -> None:
    devices = preset_devices()
    assert len(devices) == len({name for name, _, _ in devices}) == 23
    for name, preset, facts in devices:
        assert preset.name == facts["name"] == name
        precisions = {"bf16", "fp32"} | ({"fp8"} if facts["peak_dense_tflops"]["fp8"] else set())
        precisions |= {"nvfp4"} if facts.get("peak_dense_fp4_tflops") else set()
        assert set(preset.peak_flops_per_s) == set(preset.matmul_flops_per_s) == precisions
        assert set(preset.attention_flops_per_s) == precisions


def test_nothing_sustained_is_above_its_peak() -> None:
    for name, preset, facts in preset_devices():
        for precision, peak in preset.peak_flops_per_s.items():
            assert preset.matmul_flops_per_s[precision].value < peak.value, (name, precision)
            assert preset.attention_flops_per_s[precision].value < peak.value, (name, precision)
        assert preset.memory_bytes_per_s.value < facts["memory_gbps"] * 1e9


def test_datasheet_numbers_of_an_h100() -> None:
    h100 = device(H100)
    check(h100.memory_bytes, 80998 * 2**20, "datasheet")  # 79.1 GiB of 80 GB can be had
    check(h100.peak_flops_per_s["bf16"], 989e12, "datasheet")
    check(h100.peak_flops_per_s["fp8"], 1979e12, "datasheet")
    check(h100.peak_flops_per_s["fp32"], 494.5e12, "datasheet")
    assert "tf32" in h100.peak_flops_per_s["fp32"].source
    check(h100.host_link_bytes_per_s, 64e9, "datasheet")


def test_memory_that_a_vendor_states_as_usable() -> None:
    check(device("GB200-186GB").memory_bytes, 189471 * 2**20, "datasheet")


def test_fp32_without_a_tf32_figure_is_half_of_bf16_and_says_so() -> None:
    check(device("MI355X").peak_flops_per_s["fp32"], 1250e12, "fitted")
    check(device("RTX-PRO-6000-Blackwell-Server").peak_flops_per_s["fp32"], 467.8e12 / 2, "fitted")


def test_a_volta_runs_fp32_on_its_plain_units() -> None:
    v100 = device("V100-SXM2-32GB")
    check(v100.peak_flops_per_s["fp32"], 15.7e12, "datasheet")
    assert v100.matmul_flops_per_s["fp32"].value < 15.7e12


def test_four_bit_products_sustain_the_share_of_eight_bit_ones() -> None:
    gb200 = device("GB200-186GB")
    check(gb200.peak_flops_per_s["nvfp4"], 10000e12, "datasheet")
    share = gb200.matmul_flops_per_s["fp8"].value / gb200.peak_flops_per_s["fp8"].value
    check(gb200.matmul_flops_per_s["nvfp4"], 10000e12 * share, "fitted")


def test_matrix_products() -> None:
    check(device(H100).matmul_flops_per_s["bf16"], 794.5e12, "measured")
    check(device(H100).matmul_flops_per_s["fp8"], 1402.6e12, "measured")
    check(device("MI300X").matmul_flops_per_s["bf16"], 668.4e12, "measured")
    # GB300 has no sweep; B300, the other sm_103 part, reached 1769 of 2250 and 3353.3 of 4500
    check(device("GB300-288GB").matmul_flops_per_s["bf16"], 2500e12 * 1769 / 2250, "fitted")
    check(device("GB300-288GB").matmul_flops_per_s["fp8"], 5000e12 * 3353.3 / 4500, "fitted")
    # two other A100s: 271.2 and 252.9 of 312
    check(device("A100-SXM4-40GB").matmul_flops_per_s["bf16"], (271.2 + 252.9) / 2 * 1e12, "fitted")
    # the sweep of the GH200 ran on its larger sibling, so it is not the part's own
    check(device("GH200-SXM-96GB").matmul_flops_per_s["bf16"], 828.6e12, "fitted")
    # no AMD part has an fp8 sweep: the part's own bf16 share, 668.4 of 1307
    check(device("MI300X").matmul_flops_per_s["fp8"], 2614e12 * 668.4 / 1307, "fitted")
    check(device(H100).matmul_flops_per_s["fp32"], 494.5e12 * 794.5 / 989, "fitted")


# cuDNN, causal, head_dim 128, 64 query and 8 key-value heads, bf16: (forward, backward) TFLOP/s at 32k, 16k, 8k tokens
CUDNN = {
    H200: [(688, 581), (673, 579), (644, 541)],
    "GB200-186GB": [(1622, 1226), (1708, 1328), (1574, 1332)],
    "GB300-288GB": [(1953, 1490), (1915, 1507), (1856, 1435)],
}


@pytest.mark.parametrize("gpu", CUDNN)
def test_attention_of_a_step_combines_forward_and_backward(gpu: str) -> None:
    """Time adds up: 1 part of 3.5 at the forward rate, 2.5 at the backward rate (5 of 7 products are backward)."""
    seconds_per_flop = [(1 / forward + 2.5 / backward) / 3.5 for forward, backward in CUDNN[gpu]]
    check(device(gpu).attention_flops_per_s["bf16"], median(1 / s for s in seconds_per_flop) * 1e12, "measured")


def test_attention_elsewhere_is_carried_over_and_says_so() -> None:
    gb300 = median(3.5 / (1 / f + 2.5 / b) for f, b in CUDNN["GB300-288GB"])
    gb300_matmul = 2500 * 1769 / 2250
    check(device("B300-SXM-288GB").attention_flops_per_s["bf16"], 1769e12 * gb300 / gb300_matmul, "fitted")
    for gpu in (H100, A100, "B200-SXM-180GB"):  # only an inference kernel's forward pass was measured on these
        attention = device(gpu).attention_flops_per_s["bf16"]
        assert attention.provenance == "fitted"
        assert H200 in attention.source
    assert device(H100).attention_flops_per_s["fp8"].value == device(H100).attention_flops_per_s["bf16"].value


def test_memory_bandwidth_is_measured_on_three_gpus() -> None:
    measured = {n for n, d, _ in preset_devices() if d.memory_bytes_per_s.provenance == "measured"}
    assert measured == set(CUDNN)
    share = device(H200).memory_bytes_per_s.value / 4.8e12
    check(device(H100).memory_bytes_per_s, 3.35e12 * share, "fitted")


# nccl-tests at 512 MiB and 512 B: bus GB/s of all_reduce, all_gather, alltoall; us of all_gather; ranks
NCCL = {
    A100: (222.3252, 205.3156, 203.0525, 15.56, 8),
    H100: (445.0485, 335.1852, 315.1877, 10.14, 8),
    H200: (460.4811, 336.7542, 311.1192, 12.19, 8),
    "B200-SXM-180GB": (703.9954, 616.9552, 563.1491, 16.06, 8),
    "B300-SXM-288GB": (703.5736, 620.6067, 580.0248, 15.71, 8),
    "GB200-186GB": (628.0906, 563.5848, 487.8457, 11.65, 4),
    "GB300-288GB": (634.9444, 571.6907, 511.9688, 11.21, 4),
}


@pytest.mark.parametrize("gpu", NCCL)
def test_measured_links(gpu: str) -> None:
    all_reduce, all_gather, all_to_all, small_us, ranks = NCCL[gpu]
    link = scale_up_link(gpu)
    check(link.all_reduce_bytes_per_s, all_reduce * 1e9, "measured")
    check(link.all_gather_bytes_per_s, all_gather * 1e9, "measured")
    check(link.all_to_all_bytes_per_s, all_to_all * 1e9, "measured")
    check(link.latency_s, small_us * 1e-6 / (ranks - 1), "measured")
    assert f"over {ranks} GPUs" in link.all_reduce_bytes_per_s.source
    assert software(gpu)["nccl"] in link.all_reduce_bytes_per_s.source


def test_only_a_gpu_with_its_own_table_has_measured_links() -> None:
    for name in gpu_facts():
        measured = scale_up_link(name).all_reduce_bytes_per_s.provenance == "measured"
        assert measured == (name in TABLED), name
        assert bool(software(name)) == (name in TABLED), name


def test_links_carried_over() -> None:
    # the same NVLink3 as its 80 GB sibling, 300 GB/s one way
    check(scale_up_link("A100-SXM4-40GB").all_reduce_bytes_per_s, 222.3252e9, "fitted")
    # PCIe: 0.4176 of a nominal 30 GB/s on eight A100-PCIe; PCIe 5 has twice the lanes' rate of PCIe 4
    check(scale_up_link("A100-PCIe-80GB").all_reduce_bytes_per_s, 0.4176 * 30e9, "fitted")
    check(scale_up_link("RTX-5090").all_reduce_bytes_per_s, 2 * 0.4176 * 30e9, "fitted")
    unidirectional = {A100: 300, H100: 450, H200: 450}
    shares = [NCCL[n][0] / unidirectional.get(n, 900) for n in NCCL]
    check(scale_up_link("MI355X").all_reduce_bytes_per_s, 535.5e9 * median(shares), "fitted")


def test_point_to_point() -> None:
    check(scale_up_link(A100).p2p_bytes_per_s, 195.1e9, "measured")
    check(scale_up_link(H100).p2p_bytes_per_s, 450e9, "datasheet")
    pair = scale_up_link("MI300X").p2p_bytes_per_s
    check(pair, 64e9, "datasheet")  # one of seven links
    assert "TP2 does not get 448 GB/s" in pair.source


def test_network_of_the_measured_node() -> None:
    link = node_shape("gcp-a3-megagpu-8g").scale_out
    assert link is not None
    # 8 GiB in 47.535 ms over two nodes: each of the 8 links per node carries an eighth
    check(link.all_reduce_bytes_per_s, 8589934592 / 8 / 47.535e-3, "measured")
    # 8 bytes in 135.8 us: twice 7 hops inside a node of H100 (10.14 us each way), the rest is two network hops
    check(link.latency_s, (135.8e-6 - 2 * 10.14e-6) / 2, "measured")
    assert link.all_gather_bytes_per_s.provenance == "fitted"


def test_other_networks_are_carried_over() -> None:
    share = 8589934592 / 8 / 47.535e-3 / 25e9
    for name, facts in node_facts().items():
        link = node_shape(name, "L4").scale_out
        per_gpu = facts["scaleout_unidirectional_gbytes_per_s_per_gpu"]
        assert (link is None) == (not per_gpu)
        if link and name != "gcp-a3-megagpu-8g":
            check(link.all_reduce_bytes_per_s, per_gpu * 1e9 * share, "fitted")
            assert "gcp-a3-megagpu-8g" in link.all_reduce_bytes_per_s.source
            check(link.latency_s, 57.76e-6 if "TCPX" in facts["fabric"] else 10e-6, "fitted")


def test_every_alias_names_a_known_gpu() -> None:
    assert set(gpu_names().values()) == set(gpu_facts())
    for short, name in {"h100": H100, "a100": A100, "4090": "RTX-4090", "gb300": "GB300-288GB"}.items():
        assert gpu_names()[short] == name


def test_the_usual_node_of_a_gpu() -> None:
    names = {gpu: shape.name if (shape := default_node(gpu)) else None for gpu in gpu_facts()}
    assert names[H100] == "dgx-h100"
    assert names[A100] == "dgx-a100-80gb"
    assert names["A100-SXM4-40GB"] == "aws-p4d.24xlarge"
    assert names["RTX-4090"] is None


def quantity(value: float) -> dict[str, Any]:
    return {"value": value, "provenance": "measured", "source": "a test"}


def test_a_rate_of_zero_or_infinity_is_refused() -> None:
    good = scale_up_link(H100).model_dump()
    with pytest.raises(ValidationError, match="all_reduce_bytes_per_s: must be more than 0"):
        Link.model_validate({**good, "all_reduce_bytes_per_s": quantity(0)})
    assert Link.model_validate({**good, "latency_s": quantity(0)}).latency_s.value == 0
    with pytest.raises(ValidationError, match="finite"):
        Link.model_validate({**good, "all_reduce_bytes_per_s": quantity(float("inf"))})
    h100 = device(H100).model_dump()
    with pytest.raises(ValidationError, match=r"matmul_flops_per_s.bf16: must be more than 0"):
        Device.model_validate({**h100, "matmul_flops_per_s": {"bf16": quantity(0)}})


def test_a_cluster_must_be_connected() -> None:
    fields = {"name": "c", "device": device(H100), "num_nodes": 2, "gpus_per_node": 8, "scale_up_domain": 8}
    with pytest.raises(ValidationError, match="scale_up of cluster c is missing"):
        Cluster.model_validate({**fields, "scale_up": None})
    with pytest.raises(ValidationError, match="scale_out of cluster c is missing"):
        Cluster.model_validate({**fields, "scale_up": scale_up_link(H100)})
