"""Cut and delay real TCP connections.

Shows: FaultProxy.open, FaultProxy.forward, FaultProxy.connections, FaultProxy.cut, FaultProxy.hold,
FaultProxy.resume, FaultProxy
"""

import trio

from dep2p.testing import FaultProxy


async def echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def main() -> None:
    async with FaultProxy.open() as proxy, trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(trio.serve_tcp, echo, 0)
        port = await proxy.forward("127.0.0.1", listeners[0].socket.getsockname()[1])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"hello")
        print(await stream.receive_some(), proxy.connections)  # b'hello' 1

        proxy.hold()  # nothing passes, and the connection stays open
        await stream.send_all(b"held back")
        proxy.resume()
        print(await stream.receive_some())  # b'held back'

        proxy.cut()  # every connection is reset
        try:
            await stream.receive_some()
        except trio.BrokenResourceError:
            print("cut")  # cut
        await stream.aclose()
        nursery.cancel_scope.cancel()


trio.run(main)
