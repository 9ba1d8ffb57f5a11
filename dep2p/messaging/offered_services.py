"""The services that this node offers in one realm: handlers in groups, their turns and their counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import time

import trio

from dep2p.arguments import WrongTypeError, check_text
from dep2p.messaging.handlers import HandlerGoneError, Registry, RequestHandler
from dep2p.protocols.messaging.incoming import Request
from dep2p.protocols.realm.statement import ServiceOffer, check_offer, check_offers
from dep2p.protocols.services.info import RESERVED_PREFIX, ServiceInfo, ServiceTimes, check_metadata
from dep2p.protocols.services.options import ServiceOptions
from dep2p.protocols.services.turns import ProgramTurns


@dataclass(frozen=True, slots=True)
class OfferedService:
    """A service of this node, as each of its handlers describes it."""

    offer: ServiceOffer
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


def offered_service(name: str, options: ServiceOptions) -> OfferedService | None:
    """Return the service that the options of a handler describe; None for a handler that is none.

    Raises ``ValueError`` for a text that is too long, and for options without a group.
    """
    group = options.get("group")
    if group is None:
        if options:
            raise ValueError(f"{', '.join(options)} of {name!r}: only a service has these, so give its group, too")
        return None
    for option in ("group", "version", "schema"):
        check_text(options.get(option, ""), option)
    metadata = options.get("metadata", {})
    if not isinstance(metadata, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongTypeError(f"metadata must be a dict of texts, not {type(metadata).__name__}")
    for key, value in metadata.items():
        check_text(key, "a key of metadata")
        check_text(value, "a value of metadata")
    offer = ServiceOffer(name, group, options.get("version", ""), options.get("schema", ""))
    check_offer(offer)
    check_metadata(dict(metadata))
    return OfferedService(offer, dict(metadata))


@dataclass(frozen=True, slots=True, eq=False)
class ServiceHandler:
    """One handler of a service."""

    fn: RequestHandler
    concurrency: int
    rate_per_s: float
    waiting_max: int


class _ServiceGroup:
    """The handlers of one service on this node."""

    def __init__(self, service: OfferedService) -> None:
        self.service = service
        self.turns: ProgramTurns[ServiceHandler] = ProgramTurns()
        self.times = ServiceTimes()
        self.since_s = time()
        self.unregister: Callable[[], None] = lambda: None

    async def answer(self, request: Request) -> bytes:
        """Give a request to the handler whose turn it is; to another one when that is gone and it does no harm."""
        while (handler := self.turns.take()) is not None:
            began = trio.current_time()
            self.times.requests += 1
            try:
                answer = await handler.fn(request)
            except HandlerGoneError as error:
                self.times.errors += 1
                self.turns.remove(handler)
                if (error.has_begun and not request.idempotent) or not len(self.turns):
                    raise
            except Exception:
                self.times.errors += 1
                raise
            else:
                self.times.answered(trio.current_time() - began)
                return answer
            finally:
                self.turns.done(handler)
        raise HandlerGoneError("no program answers any more", has_begun=False)

    def info(self) -> ServiceInfo:
        """Describe the service."""
        offer, times = self.service.offer, self.times
        return ServiceInfo(
            name=offer.name,
            group=offer.group,
            version=offer.version,
            schema=offer.schema,
            metadata=dict(self.service.metadata),
            programs=len(self.turns),
            since_s=self.since_s,
            requests=times.requests,
            errors=times.errors,
            in_flight=self.turns.jobs,
            mean_ms=times.mean_ms,
            p99_ms=times.p99_ms,
        )


class OfferedServices:
    """The services of one realm's messaging."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._groups: dict[str, _ServiceGroup] = {}
        self._announce: Callable[[tuple[ServiceOffer, ...]], None] = lambda _offers: None
        self._is_withdrawn = False

    def announce_by(self, announce: Callable[[tuple[ServiceOffer, ...]], None]) -> None:
        """Call ``announce`` with all offers whenever they change. It may raise ``ValueError`` for too many of them."""
        self._announce = announce
        self._changed()

    def withdraw(self) -> None:
        """Offer nothing any more, though the handlers stay: this node is about to stop."""
        self._is_withdrawn = True
        self._changed()

    def offer(self, name: str) -> ServiceOffer | None:
        """Return this node's own offer of a service."""
        group = None if self._is_withdrawn else self._groups.get(name)
        return None if group is None else group.service.offer

    def offers(self) -> tuple[ServiceOffer, ...]:
        """Return all offers of this node."""
        return () if self._is_withdrawn else tuple(group.service.offer for group in self._groups.values())

    def infos(self, name: str = "") -> tuple[ServiceInfo, ...]:
        """Describe this node's services, or the one of that name."""
        return tuple(group.info() for own, group in self._groups.items() if name in ("", own))

    def add(self, service: OfferedService, handler: ServiceHandler) -> Callable[[], None]:
        """Add a handler of a service; return a function that removes it.

        Raises ``ValueError`` when the name has another handler or another group, version, schema or metadata here, or
        when this node offers too much.
        """
        name = service.offer.name
        if name.startswith(RESERVED_PREFIX):
            raise ValueError(f"{name!r}: names that begin with {RESERVED_PREFIX!r} are dep2p's own")
        if handler.concurrency < 1:
            raise ValueError(f"concurrency of {name!r} is {handler.concurrency}: it must be at least 1")
        group = self._groups.get(name)
        if group is None:
            check_offers(sorted([*self.offers(), service.offer]), ())
            group = _ServiceGroup(service)
        elif group.service != service:
            raise ValueError(
                f"this node offers {name!r} as {_described(group.service)} already: another handler of it must say "
                "the same"
            )
        group.turns.add(handler, handler.concurrency)
        is_new = name not in self._groups
        try:
            self._register(name, group, handler)
            self._groups[name] = group
            if is_new:
                self._changed()
        except BaseException:
            self._remove(name, group, handler)
            raise
        return lambda: self._remove(name, group, handler)

    def _register(self, name: str, group: _ServiceGroup, handler: ServiceHandler) -> None:
        """Register the group's handler with the places of all; those that wait in the old line stay there."""
        group.unregister()
        group.unregister = self._registry.on_request(
            name,
            group.answer,
            concurrency=max(1, group.turns.places),
            rate_per_s=handler.rate_per_s,
            waiting_max=handler.waiting_max,
        )

    def _remove(self, name: str, group: _ServiceGroup, handler: ServiceHandler) -> None:
        group.turns.remove(handler)
        if len(group.turns):
            self._register(name, group, handler)
        elif self._groups.get(name) is group:
            del self._groups[name]
            group.unregister()
            self._changed()
        else:
            group.unregister()

    def _changed(self) -> None:
        self._announce(tuple(sorted(self.offers())))


def _described(service: OfferedService) -> str:
    offer = service.offer
    said = [f"group {offer.group!r}"]
    said += [f"version {offer.version!r}"] if offer.version else []
    said += [f"schema {offer.schema!r}"] if offer.schema else []
    said += ["metadata of its own"] if service.metadata else []
    return ", ".join(said)
