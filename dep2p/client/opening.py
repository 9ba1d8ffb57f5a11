"""Finds the daemon that a program means. The one place of the client that reads the process's environment."""

import os

from dep2p.client.reconnection.outages import ReconnectBounds
from dep2p.client.tls import TlsTrust
from dep2p.client.transport import Transport
from dep2p.config.target import DaemonTarget, TargetArguments, find_daemon


def transport_to(given: TargetArguments, bounds: ReconnectBounds | None = None) -> Transport:
    """Return the transport to the daemon that arguments, environment and contexts say. Raises ConfigError."""
    return transport_for(find_daemon(given, os.environ), bounds)


def transport_for(target: DaemonTarget, bounds: ReconnectBounds | None = None) -> Transport:
    """Return the transport to a daemon that is known. Raises ConfigError."""
    trust = TlsTrust(target.fingerprint, target.ca_file) if target.is_tls else None
    transport = Transport(target.socket, target.tcp or None, target.token or None, trust, bounds)
    if target.origin != "default" and not target.origin.startswith("argument"):
        transport.where += f" ({target.origin})"
    return transport
