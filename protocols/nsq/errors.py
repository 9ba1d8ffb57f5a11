"""Errors for clients whose command fails."""

from dep2p.errors import ProtocolError


class NsqError(ProtocolError):
    """An error frame. A fatal one ends the connection; only those of FIN, REQ and TOUCH are not (as in nsqd)."""

    def __init__(self, code: str, text: str, *, fatal: bool = True) -> None:
        super().__init__(f"{code} {text}" if text else code)
        self.nsq_code = code
        self.fatal = fatal
