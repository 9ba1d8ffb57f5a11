"""A subscriber of p2pd in a process of its own: go drops what its subscriber does not read at once.

Arguments: the control socket, the topic. Prints the number of distinct messages so far, whenever it has changed.
"""

import socket
import sys
import time


def varint(data: bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def prefixed(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2, len(data)]) + data


def main(path: str, topic: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    connection.connect(path)
    request = b"\x08\x08" + prefixed(8, b"\x08\x03" + prefixed(2, topic.encode()))
    connection.sendall(bytes([len(request)]) + request)
    rest = bytearray()
    found: dict[bytes, None] = {}
    is_answered = False
    printed, printed_at = -1, 0.0
    connection.settimeout(0.1)
    while True:
        try:
            data = connection.recv(1 << 20)
            if not data:
                return
            rest += data
        except TimeoutError:
            pass
        at = 0
        while at < len(rest):
            try:
                size, start = varint(rest, at)
            except IndexError:
                break
            if start + size > len(rest):
                break
            if is_answered:
                found[bytes(rest[start : start + size])] = None
            is_answered = True
            at = start + size
        del rest[:at]
        if is_answered and len(found) != printed and time.monotonic() > printed_at + 0.05:
            printed, printed_at = len(found), time.monotonic()
            print(printed, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
