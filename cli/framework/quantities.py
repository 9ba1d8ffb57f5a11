"""Times and sizes as people write them on a command line."""

from dep2p.cli.framework.errors import CliError


def parse_seconds(text: str, option: str) -> float:
    """Parse ``90``, ``1.5``, ``500ms``, ``2m``, ``1h``, ``7d`` as seconds. Raises :class:`CliError`."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
    number = text.rstrip("smhd")
    unit = text[len(number) :] or "s"
    try:
        seconds = float(number) * units[unit]
        if not 0 <= seconds <= 10 * 365 * 86_400:
            raise ValueError
    except (ValueError, KeyError):
        raise CliError(f"{option} {text!r} is no time: write it like 30, 500ms, 10m, 2h or 7d", "D1001") from None
    return seconds


def parse_bytes(text: str, option: str) -> int:
    """Parse ``65536``, ``64k``, ``10M``, ``2G`` as bytes (powers of 1024). Raises :class:`CliError`."""
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    plain = text.lower().removesuffix("ib").removesuffix("b")
    number = plain.rstrip("kmgt")
    try:
        size = int(float(number) * units[plain[len(number) :]])
        if size < 0:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise CliError(f"{option} {text!r} is no size: write it like 65536, 64k, 10M or 2G", "D1001") from None
    return size
