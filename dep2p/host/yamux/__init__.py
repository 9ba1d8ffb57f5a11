"""yamux."""
