"""Benchmarks of dep2p against its peers, in the same run: ``python -m bench NAME [--quick] [--json]``."""
