"""Measurements on the device at hand. Every figure is a ratio to a copy in the same run."""
