"""A requester and a responder to be tested, and frames between them."""

from dep2p.limits import Limits
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.messaging.request import Abandon, Begin, Job, Requester, RequestPolicy, Responder, SendAnswer
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameDecoder, FrameType
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from dep2p.protocols.wire.payload import PayloadReader

LIMITS = Limits(handlers_per_peer_max=3, message_bytes_max=1_000)


def one_frame(data: bytes) -> Frame:
    (frame,) = FrameDecoder(100_000).feed(data)
    return frame


def requester(last_id: int = 0, in_flight_max: int = 10) -> Requester[str]:
    return Requester(PayloadReader(LIMITS, None), in_flight_max=in_flight_max, last_id=last_id)


def responder(limits: Limits = LIMITS, load: PeerLoad | None = None) -> Responder:
    policies = {"echo": RequestPolicy(), "slow": RequestPolicy(rate_per_s=1.0)}
    return Responder(
        PayloadReader(limits, None), policies, load or PeerLoad(limits), default_timeout_s=limits.request_timeout_s
    )


def request_frame(
    req_id: int, name: str = "echo", body: bytes = b"", timeout_ms: int | None = 1_000, flags: int = 0
) -> Frame:
    own: dict[int, object] = {HeaderKey.NAME: name}
    if timeout_ms is not None:
        own[HeaderKey.TIMEOUT_MS] = timeout_ms
    return Frame(FrameType.REQUEST, HEADERS | flags, req_id, encode_headers(own) + body)


def response(req_id: int, body: bytes = b"", flags: int = 0) -> Frame:
    return Frame(FrameType.RESPONSE, flags, req_id, body)


def begun(effects: list[Begin | Abandon | SendAnswer]) -> list[Job]:
    assert all(isinstance(effect, Begin) for effect in effects)
    return [effect.job for effect in effects if isinstance(effect, Begin)]
