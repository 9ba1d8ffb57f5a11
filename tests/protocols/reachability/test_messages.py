"""AutoNAT's messages: bytes by the specification, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.protocols.reachability.messages import (
    ADDRS_MAX,
    DATA_BYTES_MAX,
    NONCE_MAX,
    DialData,
    DialDataRequest,
    DialMessage,
    DialRequest,
    DialResponse,
    DialStatus,
    ResponseStatus,
    decode_dial_back,
    decode_dial_back_response,
    decode_dial_message,
    encode_dial_back,
    encode_dial_back_response,
    encode_dial_message,
)

WIRE: list[tuple[DialMessage, str]] = [
    (DialRequest((b"\x04\x01",), 1), "0a0d0a020401110100000000000000"),
    (DialResponse(ResponseStatus.OK, 0, DialStatus.OK), "120608c80118c801"),
    (DialResponse(ResponseStatus.OK, 2, DialStatus.DIAL_ERROR), "120708c80110021864"),
    (DialResponse(ResponseStatus.REQUEST_REJECTED), "12020864"),
    (DialResponse(ResponseStatus.INTERNAL_ERROR), "1200"),
    (DialDataRequest(0, 30_000), "1a0410b0ea01"),
    (DialData(3), "22050a03000000"),
]


@pytest.mark.parametrize(("message", "wire"), WIRE)
def test_messages_have_the_bytes_of_the_specification(message: DialMessage, wire: str) -> None:
    assert encode_dial_message(message).hex() == wire
    assert decode_dial_message(bytes.fromhex(wire)) == message


@given(st.lists(st.binary(max_size=64), max_size=ADDRS_MAX), st.integers(0, NONCE_MAX))
def test_a_request_comes_back_as_it_was(addrs: list[bytes], nonce: int) -> None:
    request = DialRequest(tuple(addrs), nonce)
    assert decode_dial_message(encode_dial_message(request)) == request


@given(st.binary(max_size=200))
def test_other_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (decode_dial_message, decode_dial_back, decode_dial_back_response):
        try:
            decode(data)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ("", "no message"),
        ("2a00", "no message"),  # a field of a later version alone
        ("12001200", "two messages"),
        ("120308c901", "status"),
        ("12021801", "status"),
        ("12020a00", "wire type"),
        ("0a021001", "wire type"),
        ("0a051101000000", "cut off"),
        ("120508", "cut off"),
        ("1001", "wire type"),
    ],
)
def test_what_is_no_message_is_refused(wire: str, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode_dial_message(bytes.fromhex(wire))


def test_fields_of_later_versions_are_skipped() -> None:
    later = bytes.fromhex("2a0101120808c80118c8012000")
    assert decode_dial_message(later) == DialResponse(ResponseStatus.OK, 0, DialStatus.OK)


def test_sizes_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="addresses"):
        decode_dial_message(encode_dial_message(DialRequest((b"a",) * (ADDRS_MAX + 1), 0)))
    with pytest.raises(ProtocolError):
        decode_dial_message(encode_dial_message(DialRequest((b"a" * 513,), 0)))
    with pytest.raises(ProtocolError):
        decode_dial_message(encode_dial_message(DialData(DATA_BYTES_MAX + 1)))


@pytest.mark.parametrize("nonce", [0, 1, NONCE_MAX])
def test_a_nonce_comes_back_as_it_was(nonce: int) -> None:
    assert decode_dial_back(encode_dial_back(nonce)) == nonce


def test_a_nonce_that_is_missing_or_of_another_form_is_refused() -> None:
    for wire in ("", "0801", "1001", "09010000"):
        with pytest.raises(ProtocolError):
            decode_dial_back(bytes.fromhex(wire))


def test_the_answer_to_a_nonce_is_ok_or_an_error() -> None:
    decode_dial_back_response(encode_dial_back_response())
    decode_dial_back_response(bytes.fromhex("0800"))
    with pytest.raises(ProtocolError, match="nonce"):
        decode_dial_back_response(bytes.fromhex("0801"))
