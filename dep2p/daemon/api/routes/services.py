"""Services: list them, ask any member, ask all members about one."""

import time

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import RequestAny
from dep2p.control_api.encoding import fields_of
from dep2p.control_api.replies import (
    RequestReply,
    ServiceAnswer,
    ServiceAnswers,
    ServiceDetails,
    ServiceList,
    ServiceSummary,
)
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import checked_name, headers_of, payload_of, query_fields, read_call, within
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response, problem_of
from dep2p.errors import Dep2pError
from dep2p.protocols.services.options import AnyOptions
from dep2p.services.service import ServiceMember, ServiceMemberInfo
from dep2p.types import PeerId


async def listing(control: Control, request: Request) -> ASGIApp:
    """List the services of a realm and the members that offer each."""
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    services = control.node.services(realm).services
    rows = [_summary(member) for name in services.names() for member in services.members(name)]
    return json_response(ServiceList(services=tuple(rows)))


def _summary(member: ServiceMember) -> ServiceSummary:
    offer, standing = member.offer, member.standing
    return ServiceSummary(
        name=offer.name,
        group=offer.group,
        version=offer.version,
        schema=offer.schema,
        peer=member.peer,
        connected=member.is_connected,
        in_flight=0 if standing is None else standing.in_flight,
        time_ms=None if standing is None or standing.time_s is None else round(standing.time_s * 1000, 3),
        failures=0 if standing is None else standing.failures,
    )


async def request_any(control: Control, request: Request) -> ASGIApp:
    """Ask any member that offers the service."""
    call = await read_call(request, control.bounds, RequestAny)
    name, headers = checked_name(path_text(request, "name")), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    usual_s, most_s = control.config.limits.request_timeout_s, control.bounds.timeout_max_s
    options: AnyOptions = {
        "timeout_s": within("timeout_s", call.timeout_s, default=usual_s, high=most_s),
        "idempotent": call.idempotent,
        "headers": headers,
        "group": call.group,
        "version": call.version,
        "schema": call.schema,
    }
    services = control.node.services(call.realm).services
    started_s = time.perf_counter()
    with control.lifecycle.work():
        answer = await services.request_any(name, data, options)
    elapsed_ms = round((time.perf_counter() - started_s) * 1000, 3)
    return json_response(RequestReply(peer=answer.peer, data=answer.data, elapsed_ms=elapsed_ms))


async def info(control: Control, request: Request) -> ASGIApp:
    """Ask each member that offers the service about it."""
    name = checked_name(path_text(request, "name"))
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    with control.lifecycle.work():
        answers = await control.node.services(realm).services.infos(name)
    return json_response(ServiceAnswers(members=tuple(_answer(peer, answer) for peer, answer in answers.items())))


def _answer(peer: PeerId, answer: ServiceMemberInfo | Dep2pError) -> ServiceAnswer:
    if isinstance(answer, Dep2pError):
        return ServiceAnswer(peer=peer, error=problem_of(answer))
    return ServiceAnswer(
        peer=peer,
        rtt_ms=round(answer.rtt_s * 1000, 3),
        services=tuple(msgspec.convert(fields_of(each), ServiceDetails) for each in answer.services),
    )


ROUTES: list[Route] = [
    route("GET", "/v1/services", listing),
    route("POST", "/v1/services/{name}/requests", request_any, path_names=("name",)),
    route("GET", "/v1/services/{name}", info, path_names=("name",)),
]
