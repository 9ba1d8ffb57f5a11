"""Trace a node for a while.

Shows: Node.tracer, Tracer.start, Tracer.stop, Tracer.status, Node.publish, Tracer, TraceSettings, TraceStatus
"""

import tempfile
from pathlib import Path

import trio

from dep2p import TraceSettings
from dep2p.testing import open_nodes


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_nodes(2) as (ann, _bob):
            await ann.tracer.start(Path(folder), TraceSettings())
            await ann.publish("chat", b"hello", on_no_peers="ok")
            print(ann.tracer.status().is_on)  # True
            status = await ann.tracer.stop("enough")
            print(status.is_on, status.files, status.directory == folder)  # False 1 True


trio.run(main)
