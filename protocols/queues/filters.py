"""Filters of channels: which messages a channel gets at all. A small language, checked when the channel is made.

``tag in (a, b)``, ``tag = a``, ``header.NAME = "text"``, ``header.NAME != 7``, ``header.NAME ^= "prefix"``, joined by
``and`` or by ``or`` (not both), each with ``not`` before it if wanted.
"""

import re
from typing import Final, Literal, NamedTuple

from dep2p.protocols.queues.message import tags_and_headers

FILTER_BYTES_MAX: Final = 1_024
_TERMS_MAX: Final = 32
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"[^"]*")|(?P<op>!=|\^=|=|\(|\)|,)|(?P<word>[A-Za-z0-9_.\-]+))""", re.ASCII
)


class _Term(NamedTuple):
    negated: bool
    header: str
    """The name of a header; "" for tags."""
    op: Literal["=", "!=", "^=", "in"]
    values: tuple[str, ...]


class Filter:
    """A parsed filter. Raises ``ValueError`` that says what is wrong and where."""

    def __init__(self, text: str) -> None:
        if len(text.encode("utf-8", "surrogatepass")) > FILTER_BYTES_MAX:
            raise ValueError(f"a filter has at most {FILTER_BYTES_MAX} bytes")
        self.text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._terms = [self._term()]
        self._is_and = True
        joined = ""
        while self._at < len(self._tokens):
            word = self._take()
            if word not in ("and", "or") or (joined and word != joined):
                raise self._wrong(f"expected {joined or 'and, or'}, or the end")
            joined = word
            self._terms.append(self._term())
            if len(self._terms) > _TERMS_MAX:
                raise ValueError(f"a filter has at most {_TERMS_MAX} conditions")
        self._is_and = joined != "or"

    def matches(self, attributes: bytes) -> bool:
        """Whether a message with these attributes passes."""
        tags, headers = tags_and_headers(attributes)
        verdicts = (_holds(term, tags, headers) for term in self._terms)
        return all(verdicts) if self._is_and else any(verdicts)

    def _term(self) -> _Term:
        negated = False
        word = self._take()
        while word == "not":
            negated = not negated
            word = self._take()
        if word == "tag":
            header = ""
        elif word.startswith("header.") and len(word) > len("header."):
            header = word[len("header.") :]
        else:
            raise self._wrong("expected tag or header.NAME")
        op = self._take()
        if op == "in":
            if self._take() != "(":
                raise self._wrong("expected ( after in")
            values = [_value(self._take())]
            while (mark := self._take()) == ",":
                values.append(_value(self._take()))
            if mark != ")":
                raise self._wrong("expected , or )")
            return _Term(negated, header, "in", tuple(values))
        if op == "=":
            return _Term(negated, header, "=", (_value(self._take()),))
        if op == "!=":
            return _Term(negated, header, "!=", (_value(self._take()),))
        if op == "^=":
            return _Term(negated, header, "^=", (_value(self._take()),))
        raise self._wrong("expected =, !=, ^= or in")

    def _take(self) -> str:
        if self._at >= len(self._tokens):
            raise ValueError(f"the filter {self.text!r} ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _wrong(self, expected: str) -> ValueError:
        found = self._tokens[self._at - 1] if self._at else ""
        return ValueError(f"the filter {self.text!r} is wrong at {found!r}: {expected}")


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"the filter {text!r} is wrong at {text[at : at + 20].strip()!r}")
        found.append(match.group("text") or match.group("op") or match.group("word"))
        at = match.end()
    return found


def _value(token: str) -> str:
    if token in ("(", ")", ",", "=", "!=", "^="):
        raise ValueError(f"a value is missing before {token!r}")
    return token[1:-1] if token.startswith('"') else token


def _holds(term: _Term, tags: tuple[str, ...], headers: dict[str, object]) -> bool:
    given = tags
    if term.header:
        value = headers.get(term.header)
        given = () if value is None else (_text(value),)
    if term.op == "^=":
        holds = any(each.startswith(term.values[0]) for each in given)
    elif term.op == "!=":
        holds = not any(each == term.values[0] for each in given)
    else:
        holds = any(each in term.values for each in given)
    return holds != term.negated


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)
