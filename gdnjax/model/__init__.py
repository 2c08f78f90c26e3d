"""The model as pure functions: full forward, prefill, decode step."""

from gdnjax.model.forward import Intermediates, forward, forward_with_intermediates, mtp_logits
from gdnjax.model.step import decode_step, prefill

__all__ = ["Intermediates", "decode_step", "forward", "forward_with_intermediates", "mtp_logits", "prefill"]
