"""Finding where two runs part (`GDNJAX_TRACE`) and which kernel writes where it should not (`GDNJAX_GUARD`)."""
