"""The order of commands on a connection: one IDENTIFY, one SUB, and a subscription's commands only after the SUB."""

from enum import IntEnum

from dep2p.protocols.nsq.commands import (
    Authenticate,
    Close,
    Command,
    Finish,
    IdentifyCommand,
    PublishCommand,
    Ready,
    Requeue,
    SubscribeCommand,
    Touch,
)
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.identify import ClientSettings, default_settings, parse_identify
from dep2p.protocols.nsq.limits import NsqLimits


class NsqState(IntEnum):
    """The states of a connection, with nsqd's numbers, which its statistics show."""

    INIT = 0
    SUBSCRIBED = 3
    CLOSING = 4


class NsqSession:
    """The state of one connection."""

    def __init__(self, limits: NsqLimits) -> None:
        self.limits = limits
        self.state: NsqState = NsqState.INIT
        self.settings: ClientSettings = default_settings(limits)
        self.has_identified: bool = False
        self.has_published: bool = False
        self.topic: str = ""
        self.channel: str = ""
        self.ready: int = 0

    def accept(self, command: Command) -> bool:
        """Take a command. Return False when there is nothing to do for it. Raises NsqError when it may not come now."""
        if isinstance(command, Finish | Requeue | Touch):
            if self.state == NsqState.INIT:
                raise NsqError("E_INVALID", f"cannot {_VERBS[type(command)]} in current state")
        elif isinstance(command, PublishCommand):
            self.has_published = True
        elif isinstance(command, Ready):
            if self.state == NsqState.CLOSING:
                return False  # on its way when CLS was said
            if self.state == NsqState.INIT:
                raise NsqError("E_INVALID", "cannot RDY in current state")
            self.ready = command.count
        elif isinstance(command, IdentifyCommand):
            if self.state != NsqState.INIT or self.has_identified:
                raise NsqError("E_INVALID", "cannot IDENTIFY in current state")
            self.settings = parse_identify(command.body, self.limits)
            self.has_identified = True
        elif isinstance(command, SubscribeCommand):
            self._subscribe(command)
        elif isinstance(command, Close):
            if self.state != NsqState.SUBSCRIBED:
                raise NsqError("E_INVALID", "cannot CLS in current state")
            self.state = NsqState.CLOSING
            self.ready = 0
        elif isinstance(command, Authenticate):
            if self.state != NsqState.INIT:
                raise NsqError("E_INVALID", "cannot AUTH in current state")
            raise NsqError("E_AUTH_DISABLED", "AUTH disabled")
        else:
            return False
        return True

    def _subscribe(self, command: SubscribeCommand) -> None:
        if self.state != NsqState.INIT:
            raise NsqError("E_INVALID", "cannot SUB in current state")
        if not self.settings.heartbeat_ms:
            raise NsqError("E_INVALID", "cannot SUB with heartbeats disabled")
        self.state = NsqState.SUBSCRIBED
        self.topic, self.channel = command.topic, command.channel


_VERBS: dict[type, str] = {Finish: "FIN", Requeue: "REQ", Touch: "TOUCH"}
