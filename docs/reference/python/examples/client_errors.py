"""Tell errors apart (client).

Shows: Client.disconnect, Client.connect, Client.members, Client.open, Client.peer_id, Client.request, code_of,
NoHandlerError, HandlerError, ControlError, Dep2pError, NotInRealmError, ReconnectOptions
"""

import asyncio

from dep2p.client import Client, ControlError, Dep2pError, HandlerError, NotInRealmError, code_of


async def main() -> None:
    async with Client.open(call_reconnect_s=10) as client:
        me = await client.peer_id()
        try:
            await client.request(me, "nothing of this name", b"")
        except HandlerError as error:
            print("the handler failed:", error)
        except Dep2pError as error:  # the base of all that dep2p raises on purpose
            print(type(error).__name__, code_of(error))  # NoHandlerError D5003
        try:
            await client.members("nowhere")
        except NotInRealmError as error:
            print(code_of(error))  # D4003
        try:
            await client.connect("/ip4/wrong")
        except ControlError as error:  # a problem without an exception of its own
            print(error.code)  # D4004
        print(await client.disconnect(me))  # False


asyncio.run(main())
