"""Gated delta rule over many tokens at once, in chunks."""

from pallas_kernels.gated_delta_prefill.op import gated_delta_prefill

__all__ = ["gated_delta_prefill"]
