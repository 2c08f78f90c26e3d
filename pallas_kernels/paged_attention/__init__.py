"""Grouped-query attention over a paged KV cache."""

from pallas_kernels.paged_attention.op import paged_attention_decode, paged_attention_packed

__all__ = ["paged_attention_decode", "paged_attention_packed"]
