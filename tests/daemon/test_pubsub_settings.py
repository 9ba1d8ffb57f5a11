"""[pubsub] of the configuration: the public network, its signing policy, and the trace."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dep2p.config.loader import load_config
from dep2p.daemon.settings import gossip_params, public_pubsub
from dep2p.error_codes import EXIT_USAGE
from dep2p.errors import ConfigError
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.identity import Identity
from dep2p.pubsub.service import params_from
from dep2p.pubsub.wire_formats import PublicPubSub
from dep2p.types import peer_id_bytes
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


def test_the_router_gets_what_the_keys_say_and_the_rest_follows() -> None:
    flags: dict[str, object] = {
        "d": 3,
        "d_lo": 2,
        "d_hi": 5,
        "d_lazy": 1,
        "heartbeat_s": 0.25,
        "fanout_ttl_s": 9.0,
        "history_length": 8,
        "history_gossip": 4,
        "flood_publish": True,
    }
    config = load_config(flags={f"pubsub.{name}": value for name, value in flags.items()})
    params = gossip_params(config.pubsub, config.limits)
    assert (params.d, params.d_lo, params.d_hi, params.d_lazy, params.d_score, params.d_out) == (3, 2, 5, 1, 3, 1)
    assert (params.heartbeat_interval_s, params.fanout_ttl_s, params.flood_publish) == (0.25, 9.0, True)
    assert (params.mcache_windows, params.mcache_gossip_windows) == (8, 4)
    untouched = load_config()
    assert gossip_params(untouched.pubsub, untouched.limits) == params_from(untouched.limits)


@pytest.mark.parametrize("d", range(1, 14))
@pytest.mark.parametrize("d_lo", [1, 2, 4])
def test_whatever_the_configuration_takes_the_router_takes(d: int, d_lo: int) -> None:
    try:
        config = load_config(flags={"pubsub.d": d, "pubsub.d_lo": d_lo})
    except ConfigError:
        assert d_lo > d or d > 12
        return
    assert gossip_params(config.pubsub, config.limits).d == d


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"d": 3}, "[pubsub] d: 1 <= d_lo <= d must hold, not d_lo 4 and d 3"),
        ({"d_lo": 7}, "[pubsub] d_lo: 1 <= d_lo <= d must hold"),
        ({"d_lo": 0}, "[pubsub] d_lo: "),
        ({"d_hi": 5}, "[pubsub] d_hi: d <= d_hi <= 1000 must hold, not d 6 and d_hi 5"),
        ({"d": 13}, "[pubsub] d: d <= d_hi"),
        ({"d_hi": 1_001}, "[pubsub] d_hi: "),
        ({"d_lazy": -1}, "[pubsub] d_lazy: "),
        ({"heartbeat_s": 0}, "[pubsub] heartbeat_s: 0 is too short"),
        ({"heartbeat_s": 60}, "[pubsub] heartbeat_s: 5 heartbeats of 60 s are more than the 120 s"),
        ({"history_length": 121}, "[pubsub] history_length: 121 heartbeats"),
        ({"fanout_ttl_s": -1}, "[pubsub] fanout_ttl_s: "),
        ({"history_gossip": 6}, "[pubsub] history_gossip: 1 <= history_gossip <= history_length"),
        ({"history_length": 2}, "[pubsub] history_length: 1 <= history_gossip"),
        ({"history_gossip": 0}, "[pubsub] history_gossip: "),
        ({"public_message_ids": "js"}, "[pubsub] public_message_ids: there is no public network"),
        ({"public": True, "public_message_ids": "rs"}, "rust"),
    ],
)
def test_a_wrong_parameter_is_refused_by_the_name_of_its_key(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(flags={f"pubsub.{name}": value for name, value in flags.items()})
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("signing", "ids", "made"),
    [("strict_sign", "auto", "go"), ("strict_no_sign", "auto", "sha256"), ("strict_sign", "js", "js")],
)
def test_the_public_network_names_messages_as_the_key_says(signing: str, ids: str, made: str) -> None:
    flags: dict[str, object] = {
        "pubsub.public": True,
        "pubsub.public_signing": signing,
        "pubsub.public_message_ids": ids,
    }
    options = public_pubsub(load_config(flags=flags).pubsub)
    assert isinstance(options, PublicPubSub)
    author = peer_id_bytes(Identity(bytes(32)).peer_id)
    expected = MessageIds(made)(author, bytes(8), "t", b"data", b"")
    assert options.id_function()(author, bytes(8), "t", b"data", b"") == expected


@pytest.mark.real
def test_a_trace_that_cannot_be_written_is_reported_before_the_start(data_dir: Path, start: Start) -> None:
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
