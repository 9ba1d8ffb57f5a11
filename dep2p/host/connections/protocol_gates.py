"""Protocols that a host shows to some of its peers only, in identify and in the negotiation of streams."""

from collections.abc import Iterator, Mapping

from dep2p.host.interface import Connection, ProtocolGate, StreamHandler

_HIDDEN_PREFIXES = ("/dep2p/app/", "/dep2p/realm/")
"""Names that are refused only after a wait: protocols of realms, those that exist and those that do not alike."""


class ProtocolGates:
    """The handlers of a host as each connection may see them."""

    def __init__(self, handlers: Mapping[str, StreamHandler]) -> None:
        self._handlers = handlers
        self._gates: dict[str, ProtocolGate | None] = {}

    def restrict(self, part: str, gate: ProtocolGate | None) -> None:
        """Show protocols whose id contains ``part`` where ``gate`` is open; None: nowhere."""
        self._gates[part] = gate

    def is_restricted(self, protocol: str) -> bool:
        """Whether some connections do not see the protocol."""
        return any(part in protocol for part in self._gates)

    def is_open(self, protocol: str, connection: Connection) -> bool:
        """Whether the connection sees the protocol, if there is one of that name."""
        return all(
            gate is not None and gate.is_open(connection) for part, gate in self._gates.items() if part in protocol
        )

    async def wait(self, protocol: str, connection: Connection) -> None:
        """Before a protocol is refused: its gate may be about to open, since streams overtake each other on QUIC.

        The wait is the same for names that exist and for those that do not.
        """
        if protocol.startswith(_HIDDEN_PREFIXES):
            for gate in list(self._gates.values()):
                if gate is not None:
                    await gate.wait_for_attempt(connection)

    def seen_by(self, connection: Connection) -> "SeenProtocols":
        """The protocols that the connection sees."""
        return SeenProtocols(self, self._handlers, connection)


class SeenProtocols:
    """The names of the protocols that one connection sees, at any moment."""

    def __init__(self, gates: ProtocolGates, handlers: Mapping[str, StreamHandler], connection: Connection) -> None:
        self._gates = gates
        self._handlers = handlers
        self._connection = connection

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._handlers and self._gates.is_open(name, self._connection)

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._handlers) if self._gates.is_open(name, self._connection))
