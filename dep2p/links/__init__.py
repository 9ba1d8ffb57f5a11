"""Pooled streams that speak frames: the link, its pool, the batching writer, the pulled writer."""
