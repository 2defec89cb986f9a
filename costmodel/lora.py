"""What low-rank adapters add: a module of k inputs and n outputs gets A (k x r) and B (r x n), which alone learn."""

from __future__ import annotations

from trainplan.costmodel.model import AttentionKind, MlpKind, ModelSpec
from trainplan.costmodel.workload import Lora


def module_sizes(model: ModelSpec, attention: AttentionKind, mlp: MlpKind) -> dict[str, tuple[int, int]]:
    """Hugging Face module -> (inputs, outputs) of the projections of one layer, as PEFT names them.

    Routed experts are left out: PEFT's target names match them only where a family keeps them as separate modules.
    """
    h = model.hidden_size
    sizes: dict[str, tuple[int, int]] = {}
    if attention != "linear" and model.mla is None:
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        sizes |= {
            "q_proj": (h, q * (2 if model.attn_output_gate else 1)),
            "k_proj": (h, kv),
            "v_proj": (h, kv),
            "o_proj": (q, h),
        }
    if mlp == "dense" and model.ffn_hidden_size:
        f = model.ffn_hidden_size
        sizes |= {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
    return sizes


def adapter_parameters(model: ModelSpec, lora: Lora, attention: AttentionKind, mlp: MlpKind) -> int:
    """Trained parameters of one layer: r (k + n) for each target module."""
    sizes = module_sizes(model, attention, mlp)
    return sum(lora.rank * sum(sizes[name]) for name in lora.target_modules if name in sizes)
