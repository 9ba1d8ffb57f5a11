"""The peer gater: while validation is overloaded, messages of peers that waste it are dropped at random.

Like go's: a peer is judged by what its address sent lately. Off unless a :class:`GaterParams` is given to the router.
"""

from dataclasses import dataclass

from dep2p.types import Rng


@dataclass(frozen=True, slots=True, kw_only=True)
class GaterParams:
    """Parameters of the gater."""

    threshold: float = 0.33
    """Throttled messages over validated ones from which the gater acts."""
    quiet_s: float = 60.0
    """Seconds after the last throttled message until the gater stops acting."""
    global_decay: float = 0.9628
    """Per second, for the ratio: 1 % is left after two minutes."""
    source_decay: float = 0.99872
    """Per second, for a peer's counters: 1 % is left after an hour."""
    duplicate_weight: float = 0.125
    ignore_weight: float = 1.0
    reject_weight: float = 16.0
    retain_s: float = 21_600.0
    """How long an address is remembered after its last peer left."""
    sources_max: int = 4_096

    def __post_init__(self) -> None:
        if not (0 < self.global_decay < 1 and 0 < self.source_decay < 1):
            raise ValueError("the gater's decays are between 0 and 1")
        if min(self.threshold, self.duplicate_weight, self.ignore_weight, self.reject_weight) < 0:
            raise ValueError("the gater's threshold and weights cannot be negative")
        if self.sources_max < 1:
            raise ValueError("sources_max must be at least 1")


class Source:
    """Counts of the messages from one address."""

    __slots__ = ("deliver", "duplicate", "expires", "ignore", "peers", "reject")

    def __init__(self) -> None:
        self.peers: int = 0
        self.expires: float = 0.0
        self.deliver: float = 0.0
        self.duplicate: float = 0.0
        self.ignore: float = 0.0
        self.reject: float = 0.0


class PeerGater:
    """Counts per address, and the decision whether a peer's messages are looked at."""

    __slots__ = ("_last_decay", "_last_throttle", "_params", "_rng", "_sources", "_throttled", "_validated")

    def __init__(self, params: GaterParams, rng: Rng, now: float) -> None:
        self._params = params
        self._rng = rng
        self._sources: dict[str, Source] = {}
        self._throttled = 0.0
        self._validated = 0.0
        self._last_throttle: float | None = None
        self._last_decay = now

    def connect(self, address: str) -> Source:
        """Count a peer that came from this address (its id, when the address is unknown)."""
        source = self._sources.get(address)
        if source is None:
            if len(self._sources) >= self._params.sources_max:
                self._evict()
            source = self._sources[address] = Source()
        source.peers += 1
        return source

    def disconnect(self, source: Source, now: float) -> None:
        """Note that a peer of this address left."""
        source.peers -= 1
        if source.peers <= 0:
            source.expires = now + self._params.retain_s

    def validated(self) -> None:
        """Count a message that went into validation."""
        self._validated += 1.0

    def throttled(self, now: float) -> None:
        """Count a message that found validation full."""
        self._throttled += 1.0
        self._last_throttle = now

    def accepts(self, source: Source, now: float) -> bool:
        """Whether messages of this source are looked at now; control always is."""
        params = self._params
        if self._last_throttle is None or now - self._last_throttle > params.quiet_s:
            return True
        if self._throttled == 0 or (self._validated and self._throttled / self._validated < params.threshold):
            return True
        bad = (
            params.duplicate_weight * source.duplicate
            + params.ignore_weight * source.ignore
            + params.reject_weight * source.reject
        )
        if bad == 0:
            return True
        return self._rng.random() < (1.0 + source.deliver) / (1.0 + source.deliver + bad)

    def decay(self, now: float) -> None:
        """Let a second or more pass: counters decay, and addresses from which no peer came for long are forgotten."""
        steps = int(now - self._last_decay + 1e-9)
        if steps <= 0:
            return
        self._last_decay += steps
        params = self._params
        self._throttled *= params.global_decay**steps
        self._validated *= params.global_decay**steps
        if self._throttled < 0.01:
            self._throttled = 0.0
        factor = params.source_decay**steps
        for address, source in list(self._sources.items()):
            if source.peers <= 0 and source.expires <= now:
                del self._sources[address]
                continue
            source.deliver *= factor
            source.duplicate *= factor
            source.ignore *= factor
            source.reject *= factor

    def _evict(self) -> None:
        """Only addresses without a peer can go; there are no more peers than the router takes."""
        for address, source in self._sources.items():
            if source.peers <= 0:
                del self._sources[address]
                return
