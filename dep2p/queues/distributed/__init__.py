"""Queues whose partitions are on several nodes: their controller and their users."""
