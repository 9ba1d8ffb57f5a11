"""Services of one realm: requests to any member that offers them, and what members say of those that they offer."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import trio

from dep2p.arguments import as_bytes
from dep2p.errors import (
    Dep2pError,
    HandlerError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolNotSupportedError,
    RateLimitedError,
    RequestTimeoutError,
    ServiceNotFoundError,
    ServiceUnavailableError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.messaging.broadcast import to_each
from dep2p.messaging.context import MessageCall
from dep2p.messaging.service import Messaging
from dep2p.outside_text import one_line
from dep2p.protocols.messaging.incoming import Request
from dep2p.protocols.messaging.retry import RetryPolicy
from dep2p.protocols.realm.statement import ServiceOffer
from dep2p.protocols.services.choice import Failure, MemberChoice, MemberStanding
from dep2p.protocols.services.info import INFO_NAME, ServiceInfo, ServiceInfos, decode_infos, encode_infos
from dep2p.protocols.services.options import AnyOptions
from dep2p.protocols.wire.payload import check_name
from dep2p.realm.membership import Membership
from dep2p.types import PeerId, Rng

CONNECTED_ENOUGH: Final = 8
"""Connected members that offer a service, below which this node connects to further ones that do."""
REACH_OUT_INTERVAL_S: Final = 5.0
"""Seconds between two such attempts."""
INFO_TIMEOUT_S: Final = 5.0
INFO_CONCURRENCY: Final = 8
INFO_RATE_PER_S: Final = 20.0
TRIES_MAX: Final = 16
"""Members that one request tries in a round: those that claim what they do not have cost no more."""
_TRIED_SHOWN_MAX: Final = 8

_logger = logging.getLogger("dep2p.services")

_SURELY_NOT_RUN: Final[tuple[Failure, ...]] = ("absent", "unreachable", "busy")
"""Failures after which no handler can have run, so that every request may go to another member."""


def failure_of(error: Dep2pError) -> Failure | None:
    """Return how a try failed; None for what another member would answer, too.

    A request that was sent may have run when its link ended, also when the link ended with the membership.
    """
    match error:
        case NoHandlerError() | ProtocolNotSupportedError():
            return "absent"
        case OverloadedError() | RateLimitedError():
            return "busy"
        case NotMemberError():
            return "absent" if error.is_unsent else "lost"
        case PeerNotFoundError():
            return "unreachable"
        case _ if error.is_unsent:
            return "unreachable"
        case RequestTimeoutError():
            return "silent"
        case StreamClosedError():
            return "lost"
        case _:
            return None


@dataclass(frozen=True, slots=True)
class AnyCall:
    """A request to any member."""

    name: str
    body: bytes
    timeout_s: float
    idempotent: bool = False
    headers: Mapping[str, object] | None = None
    group: str | None = None
    version: str | None = None
    schema: str | None = None

    def fits(self, offer: ServiceOffer) -> bool:
        """Whether a member's offer is what the caller wants."""
        return (
            (self.group is None or offer.group == self.group)
            and (self.version is None or offer.version == self.version)
            and (self.schema is None or offer.schema == self.schema)
        )

    def described(self) -> str:
        """Return the service that is wanted, for errors."""
        wanted = [("group", self.group), ("version", self.version), ("schema", self.schema)]
        said = [f"{what} {value!r}" for what, value in wanted if value is not None]
        return f"{self.name!r}" + (f" with {', '.join(said)}" if said else "")


@dataclass(frozen=True, slots=True)
class AnyAnswer:
    """The answer of the member that was chosen."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class ServiceMember:
    """A member that offers a service, and this node's experience with it."""

    peer: PeerId
    offer: ServiceOffer
    is_connected: bool
    standing: MemberStanding | None


@dataclass(frozen=True, slots=True)
class ServiceMemberInfo:
    """A member's words about its services, and the time that its answer took."""

    services: tuple[ServiceInfo, ...]
    rtt_s: float


class MemberServices:
    """The services of one realm, as this node uses them; and its answers to those that ask what it offers."""

    def __init__(self, messaging: Messaging, membership: Membership, limits: Limits, own: PeerId, *, rng: Rng) -> None:
        self._messaging = messaging
        self._membership = membership
        self._limits = limits
        self._own = own
        self._choice = MemberChoice(rng)
        self._retry = RetryPolicy(limits, rng)
        self._rng = rng
        self._counts: Counter[str] = Counter()
        self._nursery: trio.Nursery | None = None
        self._reach_out_at = float("-inf")

    # RealmService

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        unregister = self._messaging.on_request(
            INFO_NAME, self._answer_infos, concurrency=INFO_CONCURRENCY, rate_per_s=INFO_RATE_PER_S
        )
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            unregister()

    async def drain(self) -> None:
        """Offer nothing any more. Messaging refuses requests that still come; their callers try other members."""
        self._messaging.offered.withdraw()
        await trio.lowlevel.checkpoint()

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counts)

    def stats(self) -> object:
        """Return the number of services known, and of members remembered."""
        return {"known": len(self._membership.offers.services()), "standings": len(self._choice)}

    async def _answer_infos(self, request: Request) -> bytes:
        try:
            name = request.body.decode("utf-8")
        except UnicodeDecodeError:
            raise HandlerError("the name of a service is text in UTF-8") from None
        await trio.lowlevel.checkpoint()
        return encode_infos(ServiceInfos(services=self._messaging.offered.infos(name)))

    # Who offers what

    def names(self) -> list[str]:
        """The names of all services that a member offers, this node's own included."""
        own = (offer.name for offer in self._messaging.offered.offers())
        return sorted({*self._membership.offers.services(), *own})

    def members(self, name: str) -> list[ServiceMember]:
        """The members that offer a service."""
        now = trio.current_time()
        return [
            ServiceMember(peer, offer, self._is_connected(peer), self._choice.standing(name, peer, now))
            for peer, offer in self._offers(name).items()
        ]

    def _offers(self, name: str) -> dict[PeerId, ServiceOffer]:
        """The offers of a service: this node's own as they are, those of others as their records say."""
        offers = dict(self._membership.offers.offers(name))
        offers.pop(self._own, None)
        own = self._messaging.offered.offer(name)
        if own is not None:
            offers[self._own] = own
        return offers

    def _is_connected(self, peer: PeerId) -> bool:
        return self._membership.verified_connection(peer) is not None

    # Requests

    async def request_any(self, name: str, body: bytes, options: AnyOptions) -> AnyAnswer:
        """See `Node.request_any`."""
        check_name(name)
        timeout_s = options.get("timeout_s")
        timeout_s = self._limits.request_timeout_s if timeout_s is None else timeout_s
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}: it cannot be negative")
        call = AnyCall(
            name,
            as_bytes(body, "the message"),
            timeout_s,
            options.get("idempotent", False),
            options.get("headers"),
            options.get("group"),
            options.get("version"),
            options.get("schema"),
        )
        self._counts["requests"] += 1
        return await _AnyRequest(self, call).run()

    def candidates(self, call: AnyCall) -> list[PeerId]:
        """The members that offer what a caller wants; the connected ones only, if there are any."""
        fitting = [peer for peer, offer in self._offers(call.name).items() if call.fits(offer)]
        connected = [peer for peer in fitting if self._is_connected(peer)]
        if len(connected) < min(len(fitting), CONNECTED_ENOUGH):
            self._reach_out([peer for peer in fitting if peer not in connected])
        return connected or fitting

    def _reach_out(self, peers: list[PeerId]) -> None:
        """Connect to one further member, for the requests that follow: this one does not wait for a dial."""
        now = trio.current_time()
        if self._nursery is not None and now >= self._reach_out_at:
            self._reach_out_at = now + REACH_OUT_INTERVAL_S
            self._nursery.start_soon(self._connect, peers[int(self._rng.random() * len(peers))])

    async def _connect(self, peer: PeerId) -> None:
        self._counts["reached_out"] += 1
        try:
            await self._membership.connect(peer)
        except Dep2pError as error:
            _logger.debug("%s offers a service and is not reached: %s", peer, one_line(str(error)))

    async def try_one(self, call: AnyCall, candidates: list[PeerId], timeout_s: float) -> "AnyAnswer | _FailedTry":
        """Choose a member and ask it. Raises what is an answer: HandlerError, and errors of the request itself."""
        choice, name = self._choice, call.name
        peer = choice.choose(name, candidates, trio.current_time())
        choice.began(name, peer)
        began = trio.current_time()
        try:
            once = MessageCall(name, call.body, max(0.0, timeout_s), call.idempotent, call.headers, is_one_try=True)
            data = await self._messaging.request_once(peer, once)
        except HandlerError:
            choice.answered(name, peer, trio.current_time() - began, trio.current_time(), is_error=True)
            raise
        except Dep2pError as error:
            failure = failure_of(error)
            if failure is None:
                choice.given_up(name, peer)
                raise
            avoid_s = error.retry_after_ms / 1000 if isinstance(error, RateLimitedError) else 0.0
            choice.failed(name, peer, failure, trio.current_time(), avoid_s=avoid_s)
            self._counts[f"tries_failed_{failure}"] += 1
            return _FailedTry(peer, failure, error)
        except BaseException:
            choice.given_up(name, peer)
            raise
        choice.answered(name, peer, trio.current_time() - began, trio.current_time())
        return AnyAnswer(peer, data)

    def retry_delay_s(self, error: Exception, tries: int) -> float | None:
        """Seconds until a further round of tries; None: there is none."""
        return self._retry.delay_s(error, tries)

    # What members say of their services

    async def infos(self, name: str) -> dict[PeerId, ServiceMemberInfo | Dep2pError]:
        """Ask each member that offers a service what it says of it; an answer or an error for each.

        Raises ServiceNotFoundError when none offers it.
        """
        check_name(name)
        peers = list(self._offers(name))
        if not peers:
            raise ServiceNotFoundError(f"no member of the realm {self._realm_name!r} offers {name!r}")

        async def ask(peer: PeerId) -> ServiceMemberInfo:
            began = trio.current_time()
            data = await self._messaging.request(peer, INFO_NAME, name.encode("utf-8"), timeout_s=INFO_TIMEOUT_S)
            return ServiceMemberInfo(decode_infos(data).services, trio.current_time() - began)

        return await to_each(peers, ask, 16)

    @property
    def _realm_name(self) -> str:
        return self._membership.realm.name

    def not_offered(self, call: AnyCall) -> ServiceNotFoundError:
        """Return the error of a service that no member offers."""
        others = {offer for offer in self._offers(call.name).values() if not call.fits(offer)}
        text = f"no member of the realm {self._realm_name!r} offers {call.described()}"
        if others:
            known = ", ".join(
                one_line(f"group {offer.group!r} version {offer.version!r} schema {offer.schema!r}")
                for offer in sorted(others)[:_TRIED_SHOWN_MAX]
            )
            text += f"; there is {known}"
        return ServiceNotFoundError(text)


@dataclass(frozen=True, slots=True)
class _FailedTry:
    peer: PeerId
    failure: Failure
    error: Dep2pError


class _AnyRequest:
    """One request: tries at members, each at most once in a round, until one answers."""

    def __init__(self, services: MemberServices, call: AnyCall) -> None:
        self._services = services
        self._call = call
        self._deadline = trio.current_time() + call.timeout_s
        self._failed: list[_FailedTry] = []
        self._in_round: dict[PeerId, None] = {}
        self._rounds = 0

    async def run(self) -> AnyAnswer:
        services, call = self._services, self._call
        while True:
            candidates = services.candidates(call)
            left = [peer for peer in candidates if peer not in self._in_round]
            if not candidates and not self._failed:
                raise services.not_offered(call)
            if not left or len(self._in_round) >= TRIES_MAX:
                await self._wait_for_round()
                continue
            result = await services.try_one(call, left, self._try_timeout_s(len(left)))
            if isinstance(result, AnyAnswer):
                return result
            self._failed.append(result)
            self._in_round[result.peer] = None
            if not call.idempotent and result.failure not in _SURELY_NOT_RUN:
                raise self._error()
            if trio.current_time() >= self._deadline:
                raise self._error()
            _logger.debug("request %r to any member is tried again: %s", call.name, one_line(str(result.error)))

    def _try_timeout_s(self, left: int) -> float:
        """Half of the time that is left, while another member could answer the request if this one does not."""
        left_s = self._deadline - trio.current_time()
        return left_s / 2 if self._call.idempotent and left > 1 and left_s < math.inf else left_s

    async def _wait_for_round(self) -> None:
        last = self._failed[-1].error
        self._rounds += 1
        delay_s = self._services.retry_delay_s(_retriable(last), self._rounds)
        if delay_s is None or trio.current_time() + delay_s >= self._deadline:
            raise self._error()
        self._in_round.clear()
        await trio.sleep(delay_s)

    def _error(self) -> Dep2pError:
        last = self._failed[-1]
        tried = "; ".join(f"{each.peer}: {each.error}" for each in self._failed[-_TRIED_SHOWN_MAX:])
        text = f"no member answered {self._call.described()}; tried {len(self._failed)}: {one_line(tried)}"
        match last.failure:
            case "silent":
                return RequestTimeoutError(text)
            case "lost":
                return StreamClosedError(text)
            case _:
                return ServiceUnavailableError(text)


def _retriable(error: Dep2pError) -> Exception:
    """Every failure of a round may heal: a member that is away now, or has no handler now, may be back."""
    return error if isinstance(error, RateLimitedError) else OverloadedError(str(error))
