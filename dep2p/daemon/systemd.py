"""Reports to systemd, or another manager with its protocol, that the daemon is ready or stops: sd_notify(3) without its
library."""

import logging
import socket

_logger = logging.getLogger("dep2p.daemon")


def notify(address: str, message: str) -> bool:
    """Send ``message`` (``READY=1``) to the socket in ``address``; nothing when it is empty. Never raises."""
    if not address:
        return False
    if address[0] not in "/@":
        _logger.warning("the service manager's socket has an unknown form", extra={"address": address})
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto(message.encode("utf-8"), target)
    except OSError as error:
        _logger.warning("the service manager cannot be notified", extra={"reason": str(error), "notice": message})
        return False
    return True
