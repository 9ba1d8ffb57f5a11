"""``python -m dep2p.daemon``: the daemon without the command line's other commands."""

import argparse
import os
import sys
from pathlib import Path

from dep2p.config.loader import load_config
from dep2p.error_codes import ERRORS
from dep2p.errors import ConfigError
from dep2p.standard_streams import fill_standard_streams


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon; returns its exit code."""
    fill_standard_streams()
    parser = argparse.ArgumentParser(prog="python -m dep2p.daemon", description="Run a dep2p node in the foreground.")
    parser.add_argument("--data-dir", metavar="DIR", help="directory of key, realms, lock and control socket")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration file")
    parser.add_argument("--listen", metavar="ADDR", action="append", help="address to listen on; may be repeated")
    parser.add_argument("--bootstrap", metavar="ADDR", action="append", help="peer to dial at start; may be repeated")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any section.key")
    chosen = parser.parse_args(arguments)
    flags: dict[str, object] = {
        "node.data_dir": chosen.data_dir,
        "node.listen": chosen.listen,
        "node.bootstrap": chosen.bootstrap,
    }
    for text in chosen.set:
        key, equals, value = str(text).partition("=")
        if not equals:
            parser.error(f"--set {text}: write it as section.key=value")
        flags[key.strip()] = value
    try:
        config = load_config(flags=flags, environ=os.environ, config_file=chosen.config)
    except ConfigError as error:
        info = ERRORS[error.code]
        print(f"error: {info.title}\n  cause: {error}\n  try:   {info.what_to_try}", file=sys.stderr)
        print(f"  code:  {info.code} (dep2p errors show {info.code})", file=sys.stderr)
        return info.exit_code

    from dep2p.daemon.process import run_daemon

    return run_daemon(config)


if __name__ == "__main__":
    sys.exit(main())
