"""The process: lock, signals, drain, control API, metrics."""
