"""Bounds on the memory and the work that peers cause: scopes as in go-libp2p's resource manager, without I/O."""
