"""Ask any member that offers a service (node).

Shows: Node.on_request, Node.request_any, Node.offered_services, Node.service_info, ServiceMember,
ServiceMemberInfo, ServiceOffer, ServiceOptions, AnyOptions
"""

import trio

from dep2p import Request
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(3) as (ann, bob, eve):
        for node in (ann, bob):

            @node.on_request("resize", group="workers", version="1.2")
            async def resize(request: Request) -> bytes:
                return request.body[:4]

        await trio.sleep(2)  # members hear of a new offer within a second
        print(await eve.request_any("resize", b"large photo", version="1.2", idempotent=True))  # b'larg'
        print({member.offer.group for member in eve.offered_services()["resize"]})  # {'workers'}
        print(len(await eve.service_info("resize")))  # 2


trio.run(main)
