"""docs/reference/config.md, made from the configuration's own documentation: ``python -m dep2p.config.reference``."""

import sys

from dep2p.config.environment import RESERVED, RESERVED_STARTS
from dep2p.config.loader import KEYS, env_name, section_docs
from dep2p.config.values import as_toml

_INTRO = """\
# Configuration

Made from the code by `python -m dep2p.config.reference`; a test compares.

Four sources, the first that has a value wins: flags, `DEP2P_*` variables, the file, defaults. The file is
`<data_dir>/config.toml`, or the one that `--config` or `DEP2P_CONFIG` names. `dep2p config show --origin` tells where
each value comes from, `dep2p config check` whether a file is right, `dep2p config example` prints one with every key.

An unknown section or key is an error that names the nearest right one; so is an unknown variable that starts with
`DEP2P_`, and an empty one. Any key can be given as a flag: `dep2p daemon --set limits.connections_max=100`. Lists in
variables and flags are separated by commas.

Times are in seconds (`_s`), sizes in bytes (`_bytes`).
"""


_VARIABLES = """
## Other variables

The command line, `Client.open()` and `dep2p daemon` choose the daemon by the same rules: arguments, then
`DEP2P_SOCKET`, `DEP2P_DATA_DIR` or `DEP2P_CONTEXT`, then the selected context (`dep2p context select`), then the
default data directory. A data directory that is an argument comes before `DEP2P_SOCKET`. Every `DEP2P_*` variable that
is neither above nor here is refused. `dep2p config variables` lists all.

| Variable | Use |
|---|---|
"""


def _purpose(section: str) -> str:
    text = section_docs()[section].partition("]: ")[2] or "bounds of the node."
    return text[0].upper() + text[1:]


def reference_markdown() -> str:
    """The whole page."""
    parts = [_INTRO]
    for section, keys in KEYS.items():
        parts.append(f"\n## [{section}]\n\n{_purpose(section)}\n")
        parts.append("\n| Key | Default | Variable | Meaning |\n|---|---|---|---|\n")
        for key in keys.values():
            meaning = " ".join(key.doc.split()).replace("|", "\\|")
            parts.append(f"| `{key.name}` | `{as_toml(key.default)}` | `{env_name(key)}` | {meaning} |\n")
    parts.append(_VARIABLES)
    parts += [f"| `{name}` | {use[0].upper() + use[1:]}. |\n" for name, use in RESERVED.items()]
    starts = ", ".join(f"`{start}`" for start in RESERVED_STARTS)
    parts.append(f"\nNames that start with {starts} belong to tests and benchmarks.\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference_markdown())
