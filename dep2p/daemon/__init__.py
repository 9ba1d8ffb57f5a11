"""The process: its lock, logs, signals and drain."""
