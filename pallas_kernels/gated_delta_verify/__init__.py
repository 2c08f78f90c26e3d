"""Gated delta rule, a few candidate rows a request: verified on one state page and a record of the last step."""

from pallas_kernels.gated_delta_verify.op import gated_delta_pages, gated_delta_replay, gated_delta_verify
from pallas_kernels.gated_delta_verify.record import Record, Recorded, after_step, record_shapes

__all__ = [
    "Record",
    "Recorded",
    "after_step",
    "gated_delta_pages",
    "gated_delta_replay",
    "gated_delta_verify",
    "record_shapes",
]
