"""The node's methods about members: what they say about themselves, how they change, and questions to any or many."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, Unpack

from dep2p.arguments import checks_arguments
from dep2p.errors import Dep2pError, NotInRealmError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.node.member_watch import MemberWatch
from dep2p.node.services import RealmServices
from dep2p.protocols.messaging.answers import GatherOptions
from dep2p.protocols.realm.member_table import RealmMember
from dep2p.protocols.realm.member_update import MemberUpdate
from dep2p.protocols.services.options import AnyOptions
from dep2p.realm.credentials import RealmChoice
from dep2p.realm.interface import MemberEvent
from dep2p.realm.membership import Membership
from dep2p.services.gathers import Gathering
from dep2p.services.service import ServiceMember, ServiceMemberInfo
from dep2p.types import PeerId, RealmId


class KnowsMembers(Protocol):
    """The node, as these methods use it."""

    def membership(self, realm: RealmChoice = None) -> Membership: ...
    def services(self, realm: RealmChoice = None) -> RealmServices: ...
    def subscribe_members(self, on_event: Callable[[RealmId, MemberEvent], None]) -> Callable[[], None]: ...


@checks_arguments
class NodeMembers:
    """The part of :class:`dep2p.node.node.Node` about members."""

    def fields(self: KnowsMembers, *, realm: RealmChoice = None) -> Mapping[str, str]:
        """Return the fields of this node in a realm, by key. Raises NotInRealmError."""
        return self.membership(realm).fields

    def set_fields(
        self: KnowsMembers, fields: Mapping[str, str | None], *, realm: RealmChoice = None
    ) -> Mapping[str, str]:
        """Say things about this node to all members of a realm, signed, in its member record; return all its fields.

        A value of None removes a field; fields that are not named stay. ``app``, ``version``, ``load`` and ``status``
        are usual keys; others are free. At most 16 fields, keys of 32 and values of 256 bytes, 1,024 bytes in all.
        Members hear of it within seconds. Changes that come faster go together, one record in 5 s, and fewer in a
        realm of more than a hundred members. The fields end with this node: state belongs in a database.

        Raises ``ValueError`` when a bound is broken, and then nothing changes; NotInRealmError.
        """
        return self.membership(realm).set_fields(fields)

    @asynccontextmanager
    async def watch_members(
        self: KnowsMembers, *, realm: RealmChoice = None
    ) -> AsyncGenerator[AsyncIterator[MemberUpdate | Lagged], None]:
        """Yield the changes of members of every realm, or of ``realm``, from now on.

        To miss none, list the members inside the block. A reader that is 1,024 changes behind loses the oldest and
        gets a `Lagged` with their number. Raises NotInRealmError.
        """
        only = None if realm is None else self.membership(realm).realm_id

        def find(realm_id: RealmId, peer: PeerId) -> RealmMember | None:
            try:
                return self.membership(realm_id).member(peer)
            except NotInRealmError:
                return None

        watch = MemberWatch(find, only)
        end = self.subscribe_members(watch.put)
        try:
            yield watch
        finally:
            end()

    async def request_any(
        self: KnowsMembers, name: str, body: bytes, *, realm: RealmChoice = None, **options: Unpack[AnyOptions]
    ) -> bytes:
        """Ask any member that offers the service ``name``, and return its answer. This node itself may be chosen.

        The node chooses by its own requests in flight and by how long answers took. A request that surely was not
        handled (no handler, no connection, the member is overloaded or about to stop) is tried at another member; an
        ``idempotent`` one also after a timeout or a lost connection, and while others are left a member has half of
        the time that remains. ``group``, ``version`` and ``schema`` choose among the offers.

        Raises ServiceNotFoundError (a NoHandlerError: no member offers it), ServiceUnavailableError,
        RequestTimeoutError, StreamClosedError (each says who was tried), HandlerError (a member's handler failed: that
        is an answer), MessageTooLargeError, NotInRealmError, or ``ValueError``.
        """
        return (await self.services(realm).services.request_any(name, body, options)).data

    def gather(
        self: KnowsMembers, topic: str, body: bytes, *, realm: RealmChoice = None, **options: Unpack[GatherOptions]
    ) -> AbstractAsyncContextManager[Gathering]:
        """Publish a message that asks its subscribers for answers, and yield these as they come: ``async with
        node.gather("inventory", b"screws", quorum=3, timeout_s=2.0) as answers: async for answer in answers``.

        The loop ends when ``quorum`` members have answered (by default never) or after ``timeout_s`` (2.0), counted
        from the call. ``answers.result()`` says who answered, and which known subscribers did not. Subscribers answer
        by `TopicMessage.reply`; of each member one answer counts. Programs of this node are asked, too.

        Entering raises what `publish` raises, NoPeersSubscribedError among it; RequestTimeoutError when nothing could
        be published in time, OverloadedError above 256 gathers at a time, ``ValueError``, NotInRealmError. The public
        network has no answers.
        """
        return self.services(realm).gathers.gather(topic, body, options)

    def offered_services(self: KnowsMembers, *, realm: RealmChoice = None) -> Mapping[str, Sequence[ServiceMember]]:
        """The services of a realm, by name, and the members that offer each. Raises NotInRealmError."""
        services = self.services(realm).services
        return {name: services.members(name) for name in services.names()}

    async def service_info(
        self: KnowsMembers, name: str, *, realm: RealmChoice = None
    ) -> Mapping[PeerId, ServiceMemberInfo | Dep2pError]:
        """Ask each member that offers the service for its metadata, counts and times; an answer or an error for each.

        Raises ServiceNotFoundError when no member offers it, NotInRealmError.
        """
        return await self.services(realm).services.infos(name)
