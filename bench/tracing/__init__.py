"""The cost of tracing, and traces recorded from live daemons."""
