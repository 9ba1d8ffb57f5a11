"""Options of services, as keyword arguments of the node and of its client. Pure."""

from collections.abc import Mapping
from typing import TypedDict


class ServiceOptions(TypedDict, total=False):
    """The options that make a program's answers a service, as keyword arguments."""

    group: str
    """The programs that share the requests."""
    version: str
    """At most 32 bytes."""
    schema: str
    """The form of requests and answers, at most 128 bytes, such as a hash."""
    metadata: Mapping[str, str]
    """Shown by ``service_info``: at most 16 entries and 2,048 bytes."""


class AnyOptions(TypedDict, total=False):
    """The options of a request to any member, as keyword arguments."""

    timeout_s: float | None
    """Seconds for all tries together; None (the default) for 30."""
    idempotent: bool
    """Whether the request may be handled more than once."""
    headers: Mapping[str, object] | None
    """The app's headers, for the handler."""
    group: str | None
    """Ask only members that offer the service in this group."""
    version: str | None
    """Ask only members that offer this very version."""
    schema: str | None
    """Ask only members that offer this very schema."""
