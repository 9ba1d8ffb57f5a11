"""The queues of the node, from [queues]."""

from dep2p.config.loader import Config
from dep2p.protocols.queues.options import QueueOptions
from dep2p.queues.access import Access, parse_who
from dep2p.queues.settings import QueueSettings


def queue_settings(config: Config) -> QueueSettings:
    """Return the queue settings for `Node.open`. ``config`` has been checked; raises ``ValueError`` for settings that
    contradict each other."""
    chosen = config.queues
    defaults = QueueOptions(
        msg_timeout_s=chosen.msg_timeout_s,
        msg_timeout_max_s=max(QueueOptions().msg_timeout_max_s, chosen.msg_timeout_s),
        max_attempts=chosen.max_attempts,
        items_max=chosen.items_max,
        bytes_max=chosen.bytes_max,
        message_bytes_max=config.limits.message_bytes_max,
    )
    access = Access(parse_who(chosen.publish), parse_who(chosen.consume), parse_who(chosen.administer))
    return QueueSettings(
        store=chosen.store,
        sync=chosen.sync,
        standby=chosen.standby,
        defaults=defaults,
        access=access,
        create=parse_who(chosen.create),
    )
