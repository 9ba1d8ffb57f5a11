"""Checks of topic names."""

from dep2p.gossipsub.patterns import has_wildcard


def check_topic_length(name: object, bytes_max: int) -> None:
    """Raise ``ValueError`` for a name that is empty, too long or not Unicode text, ``TypeError`` for no text."""
    if not isinstance(name, str):
        raise TypeError(f"a topic name must be text (str), not {type(name).__name__}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError("a topic name must be text that UTF-8 can encode") from None
    if not 0 < size <= bytes_max:
        raise ValueError(f"a topic name of {size} bytes: it must have between 1 and {bytes_max}")


def check_topic_name(name: str, bytes_max: int, *, has_patterns: bool) -> None:
    """Do as `check_topic_length`; where names with wildcards are patterns, raise ``ValueError`` for these, too."""
    check_topic_length(name, bytes_max)
    if has_patterns and has_wildcard(name):
        raise ValueError(f"{name[:80]!r} is a pattern, not a topic: only subscriptions have patterns")
