"""The router's parameters and the public network, from [pubsub]."""

from dataclasses import replace

from dep2p.config.loader import PubSubConfig
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.signing.policy import SigningPolicy
from dep2p.limits import Limits
from dep2p.pubsub.service import params_from
from dep2p.pubsub.wire_formats import PublicPubSub


def gossip_params(chosen: PubSubConfig, limits: Limits) -> GossipParams:
    """Return the parameters of every network of the node. ``chosen`` has been checked."""
    standard = GossipParams()
    return replace(
        params_from(limits),
        d=chosen.d,
        d_lo=chosen.d_lo,
        d_hi=chosen.d_hi,
        d_score=min(standard.d_score, chosen.d),
        d_out=min(standard.d_out, chosen.d_lo - 1, chosen.d // 2),
        d_lazy=chosen.d_lazy,
        heartbeat_interval_s=chosen.heartbeat_s,
        fanout_ttl_s=chosen.fanout_ttl_s,
        mcache_windows=chosen.history_length,
        mcache_gossip_windows=chosen.history_gossip,
        flood_publish=chosen.flood_publish,
    )


def public_pubsub(chosen: PubSubConfig) -> bool | PublicPubSub:
    """Return the value of `Node.open`'s argument for the public network."""
    if not chosen.public:
        return False
    signs = chosen.public_signing == "strict_sign"
    return PublicPubSub(
        policy=SigningPolicy.STRICT_SIGN if signs else SigningPolicy.STRICT_NO_SIGN,
        message_ids=None if chosen.public_message_ids == "auto" else chosen.public_message_ids,
    )
