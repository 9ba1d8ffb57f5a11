"""The trace of the node as [trace] wants it."""

from dataclasses import fields

from dep2p.config.config_trace import TraceConfig
from dep2p.tracing.settings import TraceSettings


def trace_settings(chosen: TraceConfig) -> TraceSettings:
    """What `Node.open` takes. ``chosen`` has been checked."""
    return TraceSettings(**{field.name: getattr(chosen, field.name) for field in fields(TraceSettings)})
