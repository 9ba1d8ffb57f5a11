"""The benchmarks of queues, and their crash test."""
