"""The D-codes of reliable delivery."""

from typing import Final

from dep2p.error_codes.model import EXIT_FAILED, EXIT_REFUSED, ErrorInfo

DELIVERY_ROWS: Final = (
    ErrorInfo(
        "D5401",
        "a reliable message was not taken",
        "Its receiver rejected it, said nothing for all tries, or it was dropped by request; the cause says which.",
        "Read the cause: a handler refused or failed, or the receiver hangs. dep2p outbox replay sends it again.",
        502,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5402",
        "a reliable message has expired",
        "It was not acknowledged within its time to live; the receiver or its program was away, or too slow.",
        "Send it again: dep2p outbox replay. More time: --ttl, or delivery_age_max_s in [limits].",
        504,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5403",
        "the outbox is full",
        "So many reliable messages wait for their acknowledgement that this one was not accepted.",
        "See what waits: `dep2p outbox ls`. Wait, drop some, or raise delivery_queue_items_max in [limits].",
        429,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5404",
        "how a reliable message ended is not known",
        "The daemon was restarted since it accepted the message, or has forgotten it among newer ones.",
        "See what waits and what was lost: dep2p outbox ls, dep2p outbox ls --failed. Else it was acknowledged.",
        404,
        EXIT_FAILED,
    ),
)
