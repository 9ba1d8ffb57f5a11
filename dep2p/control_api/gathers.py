"""Requests over a topic in the control API: the calls, and the lines of answers. Pure."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from dep2p.control_api.calls import Fields, OptionalPayloadCall, PayloadCall
from dep2p.control_api.replies import PayloadReply, Reply
from dep2p.types import PeerId

TOKEN_HEX_CHARS = 32


class GatherCall(PayloadCall, frozen=True, kw_only=True):
    """POST /v1/topics/{topic}/gathers: ask the subscribers of a topic."""

    realm: str | None = None
    headers: Fields | None = None
    quorum: int | None = None
    timeout_s: float | None = None


class AnswerCall(OptionalPayloadCall, frozen=True, kw_only=True):
    """POST /v1/answers: an answer to a message of a topic, or the text of an error."""

    author: str
    """The message's ``sender``."""
    token: Annotated[str, Meta(min_length=TOKEN_HEX_CHARS, max_length=TOKEN_HEX_CHARS)]
    """The message's ``reply_token``."""
    within_s: float
    """Seconds from now in which the author waits: the message's ``reply_within_s``, without what has passed."""
    headers: Fields | None = None
    error: str | None = None
    realm: str | None = None


class GatherAskedLine(Reply, frozen=True, kw_only=True):
    """The first line of a gather."""

    asked: tuple[PeerId, ...]
    """The subscribers that the node knows."""


class GatherAnswerLine(PayloadReply, frozen=True, kw_only=True):
    """One answer."""

    peer: PeerId
    headers: Fields | UnsetType = UNSET
    failed: str | UnsetType = UNSET
    """The text of a program that could not answer; then ``data`` is empty."""


class GatherResultLine(Reply, frozen=True, kw_only=True):
    """The last line of a gather."""

    answered: tuple[PeerId, ...]
    failed: dict[PeerId, str]
    missing: tuple[PeerId, ...]
    has_quorum: bool
    refused: dict[str, int]


class AnswerOutcomeReply(Reply, frozen=True, kw_only=True):
    """POST /v1/answers: what the author did with the answer."""

    outcome: str
