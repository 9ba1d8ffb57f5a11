"""The pure core of the file transfer: order, bounds and hostile items."""

import hashlib
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.messaging.file_transfer import (
    CONTROL_ITEM_BYTES_MAX,
    DATA_ITEM_BYTES_MAX,
    FILE_BYTES_MAX,
    FileData,
    FileEnd,
    FileOffer,
    FileOfferAnswer,
    FileReceiver,
    FileSender,
    FileStart,
    FileVerdict,
    FileVerdictCode,
    check_file_name,
)

EMPTY = hashlib.sha256().digest()


def answered(offer: FileOffer, offset: int = 0) -> tuple[FileSender, FileReceiver]:
    sender, receiver = FileSender(offer), FileReceiver()
    assert receiver.on_item(sender.first_item()) == offer
    assert sender.on_item(receiver.answer_item(offset, EMPTY)) == FileOfferAnswer(offset, EMPTY)
    return sender, receiver


@given(content=st.binary(max_size=5_000), cut=st.floats(0, 1), chunk=st.integers(1, 1_000))
def test_a_file_arrives_whole_from_any_offset(content: bytes, cut: float, chunk: int) -> None:
    offset = int(len(content) * cut)
    sender, receiver = answered(FileOffer("a.bin", len(content), 5, EMPTY), offset)
    assert receiver.on_item(sender.start_item(offset)) == FileStart(offset)
    got = content[:offset]
    for at in range(offset, len(content), chunk):
        event = receiver.on_item(sender.data_item(content[at : at + chunk]))
        assert isinstance(event, FileData)
        got += event.data
    digest = hashlib.sha256(content).digest()
    assert receiver.on_item(sender.end_item(digest)) == FileEnd(digest)
    assert got == content
    good = FileVerdict(FileVerdictCode.OK, "", digest)
    assert sender.on_item(receiver.verdict_item(good)) == good


def test_a_sender_starts_from_zero_when_the_prefix_differs() -> None:
    sender, receiver = answered(FileOffer("a", 10), 4)
    assert receiver.on_item(sender.start_item(0)) == FileStart(0)
    with pytest.raises(ProtocolError, match="10 bytes are left"):
        receiver.on_item(b"x" * 11)


def test_a_start_that_was_not_agreed_is_refused() -> None:
    sender, receiver = answered(FileOffer("a", 10), 4)
    with pytest.raises(ProtocolError, match="neither 0 nor the 4"):
        receiver.on_item(sender.start_item(5))


def test_a_refusal_may_come_in_the_middle_of_the_data() -> None:
    sender, receiver = answered(FileOffer("a", 10))
    receiver.on_item(sender.start_item(0))
    receiver.on_item(sender.data_item(b"1234"))
    full = FileVerdict(FileVerdictCode.NO_SPACE, "no space left")
    assert sender.on_item(receiver.verdict_item(full)) == full


def test_a_good_verdict_before_the_end_is_a_lie() -> None:
    sender, _ = answered(FileOffer("a", 10))
    lie = cbor2.dumps({"kind": "verdict", "code": "ok", "sha256": EMPTY})
    with pytest.raises(ProtocolError, match="not sent yet"):
        sender.on_item(lie)


@pytest.mark.parametrize("size", [1, DATA_ITEM_BYTES_MAX + 1, 0])
def test_data_items_keep_to_their_bounds(size: int) -> None:
    sender, receiver = answered(FileOffer("a", 1 if size == 0 else size))
    receiver.on_item(sender.start_item(0))
    if size == 1:
        assert receiver.on_item(b"x") == FileData(b"x")
        return
    with pytest.raises(ProtocolError, match="data item"):
        receiver.on_item(b"x" * size)
    with pytest.raises(LocalProtocolError, match="data item"):
        sender.data_item(b"x" * size)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", ".bashrc", "a\0b", "a\nb", "a\x1b[2J", "x" * 256, " a", "a ",
     "é" * 128, "a\u202egnp.exe", "\ud800"],
)  # fmt: skip
def test_a_name_that_could_leave_the_directory_or_deceive_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        check_file_name(name)
    with pytest.raises(ValueError, match="file name"):
        FileSender(FileOffer(name, 1))


@pytest.mark.parametrize("name", ["a", "report 2026 (final).pdf", "数据.csv", "x" * 255, "a..b", "-rf"])
def test_plain_names_pass(name: str) -> None:
    assert check_file_name(name) == name


def offer_with(**fields: Any) -> bytes:
    good: dict[str, Any] = {"v": 1, "kind": "offer", "name": "a", "size": 1}
    return cbor2.dumps({key: value for key, value in (good | fields).items() if value is not ...})


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"\xff",
        b"\x9f" * 100,
        b"\x81" * CONTROL_ITEM_BYTES_MAX,
        b"x" * (CONTROL_ITEM_BYTES_MAX + 1),
        offer_with() + b"\x00",
        cbor2.dumps([1]),
        offer_with(kind=...),
        offer_with(kind="start"),
        offer_with(kind=1),
        offer_with(v=2),
        offer_with(v=...),
        offer_with(name=b"a"),
        offer_with(name="../a"),
        offer_with(name="x" * 300),
        offer_with(size=-1),
        offer_with(size=FILE_BYTES_MAX + 1),
        offer_with(size=1.0),
        offer_with(size=True),
        offer_with(size=2**70),
        offer_with(mtime_ns=-1),
        offer_with(mtime_ns="now"),
        offer_with(sha256=b"short"),
        offer_with(sha256="text" * 8),
    ],
)
def test_a_hostile_first_item_is_a_protocol_error(item: bytes) -> None:
    with pytest.raises(ProtocolError):
        FileReceiver().on_item(item)


@given(items=st.lists(st.binary(max_size=200), max_size=6))
def test_random_items_give_only_protocol_errors(items: list[bytes]) -> None:
    sender, receiver = answered(FileOffer("a", 100))
    for item in items:
        for core in (sender, receiver):
            try:
                core.on_item(item)
            except ProtocolError:
                pass


def test_items_after_the_verdict_are_refused() -> None:
    sender, receiver = answered(FileOffer("a", 0))
    receiver.on_item(sender.start_item(0))
    receiver.on_item(sender.end_item(EMPTY))
    verdict = receiver.verdict_item(FileVerdict(FileVerdictCode.OK, "", EMPTY))
    sender.on_item(verdict)
    with pytest.raises(ProtocolError):
        sender.on_item(verdict)
    with pytest.raises(ProtocolError):
        receiver.on_item(b"more")
    with pytest.raises(LocalProtocolError):
        receiver.verdict_item(FileVerdict(FileVerdictCode.FAILED))


def test_steps_out_of_order_are_the_shells_own_mistake() -> None:
    sender, receiver = FileSender(FileOffer("a", 3)), FileReceiver()
    for call, *arguments in (
        (sender.start_item, 0),
        (sender.data_item, b"x"),
        (sender.end_item, EMPTY),
        (receiver.answer_item, 0, EMPTY),
        (receiver.verdict_item, FileVerdict(FileVerdictCode.OK, "", EMPTY)),
    ):
        misuse: Any = call
        with pytest.raises(LocalProtocolError):
            misuse(*arguments)
    sender, receiver = answered(FileOffer("a", 3))
    with pytest.raises(LocalProtocolError):
        sender.start_item(4)
    receiver = FileReceiver()
    receiver.on_item(FileSender(FileOffer("a", 3)).first_item())
    with pytest.raises(LocalProtocolError):
        receiver.answer_item(4, EMPTY)


def test_a_long_text_is_cut_and_an_unknown_code_still_refuses() -> None:
    sender, receiver = answered(FileOffer("a", 3))
    got = sender.on_item(receiver.verdict_item(FileVerdict(FileVerdictCode.FAILED, "ü" * 5_000)))
    assert isinstance(got, FileVerdict) and len(got.text.encode()) <= 1_024 and not got.ok
    sender, _ = answered(FileOffer("a", 3))
    assert sender.on_item(cbor2.dumps({"kind": "verdict", "code": "later"})) == FileVerdict(FileVerdictCode.FAILED)
    sender, _ = answered(FileOffer("a", 3))
    with pytest.raises(ProtocolError):
        sender.on_item(cbor2.dumps({"kind": "verdict", "code": "failed", "text": 7}))
