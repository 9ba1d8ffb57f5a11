"""Realm keys, the handshake, member records and the member table. Pure."""
