"""pynsq, driven by lines of JSON: a reader when a channel is given, else a writer."""
# mypy: ignore-errors
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import json
import sys
import threading

import nsq
from tornado.ioloop import IOLoop

options = json.loads(sys.argv[1])
address = options["address"]
held = {}


def tell(**fields):
    print(json.dumps(fields), flush=True)


def on_message(message):
    message.enable_async()
    held[message.id.decode()] = message
    tell(event="message", id=message.id.decode(), attempts=message.attempts, body=message.body.decode())


def answer(number):
    def done(_connection, data):
        tell(event="answer", number=number, error=str(data) if isinstance(data, Exception) else None)

    return done


def do(command):
    kind, number = command["do"], command.get("number")
    if kind == "publish":
        bodies = [body.encode() for body in command["bodies"]]
        if command.get("delay_ms"):
            client.dpub(command["topic"], command["delay_ms"], bodies[0], callback=answer(number))
        elif len(bodies) == 1:
            client.pub(command["topic"], bodies[0], callback=answer(number))
        else:
            client.mpub(command["topic"], bodies, callback=answer(number))
    elif kind == "finish":
        held.pop(command["id"]).finish()
    elif kind == "requeue":
        held.pop(command["id"]).requeue(time_ms=command["delay_ms"], backoff=False)
    elif kind == "touch":
        held[command["id"]].touch()
    elif kind == "close":
        client.close()


def read_commands(loop):
    for line in sys.stdin:
        loop.add_callback(do, json.loads(line))
    loop.add_callback(loop.stop)


class Reader(nsq.Reader):
    def heartbeat(self, _connection):
        tell(event="heartbeat")


if options.get("channel"):
    client = Reader(
        topic=options["topic"],
        channel=options["channel"],
        message_handler=on_message,
        nsqd_tcp_addresses=[address],
        lookupd_poll_interval=1,
        max_in_flight=options["max_in_flight"],
        max_tries=0,
        msg_timeout=options["msg_timeout_ms"] / 1000 if "msg_timeout_ms" in options else None,
        heartbeat_interval=options.get("heartbeat_s", 30),
    )
else:
    client = nsq.Writer([address], reconnect_interval=0.5)
threading.Thread(target=read_commands, args=(IOLoop.current(),), daemon=True).start()
tell(event="started")
IOLoop.current().start()
