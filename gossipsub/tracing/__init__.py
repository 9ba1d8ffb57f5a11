"""The trace events of the router."""
