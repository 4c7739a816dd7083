"""Small figures as SVG text that a page can hold: coloured by the page's style sheet, so light and dark both work.

A figure is drawn into a box of 460 x 300, small enough to be read on a phone. Series carry `data-s="NUMBER"`, by which
the page colours and hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

__all__ = ["Point", "Series", "heat", "lines", "nice", "scatter", "short"]

WIDTH, HEIGHT = 460.0, 300.0
COLOURS = 16
ROOM = 20.0  # half the width of a number under an axis
MIDDLE, DEEP = 0.56, 0.87  # shades from which black is read better on a dark page, and white on a light one
LABELLED = 8  # points beside which there is room for their names
LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 12.0, 38.0


class Series(NamedTuple):
    """A line with a band: (x, y, low, high) each."""

    label: str
    number: int
    points: Sequence[tuple[float, float, float, float]]


class Point(NamedTuple):
    """A point with an error bar in y."""

    label: str
    number: int
    x: float
    y: float
    low: float
    high: float


def short(number: float) -> str:
    """A number for an axis.

    >>> [short(number) for number in (0, 0.05, 30, 2500, 1.5e9)]
    ['0', '0.05', '30', '2.5k', '1.5G']
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"


def nice(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers that cover a range; whole ones for what is counted.

    >>> nice(0.0, 97.0), nice(31.4, 35.2, 4)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [31.0, 32.0, 33.0, 34.0, 35.0, 36.0])
    >>> nice(0.0, 12.0), nice(0.0, 12.0, whole=True), nice(0.0, 2.0, whole=True)
    ([0.0, 2.5, 5.0, 7.5, 10.0, 12.5], [0.0, 3.0, 6.0, 9.0, 12.0], [0.0, 1.0, 2.0])
    """
    span = (high - low) or abs(high) or 1.0
    rough = max(span / count, 1.0) if whole else span / count
    size = 10.0 ** floor(log10(rough))
    step = size * next(times for times in (1, 2, 3 if whole else 2.5, 5, 10) if times * size >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


class _Plane:
    """Data to drawing coordinates, and the axes."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], *, whole: bool = False, top: float | None = None):
        self.x_ticks = nice(0.0, max(xs), whole=whole)
        if len(self.x_ticks) > 8:
            self.x_ticks = self.x_ticks[::2]
        high = max(ys) if top is None else min(max(ys), top)
        self.y_ticks = [tick for tick in nice(min(ys), high) if top is None or tick <= top + 1e-9]
        self.x_low, self.x_high = self.x_ticks[0], max(self.x_ticks[-1], *xs)
        self.y_low, self.y_high = self.y_ticks[0], max(self.y_ticks[-1], high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y_low), self.y_high)
        return HEIGHT - BOTTOM - (inside - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str, y_name: str) -> str:
        base = HEIGHT - BOTTOM
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(tick)}</text>')
        for tick in self.x_ticks:
            x = self.x(tick)
            anchor = "end" if x > WIDTH - ROOM else "middle"  # a wide number at the edge would be cut
            at = min(x + 8, WIDTH - 1) if anchor == "end" else x
            parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 15}" text-anchor="{anchor}">{short(tick)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
        parts.append(
            f'<text class="name" transform="translate(11 {(TOP + base) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_name)}</text>"
        )
        return "".join(parts)


def _figure(body: str, name: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}">{body}</svg>'


def _group(number: int) -> str:
    """What belongs to a series: colours begin anew after so many, numbers do not."""
    return f'<g data-s="{number % COLOURS}" data-of="{number}">'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def lines(series: Sequence[Series], x_name: str, y_name: str, name: str, top: float | None = None) -> str:
    """Lines with bands; nothing if there is nothing to draw."""
    shown = [each for each in series if each.points]
    if not shown:
        return ""
    xs = [point[0] for each in shown for point in each.points]
    ys = [value for each in shown for point in each.points for value in point[1:]]
    plane = _Plane(xs, [max(value, 0.0) for value in ys], whole=x_name == "round", top=top)
    parts = [plane.axes(x_name, y_name)]
    for label, number, points in shown:
        upper = [(plane.x(x), plane.y(high)) for x, _, _, high in points]
        lower = [(plane.x(x), plane.y(low)) for x, _, low, _ in points]
        line = [(plane.x(x), plane.y(y)) for x, y, _, _ in points]
        parts.append(_group(number))
        if any(point[2] != point[3] for point in points):
            parts.append(f'<path class="band" d="{_path([*upper, *reversed(lower)])}Z"/>')
        parts.append(f'<path class="line" d="{_path(line)}"/>')
        for (x, y), point in zip(line, points, strict=True):
            title = escape(f"{label}: {point[1]:.2f} at {short(point[0])}")
            parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>')
        parts.append("</g>")
    return _figure("".join(parts), name)


def scatter(points: Sequence[Point], x_name: str, y_name: str, name: str, top: float | None = None) -> str:
    """Points with error bars, and a line through those that nobody beats in both (more y for less x)."""
    if not points:
        return ""
    ys = [value for point in points for value in (point.low, point.high)]
    room = 0.06 * (max(ys) - min(ys))  # a label beside the lowest point stays off the axis
    floor_of = max(0.0, min(ys) - room)
    plane = _Plane([point.x for point in points], [floor_of, *(max(y, 0.0) for y in ys)], top=top)
    parts = [plane.axes(x_name, y_name)]
    front = [
        point
        for point in sorted(points, key=lambda each: (each.x, -each.y))
        if all(other.y < point.y or (other.x, other.y) == (point.x, point.y) for other in points if other.x <= point.x)
    ]
    if len(front) > 1:
        parts.append(f'<path class="front" d="{_path([(plane.x(each.x), plane.y(each.y)) for each in front])}"/>')
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: -each.y):
        x, y = plane.x(point.x), plane.y(point.y)
        title = escape(f"{point.label}: {point.y:.2f} at {short(point.x)}")
        left = x > WIDTH * 0.62
        beside = x + (-9 if left else 9)
        below = y + 4
        while any(abs(below - other) < 12 and abs(beside - there) < 110 for there, other in taken):
            below += 12
        taken.append((beside, below))
        label = point.label if len(points) <= LABELLED else ""
        parts.append(
            f'{_group(point.number)}<line class="error" x1="{x:.1f}" x2="{x:.1f}" y1="{plane.y(point.low):.1f}" '
            f'y2="{plane.y(point.high):.1f}"/><circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5.5"><title>{title}'
            f'</title></circle><text class="label" x="{beside:.1f}" y="{below:.1f}" '
            f'text-anchor="{"end" if left else "start"}">{escape(label)}</text></g>'
        )
    return _figure("".join(parts), name)


def heat(
    rows: Sequence[str],
    cells: Sequence[Sequence[float]],
    name: str,
    x_name: str = "client",
    show: Callable[[float], str] = short,
    columns: Sequence[str] = (),
) -> str:
    """A table of numbers as shades; the numbers stand in it where there is room."""
    count = max(map(len, cells), default=0)
    if not count:
        return ""
    left = min(132.0, 14 + 7.0 * max(len(row) for row in rows))
    width = 960.0 if count > 24 else WIDTH
    size = (width - left - RIGHT) / count
    tall = max(13.0, min(24.0, size))
    most = max(max(row) for row in cells) or 1.0
    parts = []
    for line, (row, values) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + line * tall
        label = escape(row if len(row) <= 17 else row[:16] + "…")
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + tall / 2 + 3.5:.1f}" text-anchor="end">{label}</text>')
        for place, value in enumerate(values):
            x = left + place * size
            shade = 0.06 + 0.94 * (value / most) ** 0.6 if value else 0.03
            title = escape(f"{row}, {x_name} {columns[place] if columns else place}: {show(value)}")
            parts.append(
                f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{max(size - 1, 0.5):.1f}" height="{tall - 1:.1f}" '
                f'rx="2" fill-opacity="{shade:.2f}"><title>{title}</title></rect>'
            )
            if value and size >= 20:
                ink = "deep" if shade > DEEP else "middle" if shade > MIDDLE else "pale"
                at = f'x="{x + size / 2 - 0.5:.1f}" y="{y + tall / 2 + 3:.1f}"'
                parts.append(f'<text class="{ink} small" {at} text-anchor="middle">{show(value)}</text>')
    base = TOP + len(rows) * tall
    for place in range(0, count, 1 if size >= 16 else ceil(24 / size)):
        x = left + (place + 0.5) * size
        text = escape(columns[place] if columns else str(place))
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 14:.1f}" text-anchor="middle">{text}</text>')
    middle = (left + width - RIGHT) / 2
    parts.append(
        f'<text class="name" x="{middle:.0f}" y="{base + 31:.0f}" text-anchor="middle">{escape(x_name)}</text>'
    )
    return _figure("".join(parts), name, base + 38, width)
