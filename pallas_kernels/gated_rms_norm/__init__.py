"""RMS norms: the zero-centred one, and the gated one behind the delta rule."""
