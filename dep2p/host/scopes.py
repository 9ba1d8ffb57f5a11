"""Cancel scopes. One place, because the stubs that py-libp2p drags in describe an older trio to type checkers."""

import trio


def new_scope(deadline_s: float = float("inf")) -> trio.CancelScope:
    """Return a cancel scope with an absolute deadline on trio's clock."""
    return trio.CancelScope(deadline=deadline_s)


def shielded(seconds: float) -> trio.CancelScope:
    """Return a scope that outer cancellation does not reach, for at most ``seconds``: for cleaning up."""
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)
