"""Options of a router beside its parameters: scoring, filters, shared limits, traces."""

from collections.abc import Callable
from dataclasses import dataclass

from dep2p.gossipsub.publish_limits import PublishRate
from dep2p.gossipsub.scoring.params import ScoreParams
from dep2p.gossipsub.scoring.peer_gater import GaterParams
from dep2p.types import PeerId

SubscriptionFilter = Callable[[str], bool]
"""Whether peers' subscriptions to a topic are of interest."""

RecordOf = Callable[[PeerId], bytes]
"""The signed peer record of a connected peer; b"" when there is none."""


def no_record(_peer: PeerId) -> bytes:
    """Serve as a `RecordOf` that knows no record."""
    return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Options of one router.

    - ``scores``, ``gater``: None turns them off.
    - ``subscription_filter``: None remembers all subscriptions of peers, within the caps for one peer.
    - ``publish_rate``: shared by the routers of one node; None gives this one its own.
    - ``record_of``: signed records of connected peers, for peer exchange.
    - ``patterns``: names with wildcards are patterns, which match topics; see `dep2p.gossipsub.patterns`.
    - ``tracing``: libp2p's trace events among the effects.
    """

    scores: ScoreParams | None = None
    gater: GaterParams | None = None
    subscription_filter: SubscriptionFilter | None = None
    publish_rate: PublishRate | None = None
    record_of: RecordOf = no_record
    patterns: bool = False
    tracing: bool = False
