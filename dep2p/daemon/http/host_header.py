"""The Host of a request: it separates calls of local programs from those that a web page made through a browser."""

from ipaddress import ip_address


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names this machine: localhost or a loopback address, with or without a port.

    A page of another site reaches a loopback port through its reader's browser when its own name resolves to 127.0.0.1;
    the Host then is the site's name. Browsers always send a Host, so that an empty one, as of HTTP/1.0, is allowed.
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host
    name = name.removeprefix("[").removesuffix("]")
    try:
        return not host or name.lower() == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
