"""Administrative operations on the queues of this node: the same for its own programs and for other members."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from dep2p.control_api.encoding import encode_headers
from dep2p.errors import NotInFlightError
from dep2p.protocols.queues import admin
from dep2p.protocols.queues.admin import AdminReply, AdminRequest, R
from dep2p.protocols.queues.attributes import readable_attributes
from dep2p.protocols.queues.names import message_id, parse_message_id
from dep2p.queues.access import Right, Rights, parse_access
from dep2p.queues.broker.dead_letters import DeadLetter
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.inspector import StoredMessage
from dep2p.queues.broker.receive import ReceivedDelivery, parse_handle

RIGHTS: Final[Mapping[type[AdminRequest[AdminReply]], Right]] = {
    admin.ListQueues: Right.DESCRIBE,
    admin.DescribeQueue: Right.DESCRIBE,
    admin.CreateQueue: Right.CREATE,
    admin.CreateChannel: Right.CONSUME,
    admin.PeekMessages: Right.CONSUME,
    admin.ExportMessages: Right.CONSUME,
    admin.ListDeadLetters: Right.CONSUME,
    admin.ReceiveMessages: Right.CONSUME,
    admin.AckMessages: Right.CONSUME,
    admin.ChangeInvisible: Right.CONSUME,
    admin.EndReceive: Right.CONSUME,
    admin.DeleteQueue: Right.ADMINISTER,
    admin.DeleteChannel: Right.ADMINISTER,
    admin.PauseQueue: Right.ADMINISTER,
    admin.ResumeQueue: Right.ADMINISTER,
    admin.EmptyQueue: Right.ADMINISTER,
    admin.ReplayDeadLetters: Right.ADMINISTER,
    admin.DeleteDeadLetters: Right.ADMINISTER,
    admin.ExpandQueue: Right.ADMINISTER,
    admin.DescribeRoute: Right.DESCRIBE,
    admin.ListConsumers: Right.DESCRIBE,
    admin.ListLocks: Right.DESCRIBE,
    admin.ServeRange: Right.ADMINISTER,
    admin.ReadAckFloors: Right.DESCRIBE,
    admin.MayCreate: Right.CREATE,
}
"""The kinds of requests, and the right that each needs."""


class BrokerAdmin:
    """Carries out requests with the queues of one namespace."""

    def __init__(self, engine: QueueEngine, rights: Rights, namespace: str, owner: str = "local") -> None:
        """``owner``: the asker. Only the same asker settles messages that it has received."""
        self._engine = engine
        self._rights = rights
        self._namespace = namespace
        self._owner = owner

    async def perform(self, request: AdminRequest[R]) -> R:
        """Carry out a request; the caller has checked the asker's rights.

        Raises ``ValueError`` for a request that the queue cannot carry out, QueueError, StoreError.
        """
        reply: R = await _OPERATIONS[type(request)](self, request)
        return reply

    async def list_queues(self, _request: admin.ListQueues) -> admin.QueueList:
        """All queues in numbers."""
        engine, namespace = self._engine, self._namespace
        return admin.QueueList(
            queues=tuple([await engine.inspector.summary(namespace, name) for name in engine.queue_names(namespace)])
        )

    async def describe(self, request: admin.DescribeQueue | admin.CreateQueue) -> admin.QueueInfo:
        """One queue with its channels."""
        access = self._rights.of(self._namespace, request.queue)
        return await self._engine.inspector.info(self._namespace, request.queue, access.as_reply())

    async def create(self, request: admin.CreateQueue) -> admin.QueueInfo:
        """Make a queue, or set the access of one that is there."""
        namespace, name, rights = self._namespace, request.queue, self._rights
        if request.nodes:
            raise ValueError("only queues of a realm can be on several nodes: name the realm")
        access = None if request.access is None else parse_access(request.access, rights.of(namespace, name))
        made_by = self._owner.removeprefix("peer ") if self._owner.startswith("peer ") else ""
        await self._engine.create_queue(namespace, name, self._engine.options_from(request.options), made_by)
        if access is not None and access != rights.of(namespace, name):
            rights.set(namespace, name, access)
            await self._engine.flush()
        return await self.describe(request)

    async def may_create(self, _request: admin.MayCreate) -> admin.Done:
        """Reply that the asker may make the queue: the caller has checked it."""
        return admin.Done()

    async def create_channel(self, request: admin.CreateChannel) -> admin.Done:
        """Make a channel."""
        await self._engine.create_channel(
            self._namespace,
            request.queue,
            request.channel,
            from_start=request.from_start,
            filter_text=request.filter,
            exclusive=request.exclusive,
        )
        return admin.Done()

    async def delete(self, request: admin.DeleteQueue) -> admin.QueueDeleted:
        """Delete a queue."""
        await self._engine.delete_queue(self._namespace, request.queue)
        self._rights.forget(self._namespace, request.queue)
        return admin.QueueDeleted()

    async def delete_channel(self, request: admin.DeleteChannel) -> admin.Done:
        """Delete a channel."""
        await self._engine.delete_channel(self._namespace, request.queue, request.channel)
        return admin.Done()

    async def pause(self, request: admin.PauseQueue) -> admin.Done:
        """Pause delivery."""
        await self._engine.pause(self._namespace, request.queue, request.channel)
        return admin.Done()

    async def resume(self, request: admin.ResumeQueue) -> admin.Done:
        """Resume delivery."""
        await self._engine.resume(self._namespace, request.queue, request.channel)
        return admin.Done()

    async def empty(self, request: admin.EmptyQueue) -> admin.MessageCount:
        """Drop the messages that wait."""
        return admin.MessageCount(messages=await self._engine.empty(self._namespace, request.queue, request.channel))

    async def peek(self, request: admin.PeekMessages) -> admin.MessageList:
        """List the oldest messages."""
        found = await self._engine.inspector.peek(
            self._namespace, request.queue, request.channel, items_max=request.count, bytes_max=admin.ANSWER_BYTES
        )
        return admin.MessageList(messages=tuple(map(_message, found)))

    async def export(self, request: admin.ExportMessages) -> admin.ExportPage:
        """Return a part of the log."""
        namespace, name = self._namespace, request.queue
        position = parse_message_id(request.after) if request.after else None
        if request.after_seq:
            position = ((await self._engine.loaded(namespace, name)).partition_ids[0], request.after_seq)
        found = await self._engine.inspector.read_log(
            namespace, name, after=position, items_max=request.count, bytes_max=admin.ANSWER_BYTES
        )
        last = message_id(found[-1].partition, found[-1].seq) if found else ""
        return admin.ExportPage(messages=tuple(map(_message, found)), after=last)

    async def dead_letters(self, request: admin.ListDeadLetters) -> admin.DeadLetterPage:
        """List dead letters, as many as fit into a reply."""
        found = await self._engine.dead_letters.page(
            self._namespace, request.queue, request.channel, after_id=request.after, items_max=request.count
        )
        more = len(found) >= request.count
        letters: list[admin.DeadLetterInfo] = []
        size = 0
        for each in found:
            size += len(each.message.body)
            if letters and size > admin.ANSWER_BYTES:
                more = True
                break
            letters.append(_dead_letter(each))
        return admin.DeadLetterPage(dead_letters=tuple(letters), more=more)

    async def replay(self, request: admin.ReplayDeadLetters) -> admin.MessageCount:
        """Give dead letters to their channel again."""
        count = await self._engine.dead_letters.replay(self._namespace, request.queue, request.channel, request.ids)
        return admin.MessageCount(messages=count)

    async def delete_dead_letters(self, request: admin.DeleteDeadLetters) -> admin.MessageCount:
        """Drop dead letters."""
        count = await self._engine.dead_letters.delete(self._namespace, request.queue, request.channel, request.ids)
        return admin.MessageCount(messages=count)

    async def receive(self, request: admin.ReceiveMessages) -> admin.ReceivedMessages:
        """Give messages to the asker for a while."""
        receiver = await self._engine.simple.receiver(
            self._namespace,
            request.queue,
            request.channel,
            self._owner,
            from_start=request.from_start,
            of_distributed=request.of_distributed,
        )
        found = await receiver.receive(
            request.count, request.wait_s, request.invisible_s, request.attempt_id, only_again=request.only_again
        )
        return admin.ReceivedMessages(messages=tuple(map(_received, found)))

    async def end_receive(self, request: admin.EndReceive) -> admin.Done:
        """Release the messages of a receive."""
        receiver = await self._engine.simple.receiver(
            self._namespace, request.queue, request.channel, self._owner, from_start=False, of_distributed=True
        )
        receiver.end(request.attempt_id)
        return admin.Done()

    async def ack(self, request: admin.AckMessages) -> admin.RefusedHandles:
        """Acknowledge received messages."""
        for handle in request.handles:
            parse_handle(handle)  # before any is acknowledged
        receiver = await self._engine.simple.known(self._namespace, request.queue, request.channel, self._owner)
        refused = request.handles if receiver is None else receiver.ack(request.handles)
        if len(refused) < len(request.handles):
            await self._engine.flush()
        return admin.RefusedHandles(refused=tuple(refused))

    async def change_invisible(self, request: admin.ChangeInvisible) -> admin.InvisibleTime:
        """Change the time after which a received message is delivered again."""
        parse_handle(request.handle)
        receiver = await self._engine.simple.known(self._namespace, request.queue, request.channel, self._owner)
        if receiver is None:
            raise NotInFlightError(f"nothing that was received is held: {request.handle[:40]} is over")
        left_s = receiver.change_invisible(request.handle, request.invisible_s)
        if not left_s:
            await self._engine.flush()
        return admin.InvisibleTime(invisible_s=left_s)

    async def expand(self, request: admin.ExpandQueue) -> admin.QueueExpanded:
        """Add partitions."""
        name = request.queue
        if request.nodes:
            raise ValueError(f"the queue {name!r} is kept here alone: its new partitions are here, too")
        added = await self._engine.expand(self._namespace, name, request.partitions)
        return expanded(name, added, await self._engine.inspector.route(self._namespace, name))

    async def route(self, request: admin.DescribeRoute) -> admin.QueueRoute:
        """Return the route table."""
        return await self._engine.inspector.route(self._namespace, request.queue)

    async def consumers(self, request: admin.ListConsumers) -> admin.ChannelConsumers:
        """List the consumers of a channel."""
        return await self._engine.inspector.group(self._namespace, request.queue, request.channel)

    async def locks(self, request: admin.ListLocks) -> admin.ChannelLocks:
        """List the holders of a channel's partitions."""
        found = await self._engine.inspector.group(self._namespace, request.queue, request.channel)
        return admin.ChannelLocks(exclusive=found.exclusive, locks=found.locks)

    async def serve(self, request: admin.ServeRange) -> admin.RangeServed:
        """Set the range of keys of a shard."""
        last_seq = await self._engine.serve(self._namespace, request.queue, request.low, request.high)
        return admin.RangeServed(last_seq=last_seq)

    async def ack_floors(self, request: admin.ReadAckFloors) -> admin.AckFloors:
        """Return the ack floors of a shard's channels."""
        queue = await self._engine.loaded(self._namespace, request.queue)
        ack_floors = {
            name: min(channel.ack_floor(partition) for partition in queue.partition_ids)
            for name, channel in queue.channels.items()
        }
        # A crash could undo acknowledgements that are not durable, after consumers have passed a barrier.
        await self._engine.flush()
        return admin.AckFloors(
            messages=queue.items,
            bytes=queue.size_bytes,
            last_seq=sum(log.visible for log in queue.logs.values()),
            off_partition=queue.counts["published_off_partition"],
            floors=ack_floors,
        )


_OPERATIONS: Final[Mapping[type[AdminRequest[AdminReply]], Callable[[BrokerAdmin, Any], Awaitable[Any]]]] = {
    admin.ListQueues: BrokerAdmin.list_queues,
    admin.DescribeQueue: BrokerAdmin.describe,
    admin.CreateQueue: BrokerAdmin.create,
    admin.MayCreate: BrokerAdmin.may_create,
    admin.CreateChannel: BrokerAdmin.create_channel,
    admin.DeleteQueue: BrokerAdmin.delete,
    admin.DeleteChannel: BrokerAdmin.delete_channel,
    admin.PauseQueue: BrokerAdmin.pause,
    admin.ResumeQueue: BrokerAdmin.resume,
    admin.EmptyQueue: BrokerAdmin.empty,
    admin.PeekMessages: BrokerAdmin.peek,
    admin.ExportMessages: BrokerAdmin.export,
    admin.ListDeadLetters: BrokerAdmin.dead_letters,
    admin.ReplayDeadLetters: BrokerAdmin.replay,
    admin.DeleteDeadLetters: BrokerAdmin.delete_dead_letters,
    admin.ReceiveMessages: BrokerAdmin.receive,
    admin.EndReceive: BrokerAdmin.end_receive,
    admin.AckMessages: BrokerAdmin.ack,
    admin.ChangeInvisible: BrokerAdmin.change_invisible,
    admin.ExpandQueue: BrokerAdmin.expand,
    admin.DescribeRoute: BrokerAdmin.route,
    admin.ListConsumers: BrokerAdmin.consumers,
    admin.ListLocks: BrokerAdmin.locks,
    admin.ServeRange: BrokerAdmin.serve,
    admin.ReadAckFloors: BrokerAdmin.ack_floors,
}
"""Untyped, since a mapping cannot say that each request has a method of its own reply; `perform` says it."""


def expanded(queue: str, added: Sequence[int], route: admin.QueueRoute) -> admin.QueueExpanded:
    """The reply to an expansion."""
    return admin.QueueExpanded(
        queue=queue,
        added=tuple(added),
        version=route.version,
        partitions=route.partitions,
        routes=route.routes,
        placement=route.placement,
    )


def _message(stored: StoredMessage) -> admin.MessageInfo:
    attributes = readable_attributes(stored.attributes)
    return admin.MessageInfo(
        id=message_id(stored.partition, stored.seq),
        published_s=stored.published_us / 1e6,
        key=attributes.key,
        tags=attributes.tags,
        priority=attributes.priority,
        headers_json=encode_headers(attributes.headers),
        body=stored.body,
        encoding="base64",
        due_s=stored.due_us / 1e6,
        state=stored.state,
        attempts=stored.attempts,
    )


def _dead_letter(dead: DeadLetter) -> admin.DeadLetterInfo:
    message = _message(dead.message)
    return admin.DeadLetterInfo(
        id=dead.id,
        message_id=message.id,
        died_s=dead.died_us / 1e6,
        attempts=dead.attempts,
        reasons=dead.reasons,
        published_s=message.published_s,
        key=message.key,
        tags=message.tags,
        priority=message.priority,
        headers_json=message.headers_json,
        body=message.body,
        encoding="base64",
        due_s=message.due_s,
        state=message.state,
    )


def _received(received: ReceivedDelivery) -> admin.ReceivedMessage:
    delivery = received.delivery
    attributes = readable_attributes(delivery.message.attributes)
    return admin.ReceivedMessage(
        handle=received.handle,
        id=message_id(delivery.partition, delivery.message.seq),
        attempts=delivery.attempts,
        published_s=delivery.message.published_us / 1e6,
        invisible_s=received.invisible_s,
        key=attributes.key,
        tags=attributes.tags,
        priority=attributes.priority,
        headers_json=encode_headers(attributes.headers),
        body=delivery.message.body,
        encoding="base64",
    )
