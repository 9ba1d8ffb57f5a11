"""Requests over a topic: answers come until the quorum or the deadline, and hostile answers change nothing."""

import pytest
import trio
import trio.testing

from dep2p import Node, NoPeersSubscribedError, RequestTimeoutError, TopicMessage
from dep2p.errors import Dep2pError, HandlerError, NotInRealmError
from dep2p.gossipsub.headers import OwnHeader, message_headers
from dep2p.protocols.messaging.answers import ANSWER_NAME, TOKEN_HEADER, TopicAnswer
from dep2p.services.gathers import Gathering
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import joined, pubsub_nodes, until

Clock = trio.testing.MockClock


async def answering(
    node: Node, body: bytes, after_s: float = 0.0, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer every question in "chat" with ``body``; empty: say that it cannot be."""
    async with node.subscribe("chat") as messages:
        task_status.started()
        async for message in messages:
            assert isinstance(message, TopicMessage) and message.wants_answer
            await trio.sleep(after_s)
            if body:
                await message.reply(body + message.body, headers={"by": "me"})
            else:
                await message.fail("no stock")


async def all_of(answers: Gathering) -> list[TopicAnswer]:
    with trio.fail_after(60):
        return [each async for each in answers]


async def test_answers_come_until_the_quorum_and_the_result_says_who_was_silent(autojump_clock: Clock) -> None:
    async with pubsub_nodes(4) as nodes, trio.open_nursery() as nursery:
        await joined(nodes)
        for number, node in enumerate(nodes[1:], 1):
            await nursery.start(answering, node, b"a%d " % number, number * 0.1)
        began = trio.current_time()
        async with nodes[0].gather("chat", b"?", quorum=2, timeout_s=5.0, headers={"item": "nuts"}) as answers:
            found = await all_of(answers)
            assert trio.current_time() - began < 1
            assert [each.body for each in found] == [b"a1 ?", b"a2 ?"]
            assert [each.peer for each in found] == [node.peer_id for node in nodes[1:3]]
            assert dict(found[0].headers) == {"by": "me"} and not found[0].is_error
            result = answers.result()
        assert result.answered == tuple(node.peer_id for node in nodes[1:3])
        assert result.missing == (nodes[3].peer_id,) and result.has_quorum and not result.failed
        await until(lambda: nodes[3].counters().get("gathers_own_answers_late") == 1)
        assert nodes[0].counters()["gathers_answers_late"] == 1
        nursery.cancel_scope.cancel()


async def test_a_gather_ends_at_its_deadline_with_the_answers_that_came(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes, trio.open_nursery() as nursery:
        await joined(nodes)
        await nursery.start(answering, nodes[1], b"")
        await nursery.start(answering, nodes[2], b"late", 3.0)
        began = trio.current_time()
        async with nodes[0].gather("chat", b"?", quorum=1) as answers:
            (only,) = await all_of(answers)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.01)
        assert (only.error, only.body, only.is_error) == ("no stock", b"", True)
        result = answers.result()
        assert not result.has_quorum and result.failed == {nodes[1].peer_id: "no stock"}
        assert result.missing == (nodes[2].peer_id,)
        await until(lambda: nodes[2].counters().get("gathers_own_answers_late") == 1)
        nursery.cancel_scope.cancel()


async def test_programs_of_the_same_node_answer_and_count_as_one_member(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,), trio.open_nursery() as nursery:
        for number in range(2):
            await nursery.start(answering, node, b"%d" % number, number + 0.1)
        async with node.gather("chat", b"?", timeout_s=4.0) as answers:
            (only,) = await all_of(answers)
        assert (only.peer, only.body) == (node.peer_id, b"0?")
        assert answers.result().refused == {"duplicate": 1}
        nursery.cancel_scope.cancel()


async def test_a_plain_message_wants_no_answer(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            await a.publish(b"x", headers={"reply": "please"})
            message = await anext(messages)
            assert isinstance(message, TopicMessage) and not message.wants_answer
            with pytest.raises(ValueError, match="waits for no answer"):
                await message.reply(b"y")
            with pytest.raises(ValueError, match="waits for no answer"):
                await message.fail("y")


@pytest.mark.parametrize(
    "own",
    [
        {1: b"short", 2: 1000},
        {1: bytes(16)},
        {1: bytes(16), 2: 0},
        {1: bytes(16), 2: -5},
        {1: bytes(16), 2: 1 << 62},
        {1: bytes(16), 2: True},
        {1: "a text of sixteen", 2: 1000},
        {1: [bytes(16)], 2: 1000},
        {77: 1},
    ],
)
async def test_a_malformed_question_is_a_plain_message(autojump_clock: Clock, own: dict[int, object]) -> None:
    async with pubsub_nodes(2) as nodes:
        _, b = await joined(nodes)
        async with b.subscribe() as messages:
            await nodes[0].pubsub().publish("chat", b"x", headers=message_headers(None, own))
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            assert (message.body, message.wants_answer) == (b"x", False)


async def test_hostile_answers_are_refused_and_counted(autojump_clock: Clock) -> None:
    async with pubsub_nodes(3) as nodes, trio.open_nursery() as nursery:
        _, b, _ = await joined(nodes)
        author, honest, hostile = nodes

        async def attack(token: bytes) -> None:
            async def send(body: bytes, **headers: object) -> bytes:
                given = {f"$dep2p/{name}": value for name, value in headers.items()}
                return await hostile.request(author.peer_id, ANSWER_NAME, body, headers=given)

            assert await send(b"guess", token=bytes(16)) == b"unknown"
            for malformed in ({}, {"token": "text"}, {"token": b"x"}, {"token": token, "failed": 1}):
                with pytest.raises(HandlerError):
                    await send(b"x", **malformed)
            with pytest.raises(HandlerError):
                await send(b"\xff", token=token, failed=True)
            with pytest.raises(HandlerError, match="at most 1024"):
                await send(b"a" * 1_025, token=token, failed=True)
            assert await send(b"first", token=token, other="not the app's") == b"taken"
            for _ in range(50):
                assert await send(b"again", token=token) == b"duplicate"

        async with b.subscribe() as messages, author.gather("chat", b"?", quorum=2, timeout_s=60.0) as answers:
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            token = message.headers.own[OwnHeader.REPLY_TOKEN]
            assert isinstance(token, bytes)
            await attack(token)
            with pytest.raises(ValueError, match="dep2p's own"):
                await message.reply(b"x", headers={TOKEN_HEADER: b"x"})
            assert await message.reply(b"honest") == "taken"
            found = await all_of(answers)
        assert [(each.peer, each.body) for each in found] == [
            (hostile.peer_id, b"first"),
            (honest.peer_id, b"honest"),
        ], "an answer is of the member that sent it, and of nobody else"
        assert dict(found[0].headers) == {}
        assert answers.result().refused == {"duplicate": 50}
        counts = author.counters()
        assert counts["gathers_answers_malformed"] == 6 and counts["gathers_answers_unknown"] == 1
        assert counts["gathers_answers_duplicate"] == 50
        assert author.services().gathers.stats() == {"open": 0, "waiting_bytes": 0}
        nursery.cancel_scope.cancel()


async def test_an_app_cannot_take_the_name_of_answers(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        with pytest.raises(ValueError, match="has a handler already"):

            @node.on_request(ANSWER_NAME)
            async def steal(_request: object) -> bytes:
                return b""


async def test_a_gather_without_subscribers_or_with_wrong_arguments_fails_at_once_and_leaves_nothing(
    autojump_clock: Clock,
) -> None:
    async with pubsub_nodes(1) as (node,):
        wrong: list[tuple[type[Exception], dict[str, object]]] = [
            (NoPeersSubscribedError, {}),
            (ValueError, {"quorum": 0}),
            (ValueError, {"quorum": 4_097}),
            (ValueError, {"timeout_s": 0.0}),
            (ValueError, {"timeout_s": 1e9}),
            (ValueError, {"headers": {"a": 1.5}}),
        ]
        for kind, options in wrong:
            with pytest.raises(kind):
                async with node.gather("empty", b"?", **options):  # type: ignore[arg-type]  # pyright: ignore
                    pass
        assert node.services().gathers.stats() == {"open": 0, "waiting_bytes": 0}


async def test_a_publish_that_takes_longer_than_the_gather_ends_it(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        async with node.subscribe("chat", buffer_items=1, on_full="pause"):
            await node.publish("chat", b"x")
            with pytest.raises(RequestTimeoutError, match="nothing could be published"):
                async with node.gather("chat", b"?"):
                    pass


async def test_an_author_that_is_gone_is_an_error_of_the_reply(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    async with pubsub_nodes(2, network=network) as nodes:
        _, b = await joined(nodes)
        async with b.subscribe() as messages, nodes[0].gather("chat", b"?", timeout_s=5.0):
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            network.partition(nodes[0].peer_id, nodes[1].peer_id)
            with pytest.raises(Dep2pError):
                await message.reply(b"x")


async def test_the_public_network_has_no_gathers(autojump_clock: Clock) -> None:
    host = MemoryNetwork().host()
    async with Node.open(host=host, identity=host.identity, public_pubsub=True) as node:
        with pytest.raises(NotInRealmError):
            node.gather("chat", b"?")
