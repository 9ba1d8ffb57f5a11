"""Membership of a realm in use: credentials, handshakes, member links."""
