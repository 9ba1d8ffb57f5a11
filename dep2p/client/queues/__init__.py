"""Queues through the daemon: their calls, and the messages that a consumer takes."""
