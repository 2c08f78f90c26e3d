"""Grouped-query attention over a paged KV cache."""
