"""Patterns of topic names: ``sensors.*.temp`` and ``sensors.>``. Pure.

A name's tokens stand between dots. In a pattern the token ``*`` matches any one token, and ``>`` as the last token one
or more. A name with neither as a whole token is a plain name: ``a*`` and ``->`` are.
"""

from typing import Final, Generic, TypeVar

TOKENS_MAX: Final = 16
"""Tokens of a pattern. Topics may have more: ``>`` matches them."""

V = TypeVar("V")


def has_wildcard(name: str) -> bool:
    """Whether a token of the name is ``*`` or ``>``, so that it names no topic."""
    if "*" not in name and ">" not in name:
        return False
    tokens = name.split(".")
    return "*" in tokens or ">" in tokens


def pattern_tokens(name: str) -> tuple[str, ...]:
    """Return the tokens of a pattern.

    Raises ``ValueError`` for a name without wildcards, for a ``>`` that is not last, and for more than 16 tokens.
    """
    tokens = tuple(name.split("."))
    if "*" not in tokens and ">" not in tokens:
        raise ValueError(f"{name[:80]!r} is a topic's name, not a pattern: a token of a pattern is * or >")
    if ">" in tokens[:-1]:
        raise ValueError(f"{name[:80]!r}: > stands for the rest of a name, so it must be the last token")
    if len(tokens) > TOKENS_MAX:
        raise ValueError(f"a pattern of {len(tokens)} tokens: at most {TOKENS_MAX} are allowed")
    return tokens


class _Branch(Generic[V]):
    """A place in the tree of tokens."""

    __slots__ = ("branches", "ends", "rests")

    def __init__(self) -> None:
        self.branches: dict[str, _Branch[V]] = {}
        self.ends: V | None = None
        """The value of the pattern that ends here."""
        self.rests: V | None = None
        """The value of the pattern that goes on with ``>``."""

    @property
    def is_empty(self) -> bool:
        return not self.branches and self.ends is None and self.rests is None


class PatternSet(Generic[V]):
    """Patterns with a value each, as a tree of tokens: a name is compared with all of them at once."""

    __slots__ = ("_count", "_root")

    def __init__(self) -> None:
        self._root: _Branch[V] = _Branch()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_clear(self) -> bool:
        """Whether nothing is left of removed patterns, when there are no others."""
        return self._root.is_empty

    def add(self, tokens: tuple[str, ...], value: V) -> None:
        """Add a pattern that is not here, by its `pattern_tokens`."""
        self._count += 1
        branch = self._root
        last = tokens[-1]
        for token in tokens[:-1] if last == ">" else tokens:
            branch = branch.branches.setdefault(token, _Branch())
        if last == ">":
            branch.rests = value
        else:
            branch.ends = value

    def remove(self, tokens: tuple[str, ...]) -> None:
        """Remove a pattern that is here."""
        self._count -= 1
        last = tokens[-1]
        path: list[tuple[_Branch[V], str]] = []
        branch = self._root
        for token in tokens[:-1] if last == ">" else tokens:
            path.append((branch, token))
            branch = branch.branches[token]
        if last == ">":
            branch.rests = None
        else:
            branch.ends = None
        while path and branch.is_empty:
            branch, token = path.pop()
            del branch.branches[token]

    def match(self, name: str) -> list[V]:
        """Return the values of the patterns that match a topic's name."""
        found: list[V] = []
        if not self._count:
            return found
        here = [self._root]
        for token in name.split("."):
            following: list[_Branch[V]] = []
            for branch in here:
                if branch.rests is not None:
                    found.append(branch.rests)
                exact = branch.branches.get(token)
                if exact is not None:
                    following.append(exact)
                if token != "*":
                    star = branch.branches.get("*")
                    if star is not None:
                        following.append(star)
            here = following
            if not here:
                return found
        found += [branch.ends for branch in here if branch.ends is not None]
        return found
