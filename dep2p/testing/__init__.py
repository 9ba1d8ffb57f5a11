"""Public test tools: an in-memory network and fault injection."""
