"""One self-contained page of HTML: its looks, tables, pictures in light and dark, and the values
under the pointer.

A page asks no other file or host for anything, and a content-security policy holds it to that.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sansac.config import ConfigError

THEMES = {"light": ("#ffffff", "#24292f"), "dark": ("#16191d", "#dfe3e8")}  # paper and ink


def render(draw: Callable[[], Figure], theme: str, kind: str = "png") -> bytes:
    """A figure that is drawn in one of THEMES, as a file of some kind."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(style(theme)):  # type: ignore[arg-type]
        draw().savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def render_themes(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """PNG files of a figure by theme."""
    return {theme: render(draw, theme) for theme in THEMES}


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(theme: str) -> dict[str, Any]:
    """matplotlib's settings for one of THEMES."""
    paper, ink = THEMES[theme]
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    papered = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(papered, paper),
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.hashsalt": "sansac",
    }


def ink() -> str:
    return matplotlib.rcParams["text.color"]


class Line(NamedTuple):
    """Values that HOVER shows: y at x, and its band."""

    name: str
    color: str
    x: Iterable[float]
    y: Iterable[float]
    low: Iterable[float] = ()
    high: Iterable[float] = ()


class Picture(NamedTuple):
    """A section of the page; `draw` is called once a theme. `lines` are those of its axes, in their
    order."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    lines: Sequence[Sequence[Line]] = ()


CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #24292f; --soft: #59636e;
  --line: #d1d9e0; --accent: ACCENT; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #dfe3e8; --soft: #9aa4ae; --line: #3a4148; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 1240px;
  background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.2rem; overflow-wrap: anywhere; }
h1::after { content: ""; display: block; width: 4rem; border-top: 4px solid var(--accent);
  margin-top: 0.5rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.3rem; }
p { max-width: 75ch; margin: 0.3rem 0 0.8rem; color: var(--soft); overflow-wrap: anywhere; }
.note { margin-top: 1rem; border-left: 4px solid var(--accent); padding-left: 0.8rem;
  color: var(--ink); }
.wide { overflow-x: auto; }
.wide img { display: block; width: 100%; height: auto; }
@media (max-width: 760px) { .wide img { width: auto; max-width: none; height: auto;
  min-width: min(100%, 780px); zoom: 0.55; } }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.8rem 0; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; }
th:first-child, .facts td, .words td, .words th { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.sortable button { all: unset; cursor: pointer; }
.sortable button:hover, .sortable button:focus-visible { text-decoration: underline; }
mark { background: color-mix(in srgb, var(--accent) 25%, transparent); color: inherit;
  font-weight: 600; padding: 0 0.25em; }
.hover { position: relative; }
.hover > i { position: absolute; border-left: 1px solid var(--soft); pointer-events: none; }
.hover > output { position: absolute; z-index: 1; padding: 0.3rem 0.6rem; pointer-events: none;
  background: var(--paper); border: 1px solid var(--line); border-radius: 4px; font-size: 0.85rem;
  line-height: 1.35; white-space: nowrap; font-variant-numeric: tabular-nums; }
.hover > [hidden] { display: none; }
.charts { display: grid; gap: 1.2rem 2rem; margin: 1.2rem 0 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.charts figure { margin: 0; min-width: 0; }
.charts svg { display: block; width: 100%; height: auto; }
.charts text { fill: var(--soft); font-size: 15px; }
.charts .grid { stroke: var(--line); }
.charts .line { fill: none; stroke-width: 2; }
.charts .key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: 0.85rem;
  font-variant-numeric: tabular-nums; }
progress { width: 100%; accent-color: var(--accent); }
pre { overflow-x: auto; }
.films { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
.films figure { margin: 0; max-width: 600px; }
.films video { width: 100%; height: auto; display: block; background: #000; }
figcaption { color: var(--soft); font-size: 0.9rem; overflow-wrap: anywhere; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
"""

# Clicking a column's head sorts by it: numbers by value, then words, empty cells last.
SORT = """
const key = (row, i) => row.cells[i].textContent.trim();
const number = text => parseFloat(text.replace(/,/g, ""));
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.rows[0].cells];
  heads.forEach((head, i) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const rows = [...table.rows].slice(1).sort((one, other) => {
      const [a, b] = [key(one, i), key(other, i)], [x, y] = [number(a), number(b)];
      if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y);
      return (isNaN(x) ? a.localeCompare(b) : x - y) * (up ? 1 : -1);
    });
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    table.tBodies[0].append(...rows);
  }));
}
"""

# The values of the nearest point of each line under the pointer. `panels` are those of `panels`.
HOVER = """
function add(parent, name, text = "") {
  const node = document.createElement(name);
  node.textContent = text;
  parent.append(node);
  return node;
}
function shown(value) {
  if (value == null) return "\u2013";
  const size = Math.abs(value);
  if (size && size < 0.001) return value.toExponential(2);
  return value.toLocaleString("en", {maximumFractionDigits: size < 10 ? 3 : 1});
}
function nearest(values, wanted) {
  const away = values.map(value => Math.abs(value - wanted));
  return away.indexOf(Math.min(...away));
}
function hover(holder, panels) {
  const rule = add(holder, "i"), box = add(holder, "output");
  const hide = () => { rule.hidden = box.hidden = true; };
  const show = event => {
    const area = holder.querySelector("img, svg").getBoundingClientRect();
    const around = holder.getBoundingClientRect();
    const across = (event.clientX - area.left) / area.width;
    const up = (area.bottom - event.clientY) / area.height;
    const panel = panels.find(({box: [left, bottom, width, height]}) =>
      across >= left && across <= left + width && up >= bottom && up <= bottom + height);
    const lines = panel ? panel.lines.filter(line => line.x.length) : [];
    if (!lines.length) return hide();
    const [left, bottom, width, height] = panel.box, [first, last] = panel.x;
    const pointed = first + (across - left) / width * (last - first);
    const xs = lines.flatMap(line => line.x), x = xs[nearest(xs, pointed)];
    box.replaceChildren();
    add(box, "strong", `${shown(x)} ${panel.label}`);
    for (const line of lines) {
      if (x < line.x[0] || x > line.x[line.x.length - 1]) continue;
      const i = nearest(line.x, x), row = add(box, "div");
      add(row, "span", "\u25a0 ").style.color = line.color;
      const band = line.low.length && line.low[i] != null;
      const range = band ? ` (${shown(line.low[i])} to ${shown(line.high[i])})` : "";
      row.append(`${line.name}: ${shown(line.y[i])}${range}`);
    }
    rule.hidden = box.hidden = false;
    const at = area.left - around.left + area.width * (left + width * (x - first) / (last - first));
    rule.style.left = `${at}px`;
    rule.style.top = `${area.top - around.top + area.height * (1 - bottom - height)}px`;
    rule.style.height = `${area.height * height}px`;
    box.style.top = rule.style.top;
    const seen = holder.parentElement.getBoundingClientRect(), size = box.offsetWidth;
    const low = seen.left - around.left, high = seen.right - around.left - size;
    const side = at + 10 <= high || at - 10 - size < low ? at + 10 : at - 10 - size;
    box.style.left = `${Math.max(low, Math.min(side, high))}px`;
  };
  hide();
  holder.addEventListener("pointermove", show);
  holder.addEventListener("pointerdown", show);
  holder.addEventListener("pointerleave", hide);
}
for (const holder of document.querySelectorAll("[data-panels]"))
  hover(holder, JSON.parse(holder.dataset.panels));
"""


def page(
    title: str, body: str, accent: str, script: str = "", sources: str = "img-src data:"
) -> str:
    """The page around a body of HTML; `title` is escaped here. No script but `script` runs, and
    nothing is loaded but from `sources`, directives of a content-security policy."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; {sources}; style-src 'unsafe-inline'"
    policy += f"; script-src 'sha256-{digest}'" if script else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{CSS.replace("ACCENT", accent)}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def table(rows: Sequence[Sequence[str]], kind: str = "grid") -> str:
    """An HTML table whose first column heads its rows, and whose first row, unless its kind is
    `facts`, heads its columns. `words` are set to the left; `sortable` columns follow SORT; where
    columns are `alternatives`, what differs from the first of them is marked."""
    lines = []
    for i, (first, *cells) in enumerate(rows):
        head = kind != "facts" and i == 0
        cell = "th" if head else "td"
        marked = [
            f"<mark>{escape(text)}</mark>"
            if "alternatives" in kind and not head and text != cells[0]
            else escape(text)
            for text in cells
        ]
        rest = "".join(f"<{cell}>{text}</{cell}>" for text in marked)
        lines.append(f"<tr><th>{escape(first)}</th>{rest}</tr>")
    if "sortable" in kind:
        heads = "".join(f"<th><button>{escape(text)}</button></th>" for text in rows[0])
        lines[0] = f"<tr>{heads}</tr>"
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def section(picture: Picture, themes: dict[str, bytes]) -> str:
    """A picture under its title and caption, as the reader's light or dark theme asks."""
    light, dark = (data_uri("image/png", themes[theme]) for theme in ("light", "dark"))
    values = f' class="hover" data-panels="{escape(panels(picture))}"' if picture.lines else ""
    return f"""<section id="{picture.name}">
<h2>{escape(picture.title)}</h2>
<p>{escape(picture.caption)}</p>
<div class="wide"><div{values}><picture>
<source media="(prefers-color-scheme: dark)" srcset="{dark}">
<img alt="{escape(picture.title)}" src="{light}">
</picture></div></div>
</section>
"""


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()


def panels(picture: Picture) -> str:
    """For HOVER, as JSON: where each axes lies on the picture (left, bottom, width, height, as
    shares of it), the range and the label of its x, and its lines."""
    with matplotlib.rc_context(style("light")):  # type: ignore[arg-type]
        figure = picture.draw()
        figure.draw_without_rendering()
    return json.dumps(
        [
            {
                "box": axes.get_position().bounds,
                "x": axes.get_xlim(),
                "label": axes.get_xlabel(),
                "lines": [
                    {"name": line.name, "color": line.color}
                    | {key: numbers(getattr(line, key)) for key in ("x", "y", "low", "high")}
                    for line in lines
                ],
            }
            for axes, lines in zip(figure.axes, picture.lines, strict=True)
        ]
    )


def numbers(values: Iterable[float]) -> list[float | None]:
    """To six digits; None for what JSON has no number for."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def check_directory(directory: Path, overwrite: bool) -> None:
    """Raises ConfigError for a file, or for a directory that is not empty unless `overwrite`."""
    if os.path.lexists(directory) and not directory.is_dir():  # a link to nothing is none either
        raise ConfigError(f"--out: {directory} is no directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ConfigError(
            f"--out: {directory} is not empty; choose another directory or pass --overwrite"
        )
