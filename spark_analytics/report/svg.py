"""Plots as SVG text, made by hand: no library, no network, sharp at any size. Pure."""

import base64
import html
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

COLOURS: Final = ("#2f6fde", "#d9822b", "#2a9d6f", "#b5489c", "#7a68d8", "#c0483f", "#5b8a97", "#8a7a2d")
WIDTH: Final = 560
HEIGHT: Final = 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 40


@dataclass(frozen=True, slots=True)
class Series:
    """A line: ``points`` as (x, y), a name for the legend."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """An area between two lines over the same xs: (x, low, high)."""

    name: str
    points: Sequence[tuple[float, float, float]]


def escape(text: object) -> str:
    """Text that is safe in HTML and SVG; names in traces are untrusted."""
    return html.escape(str(text), quote=True)


def number(value: float) -> str:
    """A number as people write it on an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two values."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Texts of seconds since ``base_s`` (Unix epoch, UTC), and ticks at round times of the day."""

    base_s: float
    with_days: bool = False

    def __call__(self, seconds: float) -> str:
        at = datetime.fromtimestamp(self.base_s + seconds, UTC)
        return f"{at:%d. %H:%M}" if self.with_days else f"{at:%H:%M:%S}"

    def ticks(self, low: float, high: float, wanted: int = 6) -> list[float]:
        """Ticks at the smallest round step that gives no more of them than wanted."""
        step = next((step for step in _STEPS_S if (high - low) / step <= wanted), 86_400.0 * math.ceil(high / 86_400))
        first = math.ceil((self.base_s + low) / step)
        last = math.floor((self.base_s + high) / step)
        return [n * step - self.base_s for n in range(first, last + 1)] or [low]


_STEPS_S: Final = (
    *(0.001, 0.01, 0.1, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200, 86_400, 7 * 86_400),
)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 in each decade between two positive values."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
    return found if len(found) > 1 else ticks(low, high)


@dataclass(frozen=True, slots=True)
class Axes:
    """``x``, ``y``: labels; ``x_text``: the text of a tick; ``y_range``: None for the lowest and highest value."""

    x: str = ""
    y: str = ""
    log_x: bool = False
    y_range: tuple[float | None, float | None] = (0.0, None)
    x_text: Callable[[float], str] = number


def plot(
    series: Sequence[Series],
    axes: Axes = Axes(),
    *,
    bands: Sequence[Band] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines and bands over common axes. ``marks``: vertical lines with a text. Nothing to show: a sentence."""
    xs = [x for line in series for x, _ in line.points] + [x for band in bands for x, _, _ in band.points]
    ys = [y for line in series for _, y in line.points]
    ys += [y for band in bands for _, low, high in band.points for y in (low, high)]
    if not xs:
        return nothing()
    left, right = min(xs), max(xs)
    if axes.log_x:
        left = max(left, 1e-3)
        right = max(right, left * 1.01)
    elif right == left:
        right = left + 1
    bottom = axes.y_range[0] if axes.y_range[0] is not None else min(ys)
    top = axes.y_range[1] if axes.y_range[1] is not None else max(ys) * 1.05
    top = bottom + 1 if top <= bottom else top

    def at_x(x: float) -> float:
        share = (
            (math.log10(max(x, left)) - math.log10(left)) / (math.log10(right) - math.log10(left))
            if axes.log_x
            else (x - left) / (right - left)
        )
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (min(max(y, bottom), top) - bottom) / (top - bottom) * (HEIGHT - _TOP - _BOTTOM)

    across = log_ticks(left, right) if axes.log_x else ticks(left, right, 6)
    if isinstance(axes.x_text, TimeAxis):
        across = axes.x_text.ticks(left, right)
    parts = [_axes(at_x, at_y, across, ticks(bottom, top), axes.x_text)]
    for number_, band in enumerate(bands):
        upper = [f"{at_x(x):.1f},{at_y(high):.1f}" for x, _, high in band.points]
        lower = [f"{at_x(x):.1f},{at_y(low):.1f}" for x, low, _ in reversed(band.points)]
        colour = COLOURS[number_ % len(COLOURS)]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity=".18"/>')
    for number_, line in enumerate(series):
        parts.append(_path(line, at_x, at_y, COLOURS[number_ % len(COLOURS)]))
    for x, text in marks:
        parts.append(
            f'<line class="mark" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="small" x="{at_x(x) + 3:.1f}" y="{_TOP + 9}">{escape(text)}</text>'
        )
    parts.append(_labels(axes.x, axes.y))
    named = [(line.name, COLOURS[n % len(COLOURS)]) for n, line in enumerate(series) if line.name]
    return _legend(named) + _svg("".join(parts), f"{axes.y} over {axes.x}")


def _path(line: Series, at_x: Callable[[float], float], at_y: Callable[[float], float], colour: str) -> str:
    places: list[str] = []
    previous = None
    for x, y in line.points:
        if line.steps and previous is not None:
            places.append(f"{at_x(x):.1f},{previous}")
        previous = f"{at_y(y):.1f}"
        places.append(f"{at_x(x):.1f},{previous}")
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    joined = " ".join(places)
    title = f"<title>{escape(line.name)}</title>" if line.name else ""
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}>{title}</polyline>'


def bars(values: Sequence[tuple[str, float]], *, x_label: str = "", y_label: str = "") -> str:
    """Upright bars with their names below."""
    if not values:
        return nothing()
    top = max(value for _, value in values) * 1.08 or 1.0
    room = (WIDTH - _LEFT - _RIGHT) / len(values)

    def at_y(y: float) -> float:
        return HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM)

    parts = [_axes(lambda x: x, at_y, [], ticks(0, top), number)]
    longest = max(min(len(name), 18) for name, _ in values)
    every = max(1, math.ceil((longest + 2) * 7 / room))
    for place, (name, value) in enumerate(values):
        x = _LEFT + place * room
        parts.append(
            f'<rect x="{x + room * 0.12:.1f}" y="{at_y(value):.1f}" width="{room * 0.76:.1f}" '
            f'height="{max(0.0, HEIGHT - _BOTTOM - at_y(value)):.1f}" fill="{COLOURS[0]}">'
            f"<title>{escape(name)}: {number(value)}</title></rect>"
        )
        if place % every == 0:
            parts.append(
                f'<text class="tick" x="{x + room / 2:.1f}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">'
                f"{escape(name[:18])}</text>"
            )
    parts.append(_labels(x_label, y_label))
    return _svg("".join(parts), f"{y_label} by {x_label}")


@dataclass(frozen=True, slots=True)
class Scale:
    """The colours of the values from ``low`` to ``high``, and the text of a value."""

    low: float
    high: float
    colours: Sequence[tuple[int, int, int]]
    text: Callable[[float], str] = number


def heat_map(
    cells: Sequence[Sequence[float | None]],
    scale: Scale,
    *,
    x_label: str,
    y_label: str,
    x_ends: tuple[str, str] = ("", ""),
) -> str:
    """Rows of cells, the first on top; None is left empty. The picture is a PNG within the SVG: small at any size."""
    if not cells or not cells[0]:
        return nothing()
    pixels = [[_blend(value, scale) for value in row] for row in cells]
    width, height = WIDTH - _LEFT - _RIGHT - 60, HEIGHT - _TOP - _BOTTOM
    image = f'<image href="{png(pixels)}" x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" '
    image += 'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    bar = png([[_blend(scale.high - (scale.high - scale.low) * n / 63, scale)] for n in range(64)])
    x = _LEFT + width + 14
    key = f'<image href="{bar}" x="{x}" y="{_TOP}" width="12" height="{height}" preserveAspectRatio="none"/>'
    key += f'<text class="tick" x="{x + 16}" y="{_TOP + 8}">{escape(scale.text(scale.high))}</text>'
    key += f'<text class="tick" x="{x + 16}" y="{_TOP + height}">{escape(scale.text(scale.low))}</text>'
    ends = f'<text class="tick" x="{_LEFT}" y="{HEIGHT - _BOTTOM + 14}">{escape(x_ends[0])}</text>'
    ends += f'<text class="tick" x="{_LEFT + width}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="end">{escape(x_ends[1])}'
    ends += "</text>"
    frame = f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}"/>'
    return _svg(image + frame + key + ends + _labels(x_label, y_label), f"{y_label} by {x_label}")


def tree(rows: Sequence[tuple[str, str | None, int, float]]) -> str:
    """A first-delivery tree over time: (node, parent, hops, latency in ms), the publisher first."""
    if not rows:
        return nothing()
    known = {node for node, _, _, _ in rows}
    children: dict[str | None, list[str]] = {}
    for node, parent, _, _ in rows:
        children.setdefault(parent if parent in known else None, []).append(node)
    order: list[str] = []
    stack = list(reversed(children.get(None, [])))
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    places = {node: place for place, node in enumerate(order)}
    height = min(620, max(HEIGHT, 60 + 8 * len(order)))
    right = max(late for _, _, _, late in rows) or 1.0
    at = {
        node: (
            _LEFT + max(0.0, late) / right * (WIDTH - _LEFT - _RIGHT - 10),
            _TOP + 6 + places[node] / max(1, len(order) - 1) * (height - _TOP - _BOTTOM - 12),
        )
        for node, _, _, late in rows
        if node in places
    }
    parts: list[str] = []
    for x in ticks(0, right, 6):
        place = _LEFT + x / right * (WIDTH - _LEFT - _RIGHT - 10)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{height - _BOTTOM + 14}" text-anchor="middle">{number(x)}</text>'
        )
    for node, parent, hops, _ in rows:
        if parent in at and node in at:
            (x1, y1), (x2, y2) = at[parent], at[node]
            middle = (x1 + x2) / 2
            parts.append(
                f'<path d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}" '
                f'fill="none" stroke="{COLOURS[max(0, hops) % len(COLOURS)]}" stroke-width="1" opacity=".55"/>'
            )
    for node, _, hops, late in rows:
        if node in at:
            x, y = at[node]
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if hops == 0 else 3}" '
                f'fill="{COLOURS[max(0, hops) % len(COLOURS)]}"><title>{escape(node)}: {number(late)} ms, '
                f"{hops if hops >= 0 else 'unknown'} hops</title></circle>"
            )
    parts.append(_labels("ms after the publish", "", height))
    most = max(hops for _, _, hops, _ in rows)
    named = [(f"{hops} hops" if hops else "publisher", COLOURS[hops % len(COLOURS)]) for hops in range(0, most + 1)]
    return _legend(named) + _svg("".join(parts), "propagation tree", height)


def nothing() -> str:
    """Instead of an empty plot."""
    return '<p class="nothing">Nothing of this in the trace.</p>'


def png(pixels: Sequence[Sequence[tuple[int, int, int, int]]]) -> str:
    """RGBA pixels as a data URI."""
    raw = b"".join(b"\x00" + b"".join(bytes(pixel) for pixel in row) for row in pixels)
    head = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _blend(value: float | None, scale: Scale) -> tuple[int, int, int, int]:
    if value is None:
        return (0, 0, 0, 0)
    low, high, colours = scale.low, scale.high, scale.colours
    share = 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
    place = share * (len(colours) - 1)
    first = min(len(colours) - 2, int(place))
    part = place - first
    one, two = colours[first], colours[first + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(one, two, strict=True))
    return (red, green, blue, 255)


def _axes(
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    xs: Sequence[float],
    ys: Sequence[float],
    x_text: Callable[[float], str],
) -> str:
    parts: list[str] = []
    for y in ys:
        place = at_y(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in xs:
        place = at_x(x)
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="tick" x="{place:.1f}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{escape(x_text(x))}'
            "</text>"
        )
    base = HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts)


def _labels(x_label: str, y_label: str, height: int = HEIGHT) -> str:
    text = (
        f'<text class="label" x="{(WIDTH + _LEFT) / 2}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    if y_label:
        middle = height / 2 - 14
        text += f'<text class="label" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">'
        text += f"{escape(y_label)}</text>"
    return text


def _legend(named: Sequence[tuple[str, str]]) -> str:
    if len(named) < 2:
        return ""
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in named)
    return f'<p class="legend">{items}</p>'


def _svg(content: str, label: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'
