"""The vectors of docs/spec/session.md, read from the page itself."""

import re
from pathlib import Path

import pytest

from dep2p.errors import ErrorCode
from dep2p.protocols.sessions.resume_token import SessionToken, decode_token, encode_token
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    END,
    FAILURE,
    OPENED,
    PUSH,
    RESET_UNKNOWN,
    RESPONSE,
    SKIP,
    Push,
    Resume,
    SessionAnswer,
    decode_ack,
    decode_request,
    decode_resume,
    decode_session_answer,
    decode_taken,
    encode_ack,
    encode_failure,
    encode_item,
    encode_request,
    encode_resume,
    encode_session_answer,
    encode_taken,
    push_header,
    read_items,
)
from dep2p.protocols.wire.frame import FrameDecoder, encode_frame

_PAGE = (Path(__file__).parents[3] / "docs" / "spec" / "session.md").read_text(encoding="utf-8")
[_TABLE] = re.findall(r"```\n(.*?)```", _PAGE[_PAGE.index("## 8. Vectors") :], flags=re.DOTALL)
VECTORS = {line.split()[0]: line.split()[1] for line in _TABLE.splitlines()}

SESSION_ID = bytes(range(16))
RESUME = Resume(SESSION_ID, 0, 0, 0, 8_192, 16_777_216, 0, "feed", b"hi")
AGAIN = Resume(SESSION_ID, 7, 3, 5, 8_192, 16_777_216, 2, "feed", b"hi")
RUN = [
    Push(1, b"one", PUSH, 0),
    Push(2, b"first", BEFORE, 1),
    Push(3, b"yes", RESPONSE, 1),
    Push(4, b"then", AFTER, 1),
    Push(5, encode_failure(ErrorCode.HANDLER_FAILED, "no"), FAILURE, 2),
    Push(6, b"too late", SKIP, 0),
    Push(7, b"", END, 0),
]
TOKEN = SessionToken(SESSION_ID, 7, 3, b"server-peer", "feed")


def run_frame() -> bytes:
    items = b"".join(encode_item(push.kind, push.request_id, push.body) for push in RUN)
    return push_header(1, len(items)) + items


ENCODED = {
    "resume": lambda: encode_resume(RESUME).hex(),
    "resume-again": lambda: encode_resume(AGAIN).hex(),
    "opened": lambda: encode_session_answer(SessionAnswer(OPENED, 7, 1, 0)).hex(),
    "reset": lambda: encode_session_answer(SessionAnswer(RESET_UNKNOWN, 9, 1, 2)).hex(),
    "push": lambda: run_frame().hex(),
    "ack": lambda: encode_ack(7, 4).hex(),
    "request": lambda: encode_request(1, b"?", 30_000).hex(),
    "taken": lambda: encode_taken(1).hex(),
    "cancel": lambda: encode_frame(7, b"", req_id=2).hex(),
    "leave": lambda: encode_frame(5, b"").hex(),
    "token": lambda: encode_token(TOKEN),
}


@pytest.mark.parametrize("name", list(ENCODED))
def test_what_we_encode_is_the_vector(name: str) -> None:
    assert ENCODED[name]() == VECTORS[name]


def test_the_page_has_no_vector_that_is_not_checked() -> None:
    assert set(VECTORS) == set(ENCODED)


def payload(name: str) -> bytes:
    [frame] = FrameDecoder(10_000).feed(bytes.fromhex(VECTORS[name]))
    return frame.payload


def test_what_we_decode_from_the_vectors() -> None:
    assert decode_resume(payload("resume")) == RESUME
    assert decode_resume(payload("resume-again")) == AGAIN
    assert decode_session_answer(payload("opened")) == SessionAnswer(OPENED, 7, 1, 0)
    assert decode_session_answer(payload("reset")) == SessionAnswer(RESET_UNKNOWN, 9, 1, 2)
    assert read_items(payload("push"), 1, 0, 1_000) == (RUN, 0)
    assert read_items(payload("push"), 1, 5, 1_000) == (RUN[5:], 5)
    assert decode_ack(payload("ack")) == (7, 4)
    assert decode_request(payload("request")) == (30_000, b"?")
    assert decode_taken(payload("taken")) == 1
    assert decode_token(VECTORS["token"]) == TOKEN
