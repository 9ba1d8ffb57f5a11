"""The benchmarks of messages between two nodes: rates, dialing, memory."""
