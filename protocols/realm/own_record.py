"""A node's own member record: when to issue the next one and its sequence number. Pure (docs/spec/realm.md §4.4)."""

from collections.abc import Callable, Sequence
from typing import Final

from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.realm.member_record import (
    LIFE_MS,
    SEQ_MAX,
    SKEW_MS,
    MemberRecord,
    SealedRecord,
    State,
    fitting_addrs,
    seal_fitting,
)
from dep2p.protocols.realm.statement import MemberStatement, check_statement
from dep2p.types import PeerId

REFRESH_FRACTION: Final = 0.5
"""The fraction of a record's life after which its owner issues the next one."""
REISSUE_INTERVAL_S: Final = 10.0
"""Seconds between two records of one node at least: two nodes with one identity would outbid each other forever."""
CHANGES_BURST: Final = 4
"""Changes of its statement that a node makes known at once; members take eight records of one member."""
CHANGE_INTERVAL_S: Final = 5.0
"""Seconds between further changes at least: those in between go together. Members take one in two seconds."""
CHANGES_PER_S_OF_REALM: Final = 20.0
"""Changes of all members in a second: in a realm of a thousand, each makes one in 50 s known."""
GATHER_S: Final = 0.05
"""Seconds in which changes are gathered: an app that starts registers its handlers one after the other."""


class OwnRecord:
    """Issues this node's records. Sequence numbers follow the clock: a restart without any state goes on rising."""

    def __init__(
        self, own: PeerId, keys: RealmKeys, sign: Callable[[bytes], bytes], *, features: Sequence[str] = ()
    ) -> None:
        self.peer = own
        self._keys = keys
        self._sign = sign
        self._features = tuple(features)
        self._addrs: tuple[str, ...] = ()
        self._seq_seen = 0
        self._issued_at: float | None = None
        self._overtake_due: float | None = None
        self._statement = MemberStatement()
        self._statement_due: float | None = None
        self._changes_left = float(CHANGES_BURST)
        self._changes_at = 0.0
        self._change_interval_s = CHANGE_INTERVAL_S
        self.current: SealedRecord | None = None
        """The newest record of this node."""

    @property
    def has_left(self) -> bool:
        """Whether the newest record says that this node left."""
        return self.current is not None and self.current.record.state == "left"

    def set_addrs(self, addrs: Sequence[str]) -> None:
        """Set the addresses of the records from now on; those that do not fit are left out."""
        self._addrs = fitting_addrs(addrs)

    @property
    def statement(self) -> MemberStatement:
        """The statement of this node in its next record."""
        return self._statement

    def set_statement(self, statement: MemberStatement, now: float, members: int) -> None:
        """Set what this node says about itself. It is made known soon, at a pace that a realm of so many ``members``
        can bear. Raises ``ValueError`` when a bound is broken."""
        if statement == self._statement:
            return
        check_statement(statement)
        self._statement = statement
        if self.current is None or self.has_left or self._statement_due is not None:
            return
        self._change_interval_s = max(CHANGE_INTERVAL_S, members / CHANGES_PER_S_OF_REALM)
        self._earn_changes(now)
        self._statement_due = now + max(GATHER_S, (1.0 - self._changes_left) * self._change_interval_s)

    def _earn_changes(self, now: float) -> None:
        earned = max(0.0, now - self._changes_at) / self._change_interval_s
        self._changes_left = min(float(CHANGES_BURST), self._changes_left + earned)
        self._changes_at = now

    def issue(self, state: State, now: float, now_ms: int) -> SealedRecord:
        """Make the next record."""
        issued_seq = 0 if self.current is None else self.current.record.seq
        record = MemberRecord(
            peer=self.peer,
            addrs=self._addrs if state == "active" else (),
            seq=min(SEQ_MAX, max(issued_seq + 1, self._seq_seen + 1, now_ms)),
            issued_ms=now_ms,
            expires_ms=now_ms + LIFE_MS,
            state=state,
            features=self._features if state == "active" else (),
            statement=self._statement if state == "active" else MemberStatement(),
        )
        self.current = seal_fitting(record, self._keys, self._sign)
        self._issued_at = now
        if self._statement_due is not None:
            self._earn_changes(now)
            self._changes_left -= 1.0
        self._overtake_due = self._statement_due = None
        return self.current

    def seen(self, record: MemberRecord, now: float) -> None:
        """Note a record of ours that is ahead of the newest one: the next one has to be ahead of it, soon."""
        self._seq_seen = max(self._seq_seen, record.seq)
        if self._issued_at is None or self.has_left or self._seq_seen >= SEQ_MAX:
            return
        self._overtake_due = max(now, self._issued_at + REISSUE_INTERVAL_S)

    def next_deadline(self, wall_offset_s: float) -> float | None:
        """Return when the next record is due; ``wall_offset_s`` is the wall clock (Unix) minus the monotonic one.

        The wall clock counts, since the record expires by it, also while the machine sleeps.
        """
        if self.current is None or self.has_left:
            return None
        record = self.current.record
        due = (record.issued_ms + REFRESH_FRACTION * LIFE_MS) / 1000 - wall_offset_s
        if self._overtake_due is not None:
            due = min(due, self._overtake_due)
        if self._statement_due is not None:
            due = min(due, self._statement_due)
        if self._issued_at is not None and record.issued_ms / 1000 > self._issued_at + wall_offset_s + SKEW_MS / 1000:
            # The clock was set back since: for all other members this record is from the future.
            due = min(due, self._issued_at + REISSUE_INTERVAL_S)
        return due
