"""The simple consumer: receive, ack and change_invisible, as thin calls without retries."""

from dep2p.arguments import checks_arguments
from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.admin import AckMessages, ChangeInvisible, ReceivedMessage, ReceiveMessages
from dep2p.queues.api.broker import QueueBroker


@checks_arguments
class SimpleConsumer:
    """Made by ``queue.simple_consumer(group)``. It has no state: any of its calls may come from any task, and a message
    may be acknowledged through another consumer of this node, by its handle."""

    def __init__(self, broker: QueueBroker, queue: str, channel: str) -> None:
        self.queue = queue
        self.channel = channel
        self._broker = broker

    async def receive(
        self,
        count: int = 16,
        *,
        wait_s: float = 10.0,
        invisible_s: float = 60.0,
        attempt_id: str = "",
        from_start: bool = False,
    ) -> list[ReceivedMessage]:
        """Return the messages that are there: up to ``count`` (at most 32), none when ``wait_s`` (at most 20) seconds
        are over.

        Each is hidden from other consumers for ``invisible_s`` (at most the queue's ``msg_timeout_max_s``). A receive
        whose answer was lost may be asked again with the same ``attempt_id`` (any text of up to 64 characters): it
        gives the same messages, those that are still held. The channel is made when it is new. A receive that is
        cancelled without an ``attempt_id`` holds nothing: its messages go to others, untried.

        From a queue on several nodes it returns the messages of the nodes that can be reached.

        Raises QueueNotFoundError, QueueExistsError (an exclusive channel), ``ValueError`` (ProtocolError from another
        member) for a number out of its bounds, and what a request raises.
        """
        reply = await self._broker.ask(
            ReceiveMessages(
                queue=self.queue,
                channel=self.channel,
                count=count,
                wait_s=wait_s,
                invisible_s=invisible_s,
                attempt_id=attempt_id,
                from_start=from_start,
            )
        )
        return list(reply.messages)

    async def ack(self, *messages: ReceivedMessage | str) -> None:
        """Acknowledge messages (or handles); durable on return. Raises NotInFlightError that names those whose time was
        over (also in its ``handles``), and for a queue on several nodes the error of a request, with the handles whose
        node is away. All others are acknowledged all the same."""
        handles = tuple(_handle(each) for each in messages)
        reply = await self._broker.ask(AckMessages(queue=self.queue, channel=self.channel, handles=handles))
        if reply.refused:
            raise NotInFlightError(
                f"not held here any more, since their time was over or they are done: {', '.join(reply.refused)}",
                reply.refused,
            )

    async def change_invisible(self, message: ReceivedMessage | str, invisible_s: float) -> float:
        """Deliver a message again ``invisible_s`` from now, unless it is acknowledged before; 0: at once.

        Returns the seconds that it got (the queue's ``msg_timeout_max_s`` counts from the receipt). Raises
        NotInFlightError.
        """
        reply = await self._broker.ask(
            ChangeInvisible(queue=self.queue, channel=self.channel, handle=_handle(message), invisible_s=invisible_s)
        )
        return reply.invisible_s


def _handle(message: ReceivedMessage | str) -> str:
    return message if isinstance(message, str) else message.handle
