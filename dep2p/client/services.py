"""The client's calls about services."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Unpack
from urllib.parse import quote

from msgspec import UNSET

from dep2p.arguments import checks_arguments
from dep2p.client.models import realm_text
from dep2p.client.transport import Transport
from dep2p.control_api.calls import RequestAny, base64_text
from dep2p.control_api.encoding import encode_headers
from dep2p.control_api.errors import error_from_problem
from dep2p.control_api.replies import RequestReply, ServiceAnswer, ServiceAnswers, ServiceList, ServiceSummary
from dep2p.errors import Dep2pError
from dep2p.protocols.services.options import AnyOptions
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_LOOK_TIMEOUT_S: Final = 10.0
_INFO_TIMEOUT_S: Final = 60.0
_REQUEST_TIMEOUT_S: Final = 30.0
_MARGIN_S: Final = 10.0


@checks_arguments
class ServiceClientApi:
    """The part of :class:`dep2p.client.Client` about services."""

    _transport: Transport

    async def request_any(
        self, name: str, body: bytes, *, realm: "RealmChoice" = None, **options: Unpack[AnyOptions]
    ) -> bytes:
        """Ask any member that offers the service ``name``, and return its answer; see :meth:`dep2p.Node.request_any`.

        Raises ServiceNotFoundError, ServiceUnavailableError, RequestTimeoutError, StreamClosedError (each says who was
        tried), HandlerError, MessageTooLargeError, NotInRealmError.
        """
        given_s = options.get("timeout_s")
        timeout_s = _REQUEST_TIMEOUT_S if given_s is None else given_s
        headers = options.get("headers")
        call = RequestAny(
            data=base64_text(body),
            realm=realm_text(realm),
            headers=encode_headers(dict(headers)) if headers else None,
            timeout_s=timeout_s,
            idempotent=options.get("idempotent", False),
            group=options.get("group"),
            version=options.get("version"),
            schema=options.get("schema"),
        )
        path = f"/v1/services/{quote(name, safe='')}/requests"
        reply = await self._transport.ask(
            "POST", path, RequestReply, call, timeout_s=timeout_s + _MARGIN_S, repeatable=call.idempotent
        )
        return reply.data

    async def offered_services(self, *, realm: "RealmChoice" = None) -> Mapping[str, Sequence[ServiceSummary]]:
        """The services of a realm, by name, and the members that offer each. Raises NotInRealmError."""
        text = realm_text(realm)
        params = {} if text is None else {"realm": text}
        found = await self._transport.ask("GET", "/v1/services", ServiceList, params=params, timeout_s=_LOOK_TIMEOUT_S)
        by_name: dict[str, list[ServiceSummary]] = {}
        for each in found.services:
            by_name.setdefault(each.name, []).append(each)
        return by_name

    async def service_info(
        self, name: str, *, realm: "RealmChoice" = None
    ) -> Mapping[PeerId, ServiceAnswer | Dep2pError]:
        """Ask each member that offers the service for its metadata, counts and times; an answer or an error for each.

        Raises ServiceNotFoundError when no member offers it, NotInRealmError.
        """
        text = realm_text(realm)
        params = {} if text is None else {"realm": text}
        path = f"/v1/services/{quote(name, safe='')}"
        found = await self._transport.ask("GET", path, ServiceAnswers, params=params, timeout_s=_INFO_TIMEOUT_S)
        return {each.peer: each if each.error is UNSET else error_from_problem(each.error) for each in found.members}
