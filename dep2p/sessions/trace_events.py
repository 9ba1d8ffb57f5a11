"""Events of ordered sessions, at either end. Pushes are recorded in runs: those of one write or one read."""

from typing import Final

from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.server import ServerSession
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId

_REASON_CHARS_MAX: Final = 200


class SessionTrace:
    """The trace events of one session, while a trace is on. Session ids are the same at both ends."""

    def __init__(
        self, log: TraceLog, session_id: str, peer: PeerId, side: str, core: ServerSession | ClientSession
    ) -> None:
        """``side``: ``out`` at the client, ``in`` at the server. Earlier events are not recorded."""
        self._log = log
        self._of = (session_id, peer, side)
        self._is_over = False
        self._sent = self._again = self._handled = self._received = 0
        if isinstance(core, ClientSession):
            self._received = core.receiver.received
        else:
            self._sent, self._again = core.sender.last_sent, core.sender.retransmitted_items
            self._handled = core.sender.handled

    def put(
        self,
        state: str,
        *,
        epoch: int | None = None,
        position: int | None = None,
        count: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Record a change of the session's state."""
        log = self._log
        text = reason[:_REASON_CHARS_MAX] if reason else None
        # Epochs are 64 bits without a sign; columns have one.
        signed = None if epoch is None else epoch - (1 << 64) if epoch >> 63 else epoch
        log.put(schema.SessionTraceEvent(V, log.node, 0, log.t_us(), *self._of, state, signed, position, count, text))

    def end(self, *, failed: bool, position: int, reason: str | None) -> None:
        """Record the end, once."""
        if not self._is_over:
            self._is_over = True
            self.put("failed" if failed else "closed", position=position, reason=reason)

    def written(self, core: ServerSession) -> None:
        """Record pushes that the server's core has given to the writer."""
        sender = core.sender
        if sender.retransmitted_items > self._again:
            count, self._again = sender.retransmitted_items - self._again, sender.retransmitted_items
            self.put("resent", position=sender.sent, count=count)
        if sender.last_sent > self._sent:
            count, self._sent = sender.last_sent - self._sent, sender.last_sent
            self.put("sent", position=sender.last_sent, count=count)

    def acknowledged(self, core: ServerSession) -> None:
        """Record acknowledgements: the pushes that the client's app has handled."""
        handled = core.sender.handled
        if handled > self._handled:
            count, self._handled = handled - self._handled, handled
            self.put("acknowledged", position=handled, count=count)

    def read(self, core: ClientSession) -> None:
        """Record pushes that came from the server, in order."""
        received = core.receiver.received
        if received > self._received:
            self.put("received", position=received, count=received - self._received)
        self._received = received  # after a reset it is less
