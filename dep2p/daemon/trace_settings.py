"""The trace of the node, from [trace]."""

from dataclasses import fields

from dep2p.config.trace import TraceConfig
from dep2p.tracing.settings import TraceSettings


def trace_settings(chosen: TraceConfig) -> TraceSettings:
    """Return the trace settings for `Node.open`. ``chosen`` has been checked."""
    return TraceSettings(**{field.name: getattr(chosen, field.name) for field in fields(TraceSettings)})
