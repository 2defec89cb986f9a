"""Cross-entropy of the next token, summed over the tokens that have a label."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100  # the label of a token that is not predicted; torch's and Hugging Face's own choice


def summed_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int = 0) -> torch.Tensor:
    """Sum over labelled tokens of -log softmax(hidden @ weight.T)[label].

    Args:
        hidden: [tokens, hidden_size].
        weight: Output embedding, [vocab_size, hidden_size], same dtype.
        labels: [tokens], int64; `IGNORED` = no prediction.
        chunk: Tokens whose logits exist at a time; 0 = all. The result is the same up to summation order.

    Returns:
        A scalar, fp32 whatever the dtype of the operands.
    """
    if chunk == 0 or chunk >= hidden.shape[0]:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return _ChunkedLoss.apply(hidden, weight, labels, chunk)


class _ChunkedLoss(torch.autograd.Function):
    """Holds the logits of one chunk at a time; the backward pass computes each chunk's logits again.

    Extra memory over the unchunked loss: one log-sum-exp per token, and the weight gradient in fp32, because adding
    many chunks in bf16 would lose what a single product keeps.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        log_sum_exp = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden[part], weight).float()
            log_sum_exp[part] = torch.logsumexp(logits, dim=-1)
            kept = labels[part] != IGNORED
            picked = logits.gather(1, labels[part].clamp_min(0)[:, None]).squeeze(1)
            total += ((log_sum_exp[part] - picked) * kept).sum()
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        ctx.chunk = chunk
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = F.linear(hidden[part], weight).float()
            # d loss / d logits = softmax - one-hot, and 0 where there is no label.
            slope = (logits - log_sum_exp[part, None]).exp_()
            target = labels[part, None]
            slope.scatter_add_(1, target.clamp_min(0), torch.full_like(target, -1, dtype=torch.float32))
            slope.mul_((target != IGNORED) * grad)
            slope = slope.to(hidden.dtype)
            hidden_grad[part] = slope @ weight
            weight_grad += slope.T @ hidden[part]
        return hidden_grad, weight_grad.to(weight.dtype), None, None
