"""Weights: their declaration, initial values, packing for products, and files."""
