"""Causal attention over rows that hold one document or several."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Which key each query may read: not after it, and in its own document.

    Args:
        documents: [rows, tokens], any integer; equal numbers in one row are one document. Padding has a number of its
            own, so that every query reads at least itself.

    Returns:
        [rows, 1, tokens, tokens], bool, True = may read.
    """
    tokens = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
    return same & causal


class Sdpa(nn.Module):
    """Torch's scaled dot-product attention. Its place in the decoder is where another kernel or a ring goes."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of every query to the keys it may read.

        Args:
            query: [rows, heads, tokens, head_dim].
            key: [rows, kv_heads, tokens, head_dim].
            value: Like ``key``.
            mask: From `document_mask`; None = plain causal, for which the fast kernels exist.

        Returns:
            [rows, heads, tokens, head_dim].
        """
        groups = query.shape[1] // key.shape[1]
        # On CUDA the kernels that take a mask, or fp32, know no grouped heads: with enable_gqa they would fall back to
        # one that holds the whole tokens x tokens matrix.
        grouped = mask is None and (query.dtype != torch.float32 or not query.is_cuda)
        if groups > 1 and not grouped:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1 and grouped
        )
