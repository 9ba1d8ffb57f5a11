"""Cables between network namespaces, carried by this process: delay, loss, rate and cuts, each changeable at any time.

Kernels without netem, as those of many containers are, have no way to make a link slow. A cable here is a pair of TAP
devices, one for each end, and this process copies the frames from one to the other. A router's translation is a TUN
device that this process reads and writes.
"""

import errno
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_FRAME_BYTES_MAX: Final = 65_536
_FRAMES_AT_ONCE: Final = 64
_QUEUED_MAX: Final = 10_000
"""Frames that wait on one way of a cable; further ones are lost, as in any queue."""


@dataclass(slots=True)
class Weather:
    """The state of a cable, the same both ways."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of frames that are lost, from 0 to 1."""
    bytes_per_s: float = float("inf")
    is_cut: bool = False
    frames: int = 0
    """Frames that have come to the cable, lost ones included."""


def open_device(name: str, *, is_tap: bool) -> int:
    """Make a TAP (frames) or TUN (packets) device, and return its file. The device goes when the file is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = (_IFF_TAP if is_tap else _IFF_TUN) | _IFF_NO_PI
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Way:
    """One way of a cable."""

    def __init__(self, out: int, weather: Weather) -> None:
        self.out = out
        self.weather = weather
        self.free_at_s = 0.0
        self.due_s = 0.0
        self.queued = 0


class Wire:
    """All cables and translations of a laboratory, in one thread."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._fds: list[int] = []
        self._due: list[tuple[float, int, bytes, _Way]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def cable(self, name_a: str, name_b: str) -> Weather:
        """Make two devices that are joined; return the weather between them, which may be changed."""
        weather = Weather()
        a, b = open_device(name_a, is_tap=True), open_device(name_b, is_tap=True)
        self._add(a, self._forward(_Way(b, weather)))
        self._add(b, self._forward(_Way(a, weather)))
        return weather

    def translation(self, name: str, translate: Callable[[bytes], bytes | None]) -> None:
        """Make a device whose packets come back translated."""
        fd = open_device(name, is_tap=False)

        def take(packet: bytes) -> None:
            answer = translate(packet)
            if answer is not None:
                _write(fd, answer)

        self._add(fd, take)

    def close(self) -> None:
        """End the thread, and with it all devices. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._selector.close()
        for fd in [*self._fds, self._wake_read, self._wake_write]:
            os.close(fd)

    def _add(self, fd: int, take: Callable[[bytes], None]) -> None:
        self._fds.append(fd)
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, take)
        self._wake()

    def _wake(self) -> None:
        os.write(self._wake_write, b"x")

    def _forward(self, way: _Way) -> Callable[[bytes], None]:
        def take(frame: bytes) -> None:
            weather = way.weather
            weather.frames += 1
            if weather.is_cut or (weather.loss and self._random.random() < weather.loss):
                return
            now_s = due_s = time.monotonic()
            if weather.bytes_per_s != float("inf"):
                way.free_at_s = due_s = max(now_s, way.free_at_s) + len(frame) / weather.bytes_per_s
            due_s = way.due_s = max(way.due_s, due_s + weather.delay_s)  # frames do not overtake each other
            if due_s <= now_s and not way.queued:
                _write(way.out, frame)
            elif way.queued < _QUEUED_MAX:
                way.queued += 1
                heapq.heappush(self._due, (due_s, next(self._order), frame, way))

        return take

    def _run(self) -> None:
        while not self._is_closing:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _due_s, _order, frame, way = heapq.heappop(self._due)
                way.queued -= 1
                _write(way.out, frame)
            wait_s = self._due[0][0] - now_s if self._due else None
            for key, _events in self._selector.select(wait_s):
                take: Callable[[bytes], None] | None = key.data
                for _ in range(_FRAMES_AT_ONCE):
                    try:
                        frame = os.read(key.fd, _FRAME_BYTES_MAX)
                    except OSError:
                        break  # nothing more, or the device is not up yet
                    if take is None:
                        break
                    take(frame)


def _write(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError as error:
        # The device is down or gone, its queue is full, or it does not take the packet: it is lost.
        if error.errno not in (errno.EIO, errno.EBADFD, errno.EAGAIN, errno.ENOBUFS, errno.EINVAL):
            raise
