"""What a cluster is made of: devices, links and nodes, each number with where it came from.

Presets and YAML files are read by `trainplan.costmodel.cluster_config`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Provenance = Literal["measured", "fitted", "datasheet"]
Precision = Literal["fp32", "bf16", "fp8", "nvfp4"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _rates_are_positive(self) -> Self:
        """A time is bytes or FLOPs over a rate, so a rate of 0 is a mistake in the file, not a slow link."""
        for field, value in self:
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in entries:
                if field.endswith("_per_s") and isinstance(entry, Quantity) and entry.value == 0:
                    raise ValueError(f"{field}{'.' if key else ''}{key}: must be more than 0.")
        return self


class Quantity(_Frozen):
    """A number and where it came from. The unit is in the name of the field that holds it."""

    value: float = Field(ge=0, allow_inf_nan=False)
    provenance: Provenance
    source: str = Field(min_length=1, description="What was read or run, exact enough to repeat.")


class Device(_Frozen):
    """One accelerator, or one CPU rank, as a training process sees it."""

    name: str
    kind: Literal["gpu", "cpu"]
    arch: str = Field(description="sm_90, gfx942, x86_64, ...")
    memory_bytes: Quantity = Field(description="Usable by one rank [bytes].")
    memory_bytes_per_s: Quantity = Field(description="Sustained, read plus write [bytes/s].")
    peak_flops_per_s: dict[Precision, Quantity] = Field(
        description="Dense datasheet peak; the denominator of MFU [FLOP/s]."
    )
    matmul_flops_per_s: dict[Precision, Quantity] = Field(description="Sustained by large matrix products [FLOP/s].")
    attention_flops_per_s: dict[Precision, Quantity] = Field(
        description="Sustained by fused attention, forward and backward together, causal half counted [FLOP/s]."
    )
    op_overhead_s: Quantity = Field(description="Host time to issue one operation; a floor for small ones [s].")
    host_link_bytes_per_s: Quantity | None = Field(None, description="Device to host memory, one direction [bytes/s].")


class Link(_Frozen):
    """What a group of ranks gets from one tier of the network: bus bandwidths per rank, one direction."""

    kind: str = Field(description="NVLink4/NVSwitch, InfiniBand NDR, shared memory, ...")
    all_reduce_bytes_per_s: Quantity
    all_gather_bytes_per_s: Quantity = Field(description="All-gather and reduce-scatter.")
    all_to_all_bytes_per_s: Quantity
    p2p_bytes_per_s: Quantity
    latency_s: Quantity = Field(description="Time of one hop with an empty message [s].")


class Cluster(_Frozen):
    """Equal nodes of equal devices on one fabric."""

    name: str
    device: Device
    num_nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    scale_up: Link | None = Field(description="Inside a scale-up domain; None only with one device.")
    scale_up_domain: int = Field(
        ge=1, description="Devices that reach each other over scale_up; may span nodes (NVL72)."
    )
    scale_out: Link | None = Field(None, description="Between scale-up domains; None: they are not connected.")
    host_memory_bytes: Quantity | None = Field(None, description="Per node [bytes].")
    storage_write_bytes_per_s: Quantity | None = Field(None, description="Checkpoints, whole cluster [bytes/s].")
    price_per_gpu_hour: Quantity | None = Field(None, description="In the user's currency.")
    software: dict[str, str] = Field(default_factory=dict, description="Versions the measured numbers belong to.")

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @model_validator(mode="after")
    def _connected(self) -> Cluster:
        if self.num_gpus > 1 and self.scale_up_domain > 1 and self.scale_up is None:
            raise ValueError(f"scale_up of cluster {self.name} is missing: {self.num_gpus} devices need a link.")
        if self.num_gpus > self.scale_up_domain and self.scale_out is None:
            raise ValueError(
                f"scale_out of cluster {self.name} is missing: {self.num_gpus} devices span more than one scale-up "
                f"domain of {self.scale_up_domain}. Give the fabric, or use one node."
            )
        return self
