"""The node that stores a queue: engine, commits, consumers, administration, ownership of the store."""
