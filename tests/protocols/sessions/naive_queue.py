"""The ordered queue of XQI77/gateway_test, line for line: ours has to do better."""

import heapq
from collections.abc import Callable

TIMEOUT_S = 30
RETRIES_MAX = 3


class OldQueue:
    """`OrderedMessageQueue` of the original. ``send`` gives False when the write fails."""

    def __init__(self, send: Callable[[int, bytes], bool], items_max: int = 1_000) -> None:
        self.send = send
        self.items_max = items_max
        self.waiting: list[tuple[int, bytes, float]] = []
        self.sent: dict[int, tuple[bytes, float, int]] = {}
        self.next_seq = 1
        self.last_sent = 0
        self.acked = 0
        self.now = 0.0

    def enqueue(self, seq: int, data: bytes) -> str:
        if len(self.waiting) >= self.items_max:
            return "queue full"
        if seq == self.next_seq:
            if not self.send(seq, data):
                return "send failed"
            self.sent[seq] = (data, self.now, 0)
            self.next_seq += 1
            self.last_sent = seq
            self._pump()
        elif seq > self.next_seq:
            heapq.heappush(self.waiting, (seq, data, self.now))
        else:
            return "stale"
        return ""

    def _pump(self) -> None:
        while self.waiting and self.waiting[0][0] == self.next_seq:
            item = heapq.heappop(self.waiting)
            if not self.send(item[0], item[1]):
                heapq.heappush(self.waiting, item)
                break
            self.sent[item[0]] = (item[1], self.now, 0)
            self.next_seq += 1
            self.last_sent = item[0]

    def ack(self, seq: int) -> bool:
        """Every ack also resyncs. False is the original's "invalid ack"."""
        gone = [each for each in self.sent if each <= seq]
        for each in gone:
            del self.sent[each]
        self.resync(seq)
        return bool(gone)

    def resync(self, seq: int) -> None:
        for each in [each for each in self.sent if each <= seq]:
            del self.sent[each]
        if seq >= self.next_seq:
            self.next_seq = seq + 1
            self.last_sent = seq
            self.waiting = [each for each in self.waiting if each[0] > seq]
            heapq.heapify(self.waiting)
        self.acked = max(self.acked, seq)

    def tick(self, now: float) -> None:
        self.now = now
        for seq in [s for s, (_d, at, tries) in self.sent.items() if now - at > TIMEOUT_S and tries >= RETRIES_MAX]:
            del self.sent[seq]
        self.waiting = [each for each in self.waiting if now - each[2] <= TIMEOUT_S]
        heapq.heapify(self.waiting)
        # The original iterates over a Go map: in any order. Here in the reverse one, which is as good as any.
        for seq, (data, at, tries) in reversed(list(self.sent.items())):
            if now - at > TIMEOUT_S / 2 and tries < RETRIES_MAX and self.send(seq, data):
                self.sent[seq] = (data, now, tries + 1)


class OldSender:
    """`OrderedMessageSender`: takes the number, then encodes, then enqueues."""

    def __init__(self, queue: OldQueue, encode: Callable[[bytes], bytes]) -> None:
        self.queue = queue
        self.encode = encode
        self.seq = 0

    def push(self, data: bytes) -> str:
        self.seq += 1
        try:
            encoded = self.encode(data)
        except ValueError:
            return "encode failed"
        return self.queue.enqueue(self.seq, encoded)


class OldBindings:
    """`MessageOrderingManager` and the gateway's two ways to answer."""

    def __init__(self, push: Callable[[bytes], object]) -> None:
        self.push = push
        self.before: dict[int, list[bytes]] = {}
        self.after: dict[int, list[bytes]] = {}

    def answer_async(self, request_id: int, upstream: Callable[[], bytes]) -> None:
        request_id &= 0xFFFF_FFFF  # uint32(seq)
        try:
            response = upstream()
        except TimeoutError:
            return  # an error goes to the client; what is bound stays where it is
        for each in self.before.pop(request_id, []):
            self.push(each)
        self.push(response)
        for each in self.after.pop(request_id, []):
            self.push(each)

    def answer_sync(self, request_id: int, upstream: Callable[[], bytes]) -> None:
        """The login path."""
        self.push(upstream())
        for each in [*self.before.pop(request_id, []), *self.after.pop(request_id, [])]:
            self.push(each)
