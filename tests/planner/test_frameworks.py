"""The table of published frameworks: each names a stack that exists, and nothing of a row's model or result."""

from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.strategy import Strategy
from trainplan.planner.frameworks import FRAMEWORKS, REVISIONS, framework


def test_every_entry_names_a_stack_and_fields_of_a_strategy() -> None:
    for entry in FRAMEWORKS:
        assert entry.stack in STACKS, entry.name
        assert set(entry.strategy) <= set(Strategy.model_fields), entry.name
        assert len(entry.why) > 40, entry.name


def test_a_more_special_entry_comes_before_a_general_one() -> None:
    """Each entry is found by its own name, source and task: no earlier one hides it."""
    for entry in FRAMEWORKS:
        assert framework(entry.name + " 1.0", f"github:{entry.source}/x", entry.task or "pretrain") is entry


def test_an_unknown_framework_has_no_entry() -> None:
    assert framework("Homemade", "", None) is None


def test_revisions_are_named_once() -> None:
    assert len(set(REVISIONS)) == len(REVISIONS)


def test_adapters_are_those_of_the_scripts() -> None:
    """Megatron-Bridge's performance recipes adapt `linear_qkv` alone; Qwen's scripts every projection, by rank 64."""
    bridge = framework("Megatron-Bridge/Megatron-Core", "", "lora")
    qwen = framework("HF Transformers + DeepSpeed (finetune.py)", "", "lora")
    assert bridge is not None
    assert qwen is not None
    assert bridge.lora.target_modules == ("q_proj", "k_proj", "v_proj")
    assert (qwen.lora.rank, len(qwen.lora.target_modules)) == (64, 7)


def test_a_repository_tells_what_its_rows_ran() -> None:
    """Whatever they call it; and a longer repository name is not taken for a shorter one."""
    for entry in FRAMEWORKS:
        for repo in entry.repos:
            assert framework("as published", f"github:{repo}/docs/x.md@0123", entry.task or "pretrain") is entry
    bridge = framework("Megatron-Bridge/Megatron-Core", "github:NVIDIA-NeMo/Megatron-Bridge/docs/x.md", "pretrain")
    assert bridge is not None
    assert bridge.name == "Megatron-Bridge"
