"""Messages of the last heartbeats: for IHAVE, and to answer IWANT. Bounded in items and bytes."""

from collections import deque

from dep2p.gossipsub.rpc import RpcMessage
from dep2p.types import PeerId


class MessageCache:
    """A sliding window of heartbeats."""

    __slots__ = (
        "_bytes_max",
        "_entries",
        "_gossip_windows",
        "_items_max",
        "_transmissions",
        "_windows",
        "evicted",
        "payload_bytes",
    )

    def __init__(self, windows: int, gossip_windows: int, *, items_max: int, bytes_max: int) -> None:
        self._windows: deque[dict[str, deque[bytes]]] = deque(({} for _ in range(windows)), maxlen=windows)
        self._gossip_windows = gossip_windows
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._entries: dict[bytes, RpcMessage] = {}
        self._transmissions: dict[bytes, dict[PeerId, int]] = {}
        self.payload_bytes: int = 0
        """Bytes of payload and headers kept."""
        self.evicted: int = 0
        """Messages dropped before their time for want of room."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._entries

    def put(self, message: RpcMessage) -> None:
        """Keep a message in the newest window. Call it once per id."""
        entries = self._entries
        message_id = message.id
        if message_id in entries:
            return
        entries[message_id] = message
        self.payload_bytes += len(message.data) + message.headers.size_bytes
        window = self._windows[0]
        ids = window.get(message.topic)
        if ids is None:
            ids = window[message.topic] = deque()
        ids.append(message_id)
        while len(entries) > self._items_max or self.payload_bytes > self._bytes_max:
            self._evict_oldest()

    def get(self, message_id: bytes) -> RpcMessage | None:
        """Return the message, or None when it is gone."""
        return self._entries.get(message_id)

    def count_transmission(self, message_id: bytes, peer: PeerId) -> int:
        """Count one more answer to this peer's asking; returns how many that makes."""
        counts = self._transmissions.setdefault(message_id, {})
        count = counts.get(peer, 0) + 1
        counts[peer] = count
        return count

    def gossip_ids(self, topic: str) -> list[bytes]:
        """Return the ids to announce, newest window first."""
        found: list[bytes] = []
        for index in range(self._gossip_windows):
            ids = self._windows[index].get(topic)
            if ids:
                found.extend(ids)
        return found

    def shift(self) -> None:
        """Forget the oldest window, since a heartbeat has passed."""
        windows = self._windows
        oldest = windows[-1]
        for ids in oldest.values():
            for message_id in ids:
                self._remove(message_id)
        if oldest:
            oldest.clear()
        windows.rotate(1)

    def _evict_oldest(self) -> None:
        for window in reversed(self._windows):
            for topic, ids in window.items():
                self._remove(ids.popleft())
                if not ids:
                    del window[topic]
                self.evicted += 1
                return

    def _remove(self, message_id: bytes) -> None:
        message = self._entries.pop(message_id)
        self.payload_bytes -= len(message.data) + message.headers.size_bytes
        if self._transmissions:
            self._transmissions.pop(message_id, None)
