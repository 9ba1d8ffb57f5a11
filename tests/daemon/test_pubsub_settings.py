"""[pubsub] of the configuration: the public network, its signing policy, and the trace."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dep2p.config import load_config
from dep2p.error_codes import EXIT_USAGE
from dep2p.errors import ConfigError
from tests.daemon.processes import DaemonProcess

Start = Callable[..., DaemonProcess]


def config_file(data_dir: Path, **values: object) -> tuple[str, str]:
    path = data_dir / "config.toml"
    path.write_text("[pubsub]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return "--config", str(path)


def test_every_source_can_set_it() -> None:
    config = load_config(environ={"DEP2P_PUBSUB_PUBLIC": "true"}, flags={"pubsub.trace_json": "t.ndjson"})
    assert (config.pubsub.public, config.pubsub.trace_json) == (True, "t.ndjson")
    assert config.origins["pubsub.public"] == "environment DEP2P_PUBSUB_PUBLIC"
    with pytest.raises(ConfigError, match="DEP2P_PUBSUB_PUBLIC"):
        load_config(environ={"DEP2P_PUBSUB_PUBLICK": "true"})


def test_signing_without_a_public_network_is_refused_since_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="no public network"):
        load_config(flags={"pubsub.public_signing": "strict_no_sign"})
    load_config(flags={"pubsub.public_signing": "strict_no_sign", "pubsub.public": True})
    with pytest.raises(ConfigError, match="strict_sign"):
        load_config(flags={"pubsub.public_signing": "sometimes", "pubsub.public": True})


@pytest.mark.real
def test_a_trace_that_cannot_be_written_is_told_before_the_start(data_dir: Path, start: Start) -> None:
    daemon = start(data_dir, *config_file(data_dir, trace_json=str(data_dir / "none" / "trace.ndjson")))
    assert daemon.process.wait(30) == EXIT_USAGE
    assert "trace_json: cannot open" in daemon.stderr()


@pytest.mark.real
@pytest.mark.parametrize("signing", ["strict_sign", "strict_no_sign"])
def test_daemons_without_a_realm_meet_on_the_public_network(data_dir: Path, start: Start, signing: str) -> None:
    directories = [data_dir / name for name in ("one", "two")]
    for directory in directories:
        directory.mkdir(mode=0o700)
    one, two = (start(each, *config_file(each, public=True, public_signing=signing)) for each in directories)
    one.wait_ready()
    two.wait_ready().post("/v1/peers", {"addr": one.get("/v1/status")["listen"][0]})
    body = {"data": "hi", "encoding": "utf-8"}
    assert one.post("/v1/topics/t/messages", body)["code"] == "D4003", "it is in no realm"
    with two.http() as http, http.stream("GET", "/v1/topics/t/messages?public=1") as answer:
        assert answer.status_code == 200
        queued = one.post("/v1/topics/t/messages", body | {"public": True, "on_no_peers": "queue"})
        line = json.loads(next(answer.iter_lines()))
        assert (line["data"], line["id"]) == ("aGk=", queued["id"])
        author = one.get("/v1/status")["peer_id"] if signing == "strict_sign" else None
        assert line["sender"] == author and (line["seqno"] is None) == (author is None)
        (row,) = two.get("/v1/topics")["topics"]
        assert (row["topic"], row["realm"], row["realm_id"]) == ("t", None, None)
        assert two.get("/v1/status")["public_pubsub"][0]["topics"]
    assert two.end() == one.end() == 0
