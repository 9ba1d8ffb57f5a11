"""The D-codes of ordered sessions."""

from typing import Final

from dep2p.error_codes.model import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_USAGE, ErrorInfo

SESSION_ROWS: Final = (
    ErrorInfo(
        "D5101",
        "the ordered session is over",
        "One end of the session has ended it, or it was given up: its client did not come back in time, or did not "
        "acknowledge.",
        "Open another session; the cause says which of the two it was.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5102",
        "the ordered session is full",
        "The client has not handled what was pushed before, and the session keeps no more. "
        "Nothing of this push was sent.",
        "Push again later, or wait for room; raise session_items_max or session_bytes_max in [limits].",
        429,
        EXIT_REFUSED,
    ),
    ErrorInfo(
        "D5103",
        "the ordered session was reset",
        "The server does not have what the client asked for: it was started again, the session expired, or the "
        "pushes were acknowledged before. What lies between is lost.",
        "Get the present state from the server anew, then go on; later pushes come in order again.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5104",
        "a gap in the ordered session",
        "Numbers of the sequence were given up, because the server reserved them and did not fill them in time.",
        "Go on, or get the present state from the server anew.",
        409,
        EXIT_FAILED,
    ),
    ErrorInfo(
        "D5105",
        "no such session",
        "No ordered session of this node has that id: it is over, or it was never there.",
        "See the sessions with `dep2p session ls`.",
        404,
        EXIT_NOT_FOUND,
    ),
    ErrorInfo(
        "D5106",
        "wrong session token",
        "The token is malformed, or it belongs to a session with another server or of another name.",
        "Copy the whole word, or leave it out to open a new session.",
        400,
        EXIT_USAGE,
    ),
    ErrorInfo(
        "D5107",
        "the request was answered before",
        "A push was to go in front of a response that has been sent, or the request was answered a second time.",
        "Bind what belongs in front of a response before answering; push it without binding otherwise.",
        409,
        EXIT_FAILED,
    ),
)
