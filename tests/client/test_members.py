"""The client's calls about members, under asyncio and trio, against a control API over a fake node."""

import pytest

from dep2p.client import Client, ControlError, MemberUpdate, ServiceOffer
from dep2p.errors import NotInRealmError
from dep2p.realm.interface import MemberEvent
from tests.client.test_client import Run, in_api, run, served
from tests.daemon.api.fake_node import ANN
from tests.daemon.api.harness import Served

__all__ = ["run", "served"]

OFFER = ServiceOffer("resize", "workers", "1.2")


def test_fields_are_set_one_by_one_and_shown(served: Served, run: Run) -> None:
    async def body(client: Client) -> None:
        assert await client.fields() == {}
        assert await client.set_fields({"app": "mailer", "load": "1"}) == {"app": "mailer", "load": "1"}
        assert await client.set_fields({"load": None, "status": "ü"}, realm="team") == {"app": "mailer", "status": "ü"}
        assert await client.fields(realm="team") == {"app": "mailer", "status": "ü"}
        for wrong in ({"a b": "x"}, {"status": "\x1b[2J"}, {"status": "x" * 257}, {str(n): "" for n in range(17)}):
            with pytest.raises(ControlError) as refused:
                await client.set_fields(wrong)
            assert refused.value.code == "D1005" and refused.value.problem["field"] == "fields"
        with pytest.raises(NotInRealmError):
            await client.set_fields({"a": "x"}, realm="nowhere")
        with pytest.raises(NotInRealmError):
            await client.fields(realm="nowhere")
        assert await client.fields() == {"app": "mailer", "status": "ü"}

    run(body)


def test_members_are_listed_with_what_they_say(run: Run) -> None:
    async def body(client: Client) -> None:
        ann = next(each for each in await client.members("team") if each.peer == ANN)
        assert ann.fields == {"status": "at lunch\x1b[2J"}
        assert [(each.name, each.group, each.version, each.schema) for each in ann.services] == [
            ("resize", "workers", "1.2", "")
        ]

    run(body)


def test_members_are_watched_with_what_they_say(served: Served, run: Run) -> None:
    realm_id = served.node.realm("team").realm_id

    async def body(client: Client) -> None:
        async with client.watch_members() as changes, client.watch_members(realm="team") as in_team:
            await in_api(served, served.node.tell, MemberEvent("changed", ANN))
            expected = MemberUpdate(
                kind="changed",
                peer=ANN,
                realm=realm_id,
                state="up",
                fields={"status": "at lunch\x1b[2J"},
                services=(OFFER,),
            )
            assert await anext(changes) == expected == await anext(in_team)
            await in_api(served, served.node.tell, MemberEvent("left", ANN))
            assert (await anext(changes)) != expected
        with pytest.raises(NotInRealmError):
            async with client.watch_members(realm="nowhere"):
                pass

    run(body)
