"""What a connection may say when: one IDENTIFY, one SUB, and what belongs to a subscription only behind it."""

from enum import IntEnum

from dep2p.protocols.nsq.commands import (
    Authenticate,
    Close,
    Command,
    Finish,
    Identify,
    Publish,
    Ready,
    Requeue,
    Subscribe,
    Touch,
)
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.identify import default_settings, parse_identify
from dep2p.protocols.nsq.limits import NsqLimits


class State(IntEnum):
    """With nsqd's numbers, which its statistics show."""

    INIT = 0
    SUBSCRIBED = 3
    CLOSING = 4


class NsqSession:
    """The state of one connection."""

    def __init__(self, limits: NsqLimits) -> None:
        self.limits = limits
        self.state = State.INIT
        self.settings = default_settings(limits)
        self.has_identified = False
        self.has_published = False
        self.topic = ""
        self.channel = ""
        self.ready = 0

    def accept(self, command: Command) -> bool:
        """Take a command. False: there is nothing to do for it. Raises NsqError when it may not come now."""
        if isinstance(command, Finish | Requeue | Touch):
            if self.state == State.INIT:
                raise NsqError("E_INVALID", f"cannot {_VERBS[type(command)]} in current state")
        elif isinstance(command, Publish):
            self.has_published = True
        elif isinstance(command, Ready):
            if self.state == State.CLOSING:
                return False  # on its way when CLS was said
            if self.state == State.INIT:
                raise NsqError("E_INVALID", "cannot RDY in current state")
            self.ready = command.count
        elif isinstance(command, Identify):
            if self.state != State.INIT or self.has_identified:
                raise NsqError("E_INVALID", "cannot IDENTIFY in current state")
            self.settings = parse_identify(command.body, self.limits)
            self.has_identified = True
        elif isinstance(command, Subscribe):
            self._subscribe(command)
        elif isinstance(command, Close):
            if self.state != State.SUBSCRIBED:
                raise NsqError("E_INVALID", "cannot CLS in current state")
            self.state = State.CLOSING
            self.ready = 0
        elif isinstance(command, Authenticate):
            if self.state != State.INIT:
                raise NsqError("E_INVALID", "cannot AUTH in current state")
            raise NsqError("E_AUTH_DISABLED", "AUTH disabled")
        else:
            return False
        return True

    def _subscribe(self, command: Subscribe) -> None:
        if self.state != State.INIT:
            raise NsqError("E_INVALID", "cannot SUB in current state")
        if not self.settings.heartbeat_ms:
            raise NsqError("E_INVALID", "cannot SUB with heartbeats disabled")
        self.state = State.SUBSCRIBED
        self.topic, self.channel = command.topic, command.channel


_VERBS: dict[type, str] = {Finish: "FIN", Requeue: "REQ", Touch: "TOUCH"}
