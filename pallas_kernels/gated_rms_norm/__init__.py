"""RMS norms: the zero-centred one, and the gated one behind the delta rule."""

from pallas_kernels.gated_rms_norm.op import gated_rms_norm

__all__ = ["gated_rms_norm"]
