"""Queues in Redis."""
