"""The Prometheus metrics."""
