"""What stands between an attention layer's projections and its attention: norms, rope, KV write."""

from pallas_kernels.attention_prologue.op import attention_prologue, norm_and_rope, write_kv

__all__ = ["attention_prologue", "norm_and_rope", "write_kv"]
