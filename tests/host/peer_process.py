"""Run by tests: a host in its own process. Arguments: [seed in hex] [listen address]."""

import sys

import trio

from dep2p.host.host import LibP2PHost
from dep2p.host.interface import ByteStream
from dep2p.identity import Identity


async def echo(stream: ByteStream) -> None:
    while data := await stream.read():
        await stream.write(data)
    await stream.close()


async def main() -> None:
    identity = Identity(bytes.fromhex(sys.argv[1])) if len(sys.argv) > 1 else Identity.generate()
    listen = sys.argv[2] if len(sys.argv) > 2 else "/ip4/127.0.0.1/tcp/0"
    async with LibP2PHost.open(identity, listen=[listen]) as host:
        host.set_stream_handler("/echo/1", echo)
        print(host.listen_addrs()[0], flush=True)
        await trio.sleep_forever()


trio.run(main)
