"""Peer scores and the gater."""
