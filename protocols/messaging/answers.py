"""Answers to a message of a topic, as its author collects them. Pure (docs/decisions/0038-request-over-a-topic.md).

A gather has a random token, which goes out in the message's headers. An answer gives it back. Of each peer one answer
counts; what comes late, twice, without being asked for, or without room is refused, and its sender learns why.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypedDict, TypeGuard

from dep2p.errors import OverloadedError
from dep2p.types import AnswerOutcome, PeerId

ANSWER_NAME: Final = "$dep2p/answer"
"""The request that brings an answer to the author."""
TOKEN_HEADER: Final = "$dep2p/token"
FAILED_HEADER: Final = "$dep2p/failed"
"""True: the body is the text of an error."""
OWN_PREFIX: Final = "$dep2p/"
"""Headers of an answer that begin so are not the app's."""
TOKEN_BYTES: Final = 16
GATHER_TIMEOUT_S: Final = 2.0
GATHER_TIMEOUT_S_MAX: Final = 86_400.0
FAILURE_BYTES_MAX: Final = 1_024
QUORUM_MAX: Final = 4_096
"""Answers of one gather, errors included."""
GATHER_BYTES_MAX: Final = 16_777_216
"""Bytes of one gather's answers that its app has not read."""
GATHERS_MAX: Final = 256
"""Gathers of one realm at the same time."""
GATHERS_BYTES_MAX: Final = 67_108_864
"""Bytes of all their answers that apps have not read."""
_ENDED_MAX: Final = 4_096
"""Tokens of gathers that ended: an answer with one of them is late, another one is unknown."""
_OVERHEAD_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class TopicAnswer:
    """The answer of one peer to a message of a topic."""

    peer: PeerId
    """The transport-authenticated member; this node itself for one of its programs."""
    body: bytes
    headers: Mapping[str, object]
    error: str | None = None
    """The text of a program that could not answer; then the body is empty. It does not count for the quorum."""

    @property
    def is_error(self) -> bool:
        """Whether the peer could not answer."""
        return self.error is not None


class GatherOptions(TypedDict, total=False):
    """The options of a gather, as keyword arguments."""

    quorum: int | None
    """Answers that are enough, 1 to 4,096; None (the default): all that come until the deadline."""
    timeout_s: float
    """Seconds for the publish and the answers together, at most a day; 2.0 by default."""
    headers: Mapping[str, object] | None
    """The app's headers of the message."""


@dataclass(frozen=True, slots=True)
class GatherResult:
    """The outcome of a gather."""

    answered: tuple[PeerId, ...]
    """The peers that answered, in the order of their answers."""
    failed: Mapping[PeerId, str]
    """The peers whose program could not answer, with its text. Show it through `dep2p.outside_text`."""
    missing: tuple[PeerId, ...]
    """The subscribers that the node knew at the publish, and that said nothing: neighbours, and the node itself.
    Members that are not its neighbours may have the message, too."""
    has_quorum: bool
    """Whether as many peers answered as were asked for; always, when no number was asked for."""
    refused: Mapping[str, int]
    """Answers that were refused while the gather was open, by the reason: "late", "duplicate", "full"."""

    @classmethod
    def of(
        cls,
        answers: Mapping[PeerId, str | None],
        asked: Iterable[PeerId],
        quorum: int | None,
        refused: Mapping[str, int],
    ) -> "GatherResult":
        """Sum up: ``answers`` are the peers with the text of an error or None."""
        answered = tuple(peer for peer, error in answers.items() if error is None)
        return cls(
            answered,
            {peer: error for peer, error in answers.items() if error is not None},
            tuple(peer for peer in asked if peer not in answers),
            quorum is None or len(answered) >= quorum,
            refused,
        )


@dataclass(slots=True, eq=False)
class CollectedAnswers:
    """One gather: who has answered, and the answers that wait for the app."""

    token: bytes
    quorum: int | None
    """Answers that are enough; None: all that come until the deadline."""
    deadline: float
    answered: dict[PeerId, str | None] = field(default_factory=dict[PeerId, str | None])
    """The peers that answered, with the text of an error or None, in the order of their answers."""
    refused: Counter[str] = field(default_factory=Counter[str])
    successes: int = 0
    waiting: deque[tuple[TopicAnswer, int]] = field(default_factory=deque[tuple[TopicAnswer, int]])
    waiting_bytes: int = 0

    @property
    def has_quorum(self) -> bool:
        """Whether enough peers have answered; always, when no number was asked for."""
        return self.quorum is None or self.successes >= self.quorum

    def is_over(self, now: float) -> bool:
        """Whether no answer is taken any more."""
        return (
            now >= self.deadline
            or (self.quorum is not None and self.successes >= self.quorum)
            or len(self.answered) >= QUORUM_MAX
        )


class AnswerCollector:
    """The gathers of one node in one realm, by token."""

    def __init__(self, *, gathers_max: int = GATHERS_MAX, bytes_max: int = GATHERS_BYTES_MAX) -> None:
        self._gathers_max = gathers_max
        self._bytes_max = bytes_max
        self._open: dict[bytes, CollectedAnswers] = {}
        self._ended: dict[bytes, None] = {}
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of answers that apps have not read."""
        return self._waiting_bytes

    def open(self, token: bytes, quorum: int | None, deadline: float) -> CollectedAnswers:
        """Begin a gather. Raises OverloadedError above the number that may be open."""
        if len(self._open) >= self._gathers_max:
            raise OverloadedError(
                f"{len(self._open)} gathers wait for answers in this realm, the most allowed: try when one has ended"
            )
        gather = self._open[token] = CollectedAnswers(token, quorum, deadline)
        return gather

    def take(self, token: bytes, answer: TopicAnswer, headers_bytes: int, now: float) -> AnswerOutcome:
        """Take an answer that a peer has sent, or say why not."""
        gather = self._open.get(token)
        if gather is None:
            return "late" if token in self._ended else "unknown"
        outcome = self._judge(gather, answer, headers_bytes, now)
        if outcome != "taken":
            gather.refused[outcome] += 1
        return outcome

    def _judge(self, gather: CollectedAnswers, answer: TopicAnswer, headers_bytes: int, now: float) -> AnswerOutcome:
        if answer.peer in gather.answered:
            return "duplicate"
        if gather.is_over(now):
            return "late"
        size = len(answer.body) + headers_bytes + len(answer.error or "") + _OVERHEAD_BYTES
        if gather.waiting_bytes + size > GATHER_BYTES_MAX or self._waiting_bytes + size > self._bytes_max:
            return "full"
        gather.answered[answer.peer] = answer.error
        gather.successes += not answer.is_error
        gather.waiting.append((answer, size))
        gather.waiting_bytes += size
        self._waiting_bytes += size
        return "taken"

    def next_answer(self, gather: CollectedAnswers) -> TopicAnswer | None:
        """Give the oldest answer that the app has not read; None without any."""
        if not gather.waiting:
            return None
        answer, size = gather.waiting.popleft()
        gather.waiting_bytes -= size
        self._waiting_bytes -= size
        return answer

    def close(self, gather: CollectedAnswers) -> None:
        """End a gather: answers that the app has not read are dropped, later ones are late. Idempotent."""
        if self._open.pop(gather.token, None) is None:
            return
        self._waiting_bytes -= gather.waiting_bytes
        gather.waiting.clear()
        gather.waiting_bytes = 0
        if len(self._ended) >= _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[gather.token] = None


_OUTCOMES: Final[dict[bytes, AnswerOutcome]] = {
    b"taken": "taken",
    b"late": "late",
    b"duplicate": "duplicate",
    b"unknown": "unknown",
    b"full": "full",
}


def read_outcome(data: bytes) -> AnswerOutcome | None:
    """Read the author's word on an answer; None for one that this version does not know."""
    return _OUTCOMES.get(data)


def is_token(value: object) -> TypeGuard[bytes]:
    """Whether a value of a header is a token."""
    return type(value) is bytes and len(value) == TOKEN_BYTES
