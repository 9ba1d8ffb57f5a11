"""``dep2p service``: the services that members offer."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import describe
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.render import short_peer, table
from dep2p.cli.framework.value_completion import services
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.outside_text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dep2p.control_api.replies import ServiceAnswer
    from dep2p.errors import Dep2pError
    from dep2p.types import PeerId

NameArgument = Annotated[str, typer.Argument(help="The name of the service.", metavar="NAME", autocompletion=services)]


def list_services(run: Invocation, realm: RealmOption = None) -> None:
    """List the services of a realm and the members that offer each."""
    found = run.with_client(lambda client: client.offered_services(realm=realm))
    offers = [offer for each in found.values() for offer in each]
    if run.json:
        run.emit({"services": offers})
        return
    if not offers:
        run.say("no member offers a service: `dep2p reply NAME --group GROUP` does")
        return
    rows = [
        [
            *(one_line(text) or "-" for text in (offer.name, offer.group, offer.version, offer.schema)),
            short_peer(offer.peer),
            "yes" if offer.connected else "no",
            "-" if offer.time_ms is None else f"{offer.time_ms:.1f} ms",
        ]
        for offer in offers
    ]
    run.print(table(["SERVICE", "GROUP", "VERSION", "SCHEMA", "PEER", "CONNECTED", "ANSWERS IN"], rows, right=(6,)))


def info(run: Invocation, name: NameArgument, realm: RealmOption = None) -> int:
    """Ask each member that offers a service for its version, metadata, counts and times."""
    found = run.with_client(lambda client: client.service_info(name, realm=realm))
    if run.json:
        _emit(run, found)
        return _status(found)
    rows: list[list[str]] = []
    for peer, answer in found.items():
        if isinstance(answer, BaseException):
            rows.append([short_peer(peer), f"failed: {describe(answer).message}", *[""] * 7])
        elif not answer.services:
            rows.append([short_peer(peer), "does not offer it, whatever its record says", *[""] * 7])
        for each in () if isinstance(answer, BaseException) else answer.services:
            metadata = one_line(" ".join(f"{key}={value}" for key, value in sorted(each.metadata.items())))
            rows.append(
                [
                    short_peer(peer),
                    one_line(each.version) or "-",
                    str(each.programs),
                    str(each.requests),
                    str(each.errors),
                    str(each.in_flight),
                    f"{each.mean_ms:.1f} ms",
                    f"{each.p99_ms:.1f} ms",
                    metadata or "-",
                ]
            )
    head = ["PEER", "VERSION", "PROGRAMS", "REQUESTS", "ERRORS", "AT WORK", "MEAN", "P99", "METADATA"]
    run.print(table(head, rows, right=(2, 3, 4, 5, 6, 7)))
    return _status(found)


def ping(run: Invocation, name: NameArgument, realm: RealmOption = None) -> int:
    """Measure how long each member that offers a service takes to answer about it."""
    found = run.with_client(lambda client: client.service_info(name, realm=realm))
    if run.json:
        _emit(run, found)
        return _status(found)
    for peer, answer in found.items():
        if isinstance(answer, BaseException):
            run.print(f"{short_peer(peer)} failed: {describe(answer).message}")
        else:
            run.print(f"{short_peer(peer)} time={answer.rtt_ms or 0.0:.2f} ms")
    return _status(found)


def _emit(run: Invocation, found: "Mapping[PeerId, ServiceAnswer | Dep2pError]") -> None:
    asked = datetime.now(UTC).isoformat(timespec="milliseconds")
    members = [
        {"peer": peer, "error": describe(answer).problem()} if isinstance(answer, BaseException) else answer
        for peer, answer in found.items()
    ]
    run.emit({"time": asked, "members": members})


def _status(found: "Mapping[PeerId, ServiceAnswer | Dep2pError]") -> int:
    return EXIT_FAILED if any(isinstance(answer, BaseException) for answer in found.values()) else EXIT_OK


def register(app: typer.Typer) -> None:
    """Add the group ``service``."""
    sub = group(app, "service", "Services: requests that any member that offers them answers.")
    command(
        sub,
        "ls",
        examples=[("dep2p service ls", "who offers what")],
        notes="Member records say it: a member may claim what it does not have; `dep2p service info` asks.",
    )(list_services)
    command(sub, "info", examples=[("dep2p service info resize", "versions, counts and times of each member")])(info)
    command(sub, "ping", examples=[("dep2p service ping resize", "one line for each member that offers it")])(ping)
