"""Both sides of one exchange of /libp2p/dcutr, as state machines: messages in; out messages and when to dial. Pure.

B is the side that the relayed connection came in at: it asks. A answers. Both tell their addresses, and B measures the
round trip meanwhile. Then B sends SYNC and dials half a round trip later, A dials when SYNC arrives: at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dep2p.errors import ProtocolError
from dep2p.protocols.hole_punching.messages import HolePunch, MessageType

RTT_MAX_S: Final = 8.0
"""A slower peer is not synchronised with."""


@dataclass(frozen=True, slots=True)
class DialTogether:
    """Dial ``addrs`` (multiaddrs in binary, not checked) after ``wait_s`` seconds."""

    addrs: tuple[bytes, ...]
    wait_s: float


class Asking:
    """The side of B.

    Example::

        asking = Asking(own_addrs, now_s=now)
        send(asking.connect)
        dial = asking.answered(receive(), now_s=now)
        send(asking.sync)
    """

    def __init__(self, own: Sequence[bytes], *, now_s: float) -> None:
        """``own``: the multiaddrs at which others see this node. ``now_s``: the time at which `connect` is sent."""
        self.connect: HolePunch = HolePunch(MessageType.CONNECT, tuple(own))
        self.sync: HolePunch = HolePunch(MessageType.SYNC)
        self._asked_s = now_s

    def answered(self, answer: HolePunch, *, now_s: float) -> DialTogether:
        """Take the answer. Raises ProtocolError when it is none, names no address, or came too late."""
        if answer.type is not MessageType.CONNECT:
            raise ProtocolError("the peer answered a CONNECT of hole punching with something else")
        rtt_s = now_s - self._asked_s
        if rtt_s > RTT_MAX_S:
            raise ProtocolError(f"the round trip over the relay takes {rtt_s:.1f} s: too long to dial at one time")
        if not answer.addrs:
            raise ProtocolError("the peer knows no address of its own")
        return DialTogether(answer.addrs, rtt_s / 2)


class Answering:
    """The side of A. `receive` takes CONNECT, then SYNC."""

    def __init__(self, own: Sequence[bytes]) -> None:
        self._own = tuple(own)
        self._asked: tuple[bytes, ...] | None = None

    def receive(self, message: HolePunch) -> HolePunch | DialTogether:
        """Return the answer to send, or what to dial at once. Raises ProtocolError."""
        if self._asked is None:
            if message.type is not MessageType.CONNECT:
                raise ProtocolError("hole punching begins with a CONNECT")
            if not message.addrs:
                raise ProtocolError("a CONNECT of hole punching names no address")
            self._asked = message.addrs
            return HolePunch(MessageType.CONNECT, self._own)
        if message.type is not MessageType.SYNC:
            raise ProtocolError("a CONNECT of hole punching is followed by a SYNC")
        return DialTogether(self._asked, 0.0)
