"""Causal depthwise convolution with SiLU over q, k and v, on a ring of the last inputs."""

from pallas_kernels.causal_conv.op import causal_conv_decode, causal_conv_packed

__all__ = ["causal_conv_decode", "causal_conv_packed"]
