"""The client's calls about members: what they say about themselves, and how they change."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from dep2p.arguments import checks_arguments
from dep2p.client.models import NoticingEventStream, line_or_lag, realm_text
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.transport import Transport
from dep2p.control_api.calls import SetFields
from dep2p.control_api.encoding import fields_of
from dep2p.control_api.replies import MemberEventLine, MemberFields
from dep2p.gossipsub.topic_types import Lagged
from dep2p.protocols.realm.member_update import MemberChange, MemberUpdate

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_LOOK_TIMEOUT_S: Final = 10.0
_PREFIX: Final = "member_"
_KINDS: Final[tuple[MemberChange, ...]] = ("joined", "up", "down", "left", "expired", "changed")


@checks_arguments
class MemberClientApi:
    """The part of :class:`dep2p.client.Client` about members."""

    _transport: Transport

    async def fields(self, *, realm: "RealmChoice" = None) -> Mapping[str, str]:
        """Return the fields of the daemon's node in a realm, by key. Raises NotInRealmError."""
        text = realm_text(realm)
        params = {} if text is None else {"realm": text}
        path, timeout_s = "/v1/fields", _LOOK_TIMEOUT_S
        return (await self._transport.ask("GET", path, MemberFields, params=params, timeout_s=timeout_s)).fields

    async def set_fields(self, fields: Mapping[str, str | None], *, realm: "RealmChoice" = None) -> Mapping[str, str]:
        """Say things about the daemon's node to all members of a realm, signed; return all its fields.

        The programs of one daemon speak for one node: a value of None removes a field, fields that are not named stay.
        Bounds and pace are those of :meth:`dep2p.Node.set_fields`. The fields end with the daemon's process.

        Raises ControlError D1005 when a bound is broken, and then nothing changes; NotInRealmError.
        """
        call = SetFields(fields=dict(fields), realm=realm_text(realm))
        return (await self._transport.ask("POST", "/v1/fields", MemberFields, call, repeatable=True)).fields

    @asynccontextmanager
    async def watch_members(
        self, *, realm: "RealmChoice" = None
    ) -> AsyncGenerator[AsyncIterator[MemberUpdate | Lagged], None]:
        """Yield the changes of members of every realm, or of ``realm``, from now on.

        To miss none, list the members inside the block. A reader that is too slow loses the oldest changes and gets a
        :class:`Lagged` with their number. When the daemon goes away, the loop waits for it and goes on: list the
        members again at the :class:`FeedResumed`. Raises NotInRealmError.
        """
        params = {"types": ",".join(_PREFIX + kind for kind in _KINDS)}
        text = realm_text(realm)
        if text is not None:
            params["realm"] = text
        feed = FeedCall("GET", "/v1/events", "changes of members", loses=True, params=params)
        async with opened_feed(self._transport, feed) as lines:
            yield NoticingEventStream(lines, _update)


def _update(line: dict[str, object]) -> MemberUpdate | Lagged:
    read = line_or_lag(line, MemberEventLine)
    if isinstance(read, Lagged):
        return read
    fields = fields_of(read)
    fields["kind"] = read.kind.removeprefix(_PREFIX)
    fields["realm"] = fields.pop("realm_id")
    return msgspec.convert(fields, MemberUpdate)
