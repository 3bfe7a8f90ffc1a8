"""One self-contained page of HTML: its looks, its tables, its pictures in light and dark.

A page asks no other file or host for anything, and a content-security policy holds it to that.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
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


class Picture(NamedTuple):
    """A section of the page; `draw` is called once a theme."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


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


def page(title: str, body: str, accent: str, script: str = "") -> str:
    """The page around a body of HTML; `title` is escaped here. No script but `script` runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
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
    `facts`, heads its columns. `words` are set to the left; `sortable` columns follow SORT."""
    lines = []
    for i, (first, *cells) in enumerate(rows):
        cell = "th" if kind != "facts" and i == 0 else "td"
        rest = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in cells)
        lines.append(f"<tr><th>{escape(first)}</th>{rest}</tr>")
    if "sortable" in kind:
        heads = "".join(f"<th><button>{escape(text)}</button></th>" for text in rows[0])
        lines[0] = f"<tr>{heads}</tr>"
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def section(picture: Picture, themes: dict[str, bytes]) -> str:
    """A picture under its title and caption, as the reader's light or dark theme asks."""
    light, dark = (
        "data:image/png;base64," + base64.b64encode(themes[theme]).decode()
        for theme in ("light", "dark")
    )
    return f"""<section id="{picture.name}">
<h2>{escape(picture.title)}</h2>
<p>{escape(picture.caption)}</p>
<div class="wide"><picture>
<source media="(prefers-color-scheme: dark)" srcset="{dark}">
<img alt="{escape(picture.title)}" src="{light}">
</picture></div>
</section>
"""


def check_directory(directory: Path, overwrite: bool) -> None:
    """Raises ConfigError for a file, or for a directory that is not empty unless `overwrite`."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--out: {directory} is no directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise ConfigError(
            f"--out: {directory} is not empty; choose another directory or pass --overwrite"
        )
