"""The D-codes of durable queues and of the stores below them."""

from typing import Final

from dep2p.error_codes.model import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_REFUSED, ErrorInfo

QUEUE_ROWS: Final = (
    ErrorInfo(
        "D5201",
        "no such queue",
        "The node that was asked keeps no queue of that name. Queues of a realm, those of each member, and those of "
        "this machine only are distinguished.",
        "See the queues with `dep2p queue ls` (with --realm and --peer as needed); make one with `dep2p queue create`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5202",
        "no such channel",
        "The queue has no channel of that name. A channel is made by its first consumer.",
        "See the channels with `dep2p queue info QUEUE`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5203",
        "no such message",
        "The dead letter or message is not there: it was replayed, removed or finished, or its time was over.",
        "See what is there with `dep2p queue dlq ls QUEUE CHANNEL` or `dep2p queue peek QUEUE`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5204",
        "the queue exists with other options",
        "A queue of that name is there, and what it was made with differs from what is asked for.",
        "Use it as it is, take another name, or delete it first.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5205",
        "the queue is full",
        "The queue holds as many messages or bytes as it may, or its node has too much to write. Nothing of this "
        "publish was taken.",
        "Publish again later; let consumers finish what is there, or make room with `dep2p queue empty`.",
        429,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5206",
        "the message is not held by this consumer",
        "A result came too late, twice, or for another consumer's message: its time was over, and it may have been "
        "given to another consumer.",
        "Make work on a message harmless to repeat; touch messages that take long, or raise msg_timeout_s.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5207",
        "not allowed on this queue",
        "The queue's owner lets only some peers publish to it, consume from it or administer it.",
        "Ask its owner; who may do what stands in `dep2p queue info QUEUE` there.",
        403,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5208",
        "the consumer is over",
        "The queue or channel was deleted, the connection is lost for good, or the consumer was closed.",
        "Consume anew; what was held and not finished is delivered again.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5209",
        "the consumer has lost the partition",
        "A result in an exclusive channel came after its consumer had handed the partition over, or had been silent "
        "for a lease: another consumer has the message, or will.",
        "Stop work on it: the result does not count. Let handlers end with the message's scope; raise lease_s of the "
        "queue if consumers pause for longer.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5210",
        "the queue's partitions are on several nodes",
        "This operation works on one partition at a time, on its node, where the partition is a queue of its own.",
        "See nodes and names with `dep2p queue route QUEUE`, and ask there: `dep2p queue … NAME --peer NODE`.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5211",
        "the key belongs to another partition",
        "The queue was expanded and the key has moved, or a message was sent to a partition of a queue on several "
        "nodes by its own name. Nothing was taken.",
        "Publish to the queue by its name at its controller; that routes anew.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5212",
        "a part of what was published was taken",
        "Messages of several order keys were published together to a queue on several nodes, and a node refused its "
        "messages, or is away. The others are durable.",
        "Publish those that were not taken again (`error.taken` has the ids of the others).",
        503,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5213",
        "another node is the broker of these queues now",
        "Several nodes share one store ([queues] standby), and another one has it now. Nothing was taken.",
        "Ask the node that is named (`--peer`); when none is, wait until one of them has taken over.",
        421,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5301",
        "a store cannot read or write",
        "The files or the server that keep queues and outboxes fail. Nothing that was acknowledged is lost by that.",
        "Read the cause: free the disk, mend the file's owner, start the server; then try again.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5302",
        "no room in a store",
        "The disk or the server that keeps the messages is full. Nothing of this publish was taken; messages are "
        "delivered and finished as before.",
        "Free some space, or finish or empty what is kept; then publish again.",
        507,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5303",
        "a store is in use",
        "Another process has the files of this store open.",
        "Stop the other daemon, or give this one a data directory of its own.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5304",
        "whether it was stored is not known",
        "The store went away while it wrote, for longer than is waited for it. The message is kept, and is found to be "
        "there, or written, when the store is back.",
        "Start the store's server. Publish again only what may come twice.",
        503,
        EXIT_FAILED,
    ),
)
