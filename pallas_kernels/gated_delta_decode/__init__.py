"""Gated delta rule, one token a row: reads a recurrent slot, writes a recurrent slot."""

from pallas_kernels.gated_delta_decode.op import DEFAULT_TILE, Tile, gated_delta_decode

__all__ = ["DEFAULT_TILE", "Tile", "gated_delta_decode"]
