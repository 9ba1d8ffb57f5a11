"""The content of a node's trace, the size of its files, and the disk space that they may take."""

from dataclasses import dataclass
from typing import Final

ROLL_BYTES_MIN: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """The settings of a trace. Raises ``ValueError`` for values that contradict each other."""

    rpcs: bool = False
    """Whether each RPC of pub/sub has an event: most of the bytes, and the only source about IWANT and IDONTWANT."""
    sample: float = 1.0
    """The share of messages whose events are written, by a hash of their ids: the same ones at every node."""
    roll_bytes: int = 67_108_864
    """Bytes at which a file is complete."""
    roll_s: float = 900.0
    """Seconds after which a file is complete."""
    disk_bytes_max: int = 4_294_967_296
    """Bytes of all files of this node in the directory; above it the oldest are removed."""
    age_max_s: float = 0.0
    """Seconds after which complete files are removed; 0 keeps them."""
    snapshot_s: float = 5.0
    """Seconds between two snapshots of meshes, scores, queues and round trips; 0 takes none."""
    clock_s: float = 60.0
    """Seconds between two readings of the clock of each connected member; 0 takes none."""

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample is {self.sample:g}: it must be above 0, and 1 for all messages")
        if self.roll_bytes < ROLL_BYTES_MIN:
            raise ValueError(f"roll_bytes is {self.roll_bytes}: it must be {ROLL_BYTES_MIN} or more")
        if self.disk_bytes_max < 2 * self.roll_bytes:
            raise ValueError(
                f"disk_bytes_max ({self.disk_bytes_max}) must hold two files of roll_bytes ({self.roll_bytes}): one "
                "grows while another is read"
            )
        for name, least in (("roll_s", 1.0), ("age_max_s", 0.0), ("snapshot_s", 0.0), ("clock_s", 0.0)):
            value = float(getattr(self, name))
            if not value >= least or value > 1e9:
                raise ValueError(f"{name} is {value:g}: it must be between {least:g} and 1e9 seconds")
