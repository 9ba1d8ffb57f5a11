"""Durable queues on trio; at this level the parts that all sub-packages share."""
