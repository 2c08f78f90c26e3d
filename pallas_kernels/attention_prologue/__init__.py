"""What stands between an attention layer's projections and its attention: norms, rope, KV write."""
