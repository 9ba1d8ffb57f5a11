"""The DEP2P_* variables: which there are, and that no other is taken for one of them."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

from dep2p.errors import ConfigError

SOCKET: Final = "DEP2P_SOCKET"
CONTEXT: Final = "DEP2P_CONTEXT"
CONFIG: Final = "DEP2P_CONFIG"
DATA_DIR: Final = "DEP2P_DATA_DIR"
CONTROL_SOCKET: Final = "DEP2P_CONTROL_SOCKET"

RESERVED: Final[Mapping[str, str]] = {
    SOCKET: "the control socket: where the daemon listens, and where programs and commands find it",
    CONTEXT: "the context that programs and commands use",
    CONFIG: "the configuration file",
    "DEP2P_TRACEBACK": "1 shows where a command failed by a fault of its own",
    "DEP2P_PEER": "set by `reply --command` for its program",
    "DEP2P_NAME": "set by `reply --command` for its program",
    "DEP2P_HEADERS": "set by `reply --command` for its program",
    "DEP2P_MESSAGE_ID": "set by `queue consume --exec` for its program",
    "DEP2P_QUEUE": "set by `queue consume --exec` for its program",
    "DEP2P_CHANNEL": "set by `queue consume --exec` for its program",
    "DEP2P_ATTEMPTS": "set by `queue consume --exec` for its program",
    "DEP2P_KEY": "set by `queue consume --exec` for its program",
    "DEP2P_TAGS": "set by `queue consume --exec` for its program",
    "DEP2P_PRIORITY": "set by `queue consume --exec` for its program",
    "DEP2P_PUBLISHED": "set by `queue consume --exec` for its program",
    "DEP2P_SPARK_CLASS_LIST": "set by `trace report` for its Java runtime",
    "DEP2P_SEEDS": "a length of tests",
    "DEP2P_ORDER_SEEDS": "a length of tests",
    "DEP2P_SESSION_CUT_S": "a length of tests",
    "DEP2P_SESSION_SEEDS": "a length of tests",
    "DEP2P_SPARK_SEEDS": "a length of tests",
    "DEP2P_SPARK_KILLS": "a length of tests",
    "DEP2P_EXAMPLES": "a length of tests",
    "DEP2P_KILLS": "a length of tests",
    "DEP2P_MESSAGES": "a length of tests",
    "DEP2P_CRASH_ROUNDS": "a length of tests",
}
"""Variables that are no settings of the daemon, and what they are for."""
RESERVED_STARTS: Final = ("DEP2P_TEST_", "DEP2P_FUZZ_", "DEP2P_BENCH_")
"""Starts of names that tests and benchmarks use."""
_START: Final = "DEP2P_"


def check_environment(environ: Mapping[str, str], settings: Iterable[str]) -> None:
    """Check that every DEP2P_* variable is one of ``settings`` or reserved, and that none is empty.

    Raises :class:`ConfigError`: a misspelt name would be without effect, and an empty value seldom means what it does.
    """
    known = dict.fromkeys(settings)
    for name, text in environ.items():
        if not name.startswith(_START) or name in _OF_CHILDREN or name.startswith(RESERVED_STARTS):
            continue
        if name not in known and name not in RESERVED:
            rest = {each.removeprefix(_START): each for each in [*known, *RESERVED]}  # the common start is no likeness
            near = get_close_matches(name.removeprefix(_START), rest, n=1, cutoff=0.6)
            hint = f'did you mean "{rest[near[0]]}"?' if near else "`dep2p config variables` lists what there is."
            raise ConfigError(f"environment {name}: there is no such setting; {hint} Correct or unset it.", "D1002")
        if not text.strip():
            raise ConfigError(
                f"environment {name}: the variable is empty. Unset it, or give it a value; an empty value belongs in "
                "the configuration file."
            )


_OF_CHILDREN: Final = frozenset(name for name, use in RESERVED.items() if use.startswith("set by"))
"""These hold texts of messages, which may be empty."""
