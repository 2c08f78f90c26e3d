"""Grouped-query attention over a paged KV cache."""

from pallas_kernels.paged_attention.op import paged_attention_decode

__all__ = ["paged_attention_decode"]
