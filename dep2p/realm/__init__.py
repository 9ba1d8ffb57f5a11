"""Realm membership in use: key files, handshakes, the member table."""
