"""Continuous batching: many requests, arriving and ending at any moment, on one state."""

from gdnjax.engine.door import QueueFull
from gdnjax.engine.engine import Engine
from gdnjax.engine.handle import Handle, Piece, Usage

__all__ = ["Engine", "Handle", "Piece", "QueueFull", "Usage"]
