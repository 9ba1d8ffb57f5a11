"""The D-codes: one table behind the control API's problems, the client's exceptions, the command line's messages and
`dep2p errors show`. A code never changes its meaning; a code that is no longer used is never given again."""

from typing import Final

from dep2p.error_codes.delivery import DELIVERY_ROWS
from dep2p.error_codes.model import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_TIMEOUT,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    ErrorInfo,
)
from dep2p.error_codes.queues import QUEUE_ROWS
from dep2p.error_codes.sessions import SESSION_ROWS
from dep2p.error_codes.traces import TRACE_ROWS

__all__ = [
    "ERRORS",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_FOUND",
    "EXIT_OK",
    "EXIT_REFUSED",
    "EXIT_TIMEOUT",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "ErrorInfo",
    "error_info",
    "find",
]

_ROWS: Final = (
    ErrorInfo(
        "D1001",
        "wrong command line",
        "An option, an argument or a combination of them is not one that the command takes.",
        "Run the command with --help.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D1002",
        "unknown configuration key",
        "A section or key of the configuration file, a DEP2P_ variable or a --set option does not exist. "
        "It is an error, not a "
        "warning, because a misspelt limit would otherwise be silently without effect.",
        "Use the nearest name that the message gives, or see all of them with `dep2p config example`.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D1003",
        "wrong configuration value",
        "A configuration value has the wrong type, is out of range, or contradicts another one.",
        "Change the key that the message names; `dep2p config show --origin` tells where each value comes from.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D1004",
        "configuration file cannot be read",
        "The file does not exist, may not be read, or is not TOML.",
        "Check the path and the line that the message names; `dep2p config example` prints a file that works.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D1005",
        "malformed request to the control API",
        "The body is not a JSON object, or a field or query parameter is missing, unknown, of the wrong "
        "type or out of range.",
        "The message names the field and what it may be: change the option of that name (`--help` has them). Programs: "
        "docs/reference/control-api.md.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D1006",
        "no such path or method in the control API",
        "The daemon does not serve that path, or not with that method; the client may be of another version.",
        "Compare the versions of `dep2p status` and `dep2p --version`.",
        404,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D1007",
        "body too large for the control API",
        "Bodies are bounded: a JSON body by the message limit plus its encoding, so that no caller can "
        "exhaust the daemon.",
        "Send less at once, use a stream for large data, or raise [limits] message_bytes_max on both sides.",
        413,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D1008",
        "wrong or missing token",
        "The control API on TCP takes only requests with the bearer token of this daemon.",
        "Read the token from the file that [control] token_file names (by default <data_dir>/control.token).",
        401,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D1009",
        "body came too slowly",
        "A request's body did not arrive within the time that the daemon waits for it.",
        "Send the request again.",
        408,
        EXIT_TIMEOUT,
    ),
    ErrorInfo(
        "D1010",
        "the Host of the request names another machine",
        "The control API on TCP takes only requests whose Host is localhost or a loopback address, so that no web page "
        "reaches it through a browser.",
        "Call it as 127.0.0.1 or localhost; a reverse proxy has to set Host to one of them.",
        403,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D1011",
        "another certificate than the daemon's",
        "The control API on another machine has a certificate whose fingerprint or authority is not the one that the "
        "context or the program names. No token was sent. Another node answers at that address, or the certificate was "
        "made anew.",
        "Compare with `dep2p token show` on that machine; add the context again when its certificate was changed.",
        495,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D2001",
        "key file cannot be used",
        "The file with the node's private key cannot be read, written or understood.",
        "Check the file's owner and its mode (0600); restore it from a backup. Moving it away gives the "
        "node a new peer id.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D2002",
        "realm file or invite cannot be used",
        "A realm file or an invite is damaged, cut off, from another version, or may not be read.",
        "Ask for a new invite (`dep2p realm invite NAME` on a member) and paste it whole.",
        400,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D2003",
        "another realm has that name here",
        "Realms are distinguished by their secret, but this node keeps them under their names, and one with "
        "this name and another "
        "secret is joined.",
        "Leave the other one first: `dep2p realm leave NAME`.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D2004",
        "too many realms",
        "The node is in as many realms as [limits] realms_max allows.",
        "Leave one, or raise the limit.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D2005",
        "realm name or passphrase cannot be used",
        "A realm's name has 1 to 64 printable characters, and a passphrase at least 12: anyone who sees the realm id "
        "can try guesses against it.",
        "Choose another name, or five or more random words; without a passphrase the secret is random.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D3001",
        "cannot reach the daemon",
        "Nothing answers on the control socket: no daemon runs for this data directory, it is still "
        "starting, or it runs as "
        "another user.",
        "Start it with `dep2p daemon`, or name another one with --data-dir or --socket.",
        503,
        EXIT_UNREACHABLE,
    ),
    ErrorInfo(
        "D3002",
        "another daemon uses this data directory",
        "One data directory belongs to one daemon at a time; the one with the process id in the message "
        "holds the lock.",
        "Use that daemon, stop it with `dep2p shutdown` or its process id, or give this one another --data-dir.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D3003",
        "cannot listen on an address",
        "The port is taken by another process, the address is not one of this machine, or it is malformed.",
        "Choose another with --listen, for example --listen /ip4/0.0.0.0/tcp/0 for a free port.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D3004",
        "data directory cannot be used",
        "The directory cannot be made or written (rights, a full disk), or others than its owner may enter it.",
        "Check owner, mode (0700) and free space, or choose another with --data-dir.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D3005",
        "a local address cannot be listened on",
        "The control socket, its loopback TCP port, or a port of [nsq] cannot be opened.",
        "Check [control] socket and tcp, and [nsq]; another process may hold the port, or a file that is no socket "
        "lies at the path.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D3006",
        "the daemon is draining",
        "The daemon finishes what is in flight and takes no new work before it stops.",
        "Wait, and start it again: `dep2p daemon`.",
        503,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D3007",
        "the answer is not a dep2p daemon's",
        "Something answered on the control socket, but not as a daemon of this version does.",
        "Check the path or port, and compare the versions of daemon and client.",
        502,
        EXIT_UNREACHABLE,
    ),
    ErrorInfo(
        "D3008",
        "the daemon's own bounds are reached",
        "Too many control connections, subscriptions or streams are open at once; each is bounded so that "
        "no client can exhaust "
        "the daemon.",
        "Close some, or retry later.",
        503,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D3009",
        "a subscription cannot go on",
        "A subscription, handler, consumer or session of a program was open, and the daemon does not give it any more: "
        "the node left the realm, the queue was deleted, the token changed, or the daemon is of another version.",
        "The message names the cause; mend it and start the program again.",
        410,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D4001",
        "peer not found",
        "No address of the peer is known, or none of its addresses answers.",
        "Check that it runs and name an address: `dep2p peer connect /ip4/HOST/tcp/PORT/p2p/PEER`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D4002",
        "not a member of the realm",
        "The peer is not a verified member of the realm at this moment, or it does not take this node for one.",
        "See `dep2p realm members`; both sides need the same invite or realm file.",
        403,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D4003",
        "this node is not in that realm",
        "The call needs a realm that this node has not joined, or the node is in several and the call names none.",
        "See `dep2p realm ls`; join with `dep2p realm join`, or name one with --realm.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D4004",
        "not a peer id or address",
        "The text is neither a whole peer id nor a multiaddr that ends in /p2p/ and a peer id.",
        "Copy it again from `dep2p id` or `dep2p peer ls`.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D4005",
        "not connected to that peer",
        "There is no connection to the peer to act on.",
        "See `dep2p peer ls`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5001",
        "no answer in time",
        "The peer did not answer within the timeout. The request may have been handled all the same.",
        "Raise the timeout, or check the peer with `dep2p peer ping`.",
        504,
        EXIT_TIMEOUT,
    ),
    ErrorInfo(
        "D5002",
        "the peer's handler failed",
        "The program that answers on the other side raised an error; its log has the cause.",
        "Look at the peer's log.",
        502,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5003",
        "the peer has no handler of that name",
        "Nothing on the peer answers to that name; names are case-sensitive.",
        "Check the name; on the peer, `dep2p reply NAME` or `dep2p session serve NAME` registers one.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5004",
        "message too large",
        "The body is over the size limit of this node or of the peer; nothing of the message was handled.",
        "Use a stream (`dep2p stream send`), or raise [limits] message_bytes_max on both sides.",
        413,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5005",
        "rate limited",
        "The peer takes no more from this node for now, or this node's own limit of publishes is reached.",
        "Wait for the time in retry_after_ms and send less often; own publishes: [limits] pubsub_publish_per_s.",
        429,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5006",
        "the peer is overloaded",
        "A bounded queue is full: the peer's, or this node's towards it.",
        "Retry later, with fewer requests in flight.",
        503,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5007",
        "the peer broke the protocol",
        "The peer sent or was sent what the protocol does not allow; the versions may not fit.",
        "Compare the versions of both nodes.",
        502,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5008",
        "the peer failed",
        "The peer failed in a way that it did not name.",
        "Look at the peer's log.",
        502,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5009",
        "the peer does not speak the protocol",
        "The peer is reachable, but it is no dep2p node of a fitting version.",
        "Compare the versions of both nodes.",
        502,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5010",
        "no such topic",
        "The peer knows no topic of that name; or neither this node nor any of its neighbours is in one.",
        "Check the name; `dep2p topic ls` lists those of this node.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5011",
        "that request is no longer waiting for a reply",
        "The id is unknown: the request was answered, its deadline passed, its caller gave up, or the "
        "subscription ended.",
        "Answer within the deadline that came with the request.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5012",
        "that name is taken",
        "A program already answers requests, or accepts streams, under that name on this node.",
        "Stop the other one, or use another name.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5013",
        "no peer is subscribed to the topic",
        "No neighbour of this node is subscribed, so that the message could go nowhere: nothing was sent. A subscriber "
        "counts from the moment in which it is connected and has said so.",
        "Start a subscriber (`dep2p subscribe TOPIC`), or let it wait for one with --on-no-peers queue.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5014",
        "too many topics",
        "The node is in as many topics as [limits] pubsub_topics_max allows, over all realms.",
        "End subscriptions that are not needed (`dep2p topic ls`), or raise the limit.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5015",
        "a validator refused the publish",
        "The node has validators for this topic, and one of them did not accept the message: nothing was sent.",
        "Publish what the topic's rule allows.",
        422,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5016",
        "headers, key or tags too large",
        "Headers, key and tags of the message are over their own limit; nothing of it was handled.",
        "Shorten them, or put the rest into the body.",
        413,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5017",
        "no member offers the service",
        "No member record that this node knows names the service with that group, version and schema.",
        "List the services of the realm with `dep2p service ls`; `dep2p reply NAME --group GROUP` offers one.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5018",
        "no member took the request",
        "Members offer the service, and each that was tried was not there, had no handler, or took no more requests. "
        "The request was not handled.",
        "The message says who was tried and why not; `dep2p service info NAME` asks all of them.",
        503,
        EXIT_REFUSED,
    ),
    *SESSION_ROWS,
    *DELIVERY_ROWS,
    *TRACE_ROWS,
    *QUEUE_ROWS,
    ErrorInfo(
        "D6001",
        "the stream ended early",
        "The stream or its connection was closed or reset before all was sent and received.",
        "Send again; `dep2p stream send` resumes where it stopped.",
        410,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D6002",
        "no such stream",
        "The id is unknown: the stream is finished, was reset, or no client was attached to it for too long.",
        "Open a new one.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D6003",
        "malformed stream body",
        "The body of items ended inside an item: each is a 32-bit big-endian length and that many bytes.",
        "Compare with docs/reference/control-api.md.",
        400,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D6004",
        "stream item too large",
        "An item is over [limits] stream_item_bytes_max.",
        "Split it: a stream carries any number of items.",
        413,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D6005",
        "the stream is in use",
        "Another call already sends to, or receives from, this stream, or that direction has ended.",
        "Use one sender and one receiver for each stream.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D6006",
        "file cannot be read or written",
        "The local file cannot be opened, read or written, or the disk is full.",
        "Check the path, its rights and the free space.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D6007",
        "checksums differ",
        "The received bytes differ from the sent file; the received file is kept under its temporary name.",
        "Send the file again.",
        500,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D6008",
        "cannot resume the transfer",
        "The part that is there belongs to another file, or the file changed meanwhile.",
        "Remove the partial file, or send without resuming.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D6009",
        "the receiver did not take the file",
        "The other side refused the file: it has another one of that name, no room, or takes none from this node.",
        "Read the cause; the receiver's terminal says more.",
        409,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D9001",
        "internal error",
        "A fault of dep2p itself. The daemon goes on; its log has the details.",
        "Report it with the lines of the daemon's log.",
        500,
        EXIT_FAILED,
    ),
)

ERRORS: Final[dict[str, ErrorInfo]] = {row.code: row for row in _ROWS}


def error_info(code: str) -> ErrorInfo:
    """Return the row of a code, in any letter case, with or without the D.

    Raises ``KeyError`` when there is no such code.
    """
    wanted = code.strip().upper()
    return ERRORS[wanted if wanted.startswith("D") else f"D{wanted}"]


def find(code: str) -> ErrorInfo | None:
    """Like :func:`error_info`, with None for an unknown code."""
    try:
        return error_info(code)
    except KeyError:
        return None
