"""Text and JSON forms of the commands' output. Pure: nothing here reads or writes a stream."""

import base64
from collections.abc import Mapping, Sequence
from typing import Final
from unicodedata import combining, east_asian_width

from dep2p.outside_text import one_line, styled_line

_KEY_PREFIX: Final = "12D3KooW"  # every Ed25519 peer id starts so
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def short_peer(peer: str) -> str:
    """Return a short form, ``12D3KooW…f3Qa``: enough to recognise a peer; commands accept it as an abbreviation."""
    return peer if len(peer) <= 16 else f"{peer[:8]}…{peer[-4:]}"


def address(addr: str) -> str:
    """Return a multiaddr without the peer id at its end; a relayed one names its relay.

    >>> address("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWRelay/p2p-circuit/p2p/12D3KooWPeer")
    '/ip4/192.0.2.7/tcp/4001 through relay 12D3KooWRelay'
    """
    before, circuit, _ = addr.partition("/p2p-circuit")
    direct, _, peer = before.partition("/p2p/")
    return f"{direct} through relay {short_peer(peer)}" if circuit else direct


def left_of(data_left_bytes: int | None, time_left_s: float | None) -> str:
    """Return what a relay still carries: ``126.0 KiB and 1m 40s left``; "" without a limit."""
    parts = [] if data_left_bytes is None else [byte_count(data_left_bytes)]
    parts += [] if time_left_s is None else [duration(int(time_left_s))]
    return f"{' and '.join(parts)} left" if parts else ""


def short_realm(realm_id: str) -> str:
    """The first eight digits of a realm id."""
    return realm_id if len(realm_id) <= 12 else f"{realm_id[:8]}…"


def peer_matches(peer: str, abbreviation: str) -> bool:
    """Whether the abbreviation (start, start after 12D3KooW, end, or ``start…end``) fits the peer id."""
    start, ellipsis, end = abbreviation.replace("...", "…").partition("…")
    if ellipsis:
        return peer.startswith(start) and peer.endswith(end)
    return peer.startswith(start) or peer.removeprefix(_KEY_PREFIX).startswith(start) or peer.endswith(start)


def duration(seconds: float) -> str:
    """``2h 14m``, ``3d 4h``, ``41s``, ``12.5 ms``: two units at most."""
    if seconds < 0:
        return "0s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    whole = int(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, secs = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (secs, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{value}{unit}" for value, unit in parts[:2] if value or len(parts) == 1)


def byte_count(count: float) -> str:
    """``14 B``, ``1.0 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_BYTE_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_BYTE_UNITS[unit]}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns two spaces apart, without trailing spaces; ``right`` names the columns to align right."""
    lines = [list(headings), *([styled_line(cell) for cell in row] for row in rows)]
    widths = [max(_cells(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            " " * (width - _cells(cell)) + cell if column in right else cell + " " * (width - _cells(cell))
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(text: str) -> int:
    """Count the columns of a terminal that the text takes: East Asian characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def text_of(data: bytes) -> str | None:
    """The payload as text when it is UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def payload(data: bytes) -> dict[str, object]:
    """The JSON form of a payload: ``data`` in base64, ``encoding``, and ``text`` when it is UTF-8."""
    fields: dict[str, object] = {"data": base64.b64encode(data).decode("ascii"), "encoding": "base64"}
    text = text_of(data)
    if text is not None:
        fields["text"] = text
    return fields


_HEADERS_SHOWN: Final = 200


def headers_text(headers: Mapping[str, object]) -> str:
    """Headers as ``  name=value …`` for a line about a message, escaped; at most 200 characters."""
    if not headers:
        return ""
    texts = [f"{name}={f'{len(value)} B' if isinstance(value, bytes) else value}" for name, value in headers.items()]
    text = " ".join(texts)
    return "  " + one_line(text if len(text) <= _HEADERS_SHOWN else text[: _HEADERS_SHOWN - 1] + "…")


def headers_json(headers: Mapping[str, object]) -> dict[str, object]:
    """Headers with bytes values as ``{"data", "encoding"}``."""
    return {key: payload(value) if isinstance(value, bytes) else value for key, value in headers.items()}
