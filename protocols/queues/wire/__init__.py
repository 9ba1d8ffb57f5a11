"""The frames of the queue protocol."""
