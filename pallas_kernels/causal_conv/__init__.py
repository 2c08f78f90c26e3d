"""Causal depthwise convolution with SiLU over q, k and v, on a ring of the last inputs."""
