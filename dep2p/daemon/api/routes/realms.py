"""Realms: list, join, leave, members, invite."""

import base64
import binascii

import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import read_json
from dep2p.daemon.api.routes.process import realm_fields
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response
from dep2p.errors import NotInRealmError, RealmFileError
from dep2p.protocols.realm.member_record import fitting_addrs
from dep2p.realm.credentials import Realm


async def listing(control: Control, _request: Request) -> ASGIApp:
    """The joined realms."""
    return json_response({"realms": [realm_fields(realm) for realm in control.node.realms()]})


async def join(control: Control, request: Request) -> ASGIApp:
    """Join by a realm file or an invite, now and at every start. Joining again adds the invite's addresses."""
    fields = await read_json(request, control.bounds)
    if fields.has("realm") == fields.has("invite"):
        raise fields.wrong("invite", "give either realm or invite")
    addrs: tuple[str, ...] = ()
    if fields.has("invite"):
        invite = Realm.from_invite(fields.text("invite"))
        realm, addrs = invite.realm, invite.addrs
    else:
        try:
            content = base64.b64decode(fields.text("realm", bytes_max=131_072), validate=True)
        except (binascii.Error, ValueError):
            raise fields.wrong("realm", "is not base64") from None
        realm = Realm.from_file_bytes(content)
    fields.finish()
    with control.lifecycle.work():
        joined = {each.realm_id: each.name for each in control.node.realms()}
        if realm.realm_id not in joined:
            if realm.name in joined.values():
                raise Problem("D2003", f"this node is in another realm named {realm.name!r}")
            if len(joined) >= control.config.limits.realms_max:
                raise Problem("D2004", f"this node is in {len(joined)} realms, as many as realms_max allows")
        # Both or neither: a caller that hangs up must not leave a realm joined but forgotten at the next start.
        with trio.CancelScope(shield=True):
            if realm.realm_id not in joined:
                await control.realm_files.add(realm)
            await _join(control, realm, addrs)
    status = next(each for each in control.node.realms() if each.realm_id == realm.realm_id)
    return json_response(realm_fields(status), 200 if realm.realm_id in joined else 201)


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
            # Another call left it while this one deleted the file: what the caller wants is so.
            pass
    return json_response({"left": realm.name, "realm_id": realm.realm_id})


async def members(control: Control, request: Request) -> ASGIApp:
    """The members that this node knows of."""
    name = path_text(request, "realm")
    found = control.node.membership(name).members()
    rows = [
        {
            "peer": member.peer,
            "addrs": list(member.addrs),
            "state": member.state,
            "seq": member.seq,
            "issued_s": member.issued_s,
            "expires_s": member.expires_s,
            "last_seen_s": member.last_seen_s,
        }
        for member in found
    ]
    return json_response({"realm": control.node.realm(name).name, "members": rows})


async def invite(control: Control, request: Request) -> ASGIApp:
    """A text that lets its reader join."""
    fields = await read_json(request, control.bounds)
    addrs = fields.texts("addrs", items_max=16)
    fields.finish()
    for addr in addrs:
        if not fitting_addrs([addr]):
            raise fields.wrong("addrs", f"{addr[:200]!r} is not a full address like /ip4/192.0.2.1/tcp/4001/p2p/12D3…")
    realm = control.node.realm(path_text(request, "realm"))
    addrs = addrs or [*control.config.node.advertise, *control.node.listen_addrs()]
    return json_response({"invite": realm.invite(addrs), "realm": realm.name, "addrs": addrs})


ROUTES: list[Route] = [
    route("GET", "/v1/realms", listing),
    route("POST", "/v1/realms", join),
    route("DELETE", "/v1/realms/{realm}", leave),
    route("GET", "/v1/realms/{realm}/members", members),
    route("POST", "/v1/realms/{realm}/invite", invite),
]
