"""Checks of the numbers of new messages: each once and rising, also when the message of a number is long gone."""

from collections.abc import Mapping, Sequence

from dep2p.errors import StoreError
from dep2p.protocols.queues.records import MessageRow


def check_numbers(appends: Sequence[MessageRow], last: Mapping[int, int]) -> dict[int, int]:
    """Check numbers against ``last``, the last number that was ever given, by partition. Return the new last ones of
    the partitions in ``appends``. Raises StoreError (about the batch) for a number that is not above those before
    it."""
    found: dict[int, int] = {}
    for partition, seq, _meta, _body in appends:
        before = found.get(partition)
        if before is None:
            before = last.get(partition, 0)
        if seq <= before:
            refused = StoreError(
                f"message {seq} of partition {partition} is there already, or was: the last is {before}"
            )
            refused.is_about_batch = True
            raise refused
        found[partition] = seq
    return found
