"""Gated delta rule over many tokens at once, in chunks."""
