"""Generation: sampling, the two decode loops, and results."""

from gdnjax.generation.collect import GenerationResult, StreamCallback
from gdnjax.generation.generate import NonFiniteLogitsError, Request, generate
from gdnjax.generation.sampling import SamplingParams

__all__ = ["GenerationResult", "NonFiniteLogitsError", "Request", "SamplingParams", "StreamCallback", "generate"]
