"""The model as pure functions: full forward, prefill, decode step, verify step, drafts."""

from gdnjax.model.draft import draft, draft_prefill, fill_draft_kv, mtp_logits
from gdnjax.model.forward import Intermediates, forward, forward_with_intermediates
from gdnjax.model.step import decode_hidden, decode_step, prefill, prefill_hidden
from gdnjax.model.verify import verify_step

__all__ = [
    "Intermediates",
    "decode_hidden",
    "decode_step",
    "draft",
    "draft_prefill",
    "fill_draft_kv",
    "forward",
    "forward_with_intermediates",
    "mtp_logits",
    "prefill",
    "prefill_hidden",
    "verify_step",
]
