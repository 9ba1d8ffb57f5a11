"""Reading a peer's clock: the four times of an exchange, as in NTP (RFC 5905 section 8). Wire: docs/spec/trace.md."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from dep2p.errors import ProtocolError

ASK_BYTES: Final = 8
ANSWER_BYTES: Final = 24
ROUNDS: Final = 4
"""Exchanges for one reading: the quickest counts."""
ROUNDS_MAX: Final = 16
"""Exchanges that are answered on one stream."""
_US_MAX: Final = 1 << 53


class ClockExchange(NamedTuple):
    """Times in µs: asked and answered by the asker's clock, received and sent by the peer's."""

    asked_us: int
    received_us: int
    sent_us: int
    answered_us: int

    @property
    def rtt_us(self) -> int:
        """The time on the way, both ways, in µs."""
        return max(0, (self.answered_us - self.asked_us) - (self.sent_us - self.received_us))

    @property
    def offset_us(self) -> int:
        """How far the peer's clock is ahead, in µs, when both ways take the same time."""
        return ((self.received_us - self.asked_us) + (self.sent_us - self.answered_us)) // 2

    @property
    def error_us(self) -> int:
        """The largest error of the offset in µs: one way took all the time, the other none."""
        return (self.rtt_us + 1) // 2


def best(exchanges: Sequence[ClockExchange]) -> ClockExchange:
    """Return the quickest exchange, which has the smallest error. At least one is needed."""
    return min(exchanges, key=lambda exchange: exchange.rtt_us)


def encode_ask(asked_us: int) -> bytes:
    """Encode the asker's time."""
    return asked_us.to_bytes(ASK_BYTES, "big")


def encode_answer(ask: bytes, received_us: int, sent_us: int) -> bytes:
    """Encode the ask as it came, the time of its arrival, and the time of the answer."""
    return ask + received_us.to_bytes(8, "big") + sent_us.to_bytes(8, "big")


def decode_answer(answer: bytes, asked_us: int, answered_us: int) -> ClockExchange:
    """Return the exchange that an answer completes. Raises `ProtocolError` for an answer that cannot be one."""
    if len(answer) != ANSWER_BYTES or int.from_bytes(answer[:8], "big") != asked_us:
        raise ProtocolError("an answer of the peer's clock to something that was not asked")
    received_us, sent_us = int.from_bytes(answer[8:16], "big"), int.from_bytes(answer[16:], "big")
    if not received_us <= sent_us < _US_MAX:
        raise ProtocolError("times of the peer's clock that cannot be")
    return ClockExchange(asked_us, received_us, sent_us, answered_us)
