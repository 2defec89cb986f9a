"""The loss of chunks against torch's own cross-entropy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from trainplan.executor.loss import IGNORED, summed_loss


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(70, 24, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 70, (50,), generator=generator)
    labels[[0, 7, 8, 9, 49]] = IGNORED
    return hidden, weight, labels


def test_uniform_logits_cost_log_vocab_per_label() -> None:
    """-log(1/v) for every token that has a label."""
    labels = torch.tensor([3, IGNORED, 5])
    for chunk in (0, 2):
        loss = summed_loss(torch.zeros(3, 4), torch.ones(11, 4), labels, chunk)
        assert loss.item() == pytest.approx(2 * math.log(11), rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 25, 49, 50, 64])
def test_chunks_change_neither_loss_nor_gradients(chunk: int) -> None:
    whole = operands(torch.float32)
    expected = F.cross_entropy(whole[0] @ whole[1].T, whole[2], ignore_index=IGNORED, reduction="sum")
    (expected / 45).backward()
    parts = operands(torch.float32)
    loss = summed_loss(*parts, chunk)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss / 45).backward()
    for part, reference in zip(parts[:2], whole[:2], strict=True):
        assert part.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(part.grad, reference.grad, atol=1e-6, rtol=1e-6)


def test_bf16_operands_give_an_fp32_loss_and_bf16_gradients() -> None:
    """Within bf16's 8 bits of the same sum in fp32."""
    exact = operands(torch.float32)
    reference = summed_loss(*exact)
    for chunk in (0, 16):
        hidden, weight, labels = operands(torch.bfloat16)
        loss = summed_loss(hidden, weight, labels, chunk)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(reference.item(), rel=2**-8)
        loss.backward()
        assert hidden.grad is not None
        assert hidden.grad.dtype == torch.bfloat16


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    for chunk in (0, 16):
        hidden, weight, _ = operands(torch.float32)
        loss = summed_loss(hidden, weight, torch.full((50,), IGNORED), chunk)
        loss.backward()
        assert loss.item() == 0
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) == 0


def test_chunks_never_hold_all_logits() -> None:
    """The largest tensor of forward and backward has chunk x vocab elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight, labels = operands(torch.float32)
    with Watch():
        summed_loss(hidden, weight, labels, 8).backward()
    assert largest == max(8 * 70, hidden.numel(), weight.numel())
