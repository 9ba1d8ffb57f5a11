"""Realms: list, join, leave, members, invite."""

import base64
import binascii

import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import InviteToRealm, JoinRealm, SetFields
from dep2p.control_api.replies import InviteReply, MemberFields, MemberList, RealmLeft, RealmList
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import query_fields, read_call, wrong_field
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response
from dep2p.errors import NotInRealmError, RealmFileError
from dep2p.protocols.addresses.dialable import addrs_for_others
from dep2p.protocols.realm.member_record import fitting_addrs
from dep2p.realm.credentials import Realm


async def listing(control: Control, _request: Request) -> ASGIApp:
    """List the joined realms."""
    return json_response(RealmList(realms=tuple(control.node.realms())))


async def join(control: Control, request: Request) -> ASGIApp:
    """Join by a realm file or an invite, now and at every start. Joining again adds the invite's addresses."""
    call = await read_call(request, control.bounds, JoinRealm)
    if (call.realm is None) == (call.invite is None):
        raise wrong_field("invite", "give either realm or invite")
    addrs = call.addrs
    if call.invite is not None:
        invite = Realm.from_invite(call.invite)
        realm, addrs = invite.realm, (*invite.addrs, *addrs)
    else:
        try:
            content = base64.b64decode(call.realm or "", validate=True)
        except (binascii.Error, ValueError):
            raise wrong_field("realm", "is not base64") from None
        realm = Realm.from_file_bytes(content)
    with control.lifecycle.work():
        joined = {each.realm_id: each.name for each in control.node.realms()}
        if realm.realm_id not in joined:
            if realm.name in joined.values():
                raise Problem("D2003", f"this node is in another realm named {realm.name!r}")
            if len(joined) >= control.config.limits.realms_max:
                raise Problem("D2004", f"this node is in {len(joined)} realms, as many as realms_max allows")
        # Both or neither: when the caller hangs up, a joined realm must not be forgotten at the next start.
        with trio.CancelScope(shield=True):
            if realm.realm_id not in joined:
                await control.realm_files.add(realm)
            await _join(control, realm, addrs)
    status = next(each for each in control.node.realms() if each.realm_id == realm.realm_id)
    return json_response(status, 200 if realm.realm_id in joined else 201)


async def _join(control: Control, realm: Realm, addrs: tuple[str, ...]) -> None:
    try:
        await control.node.join_realm(realm, addrs)
    except ValueError as error:
        raise RealmFileError(f"the realm's addresses cannot be used: {error}") from None


async def leave(control: Control, request: Request) -> ASGIApp:
    """Leave, and forget the secret."""
    realm = control.node.realm(path_text(request, "realm"))
    with trio.CancelScope(shield=True):
        await control.realm_files.remove(realm)
        try:
            await control.node.leave_realm(realm.realm_id)
        except NotInRealmError:
            # Another call left the realm while this one deleted the file: the caller's wish is fulfilled.
            pass
    return json_response(RealmLeft(left=realm.name, realm_id=realm.realm_id))


async def members(control: Control, request: Request) -> ASGIApp:
    """List the members that this node knows."""
    name = path_text(request, "realm")
    rows = tuple(control.node.members(name))
    return json_response(MemberList(realm=control.node.realm(name).name, members=rows))


async def fields(control: Control, request: Request) -> ASGIApp:
    """Show what this node says about itself."""
    query = query_fields(request)
    realm = query.optional_text("realm")
    query.finish()
    return _fields_reply(control, realm)


async def set_fields(control: Control, request: Request) -> ASGIApp:
    """Say things about this node."""
    call = await read_call(request, control.bounds, SetFields)
    membership = control.node.membership(call.realm)
    try:
        membership.set_fields(call.fields)
    except ValueError as error:
        raise wrong_field("fields", str(error)) from None
    return _fields_reply(control, call.realm)


def _fields_reply(control: Control, realm: str | None) -> ASGIApp:
    said = dict(control.node.membership(realm).fields)
    return json_response(MemberFields(realm=control.node.realm(realm).name, fields=said))


async def invite(control: Control, request: Request) -> ASGIApp:
    """Make an invite: a text that lets its reader join."""
    call = await read_call(request, control.bounds, InviteToRealm)
    for addr in call.addrs:
        if not fitting_addrs([addr]):
            raise wrong_field("addrs", f"{addr[:200]!r} is not a full address like /ip4/192.0.2.1/tcp/4001/p2p/12D3…")
    realm = control.node.realm(path_text(request, "realm"))
    addrs = call.addrs or addrs_for_others(control.node.listen_addrs())
    return json_response(InviteReply(invite=realm.invite(addrs), realm=realm.name, addrs=addrs))


ROUTES: list[Route] = [
    route("GET", "/v1/realms", listing),
    route("POST", "/v1/realms", join),
    route("DELETE", "/v1/realms/{realm}", leave),
    route("GET", "/v1/realms/{realm}/members", members),
    route("GET", "/v1/fields", fields),
    route("POST", "/v1/fields", set_fields),
    route("POST", "/v1/realms/{realm}/invite", invite),
]
