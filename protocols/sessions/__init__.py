"""Ordered sessions: pushes of a server to a client in strict order across reconnects. Pure (docs/spec/session.md)."""
