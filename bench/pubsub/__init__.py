"""The benchmarks of pub/sub, on nodes and in the simulator."""
