"""Gated delta rule, one token a row: reads a recurrent slot, writes a recurrent slot."""
