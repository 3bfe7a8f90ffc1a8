"""A run that is being trained, as a page on this machine: read-only, on the loopback alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import yaml

from sansac.config import ConfigError
from sansac.page import HOVER, page
from sansac.plots import COLORS
from sansac.watch import PANELS, Points, Watched, name_of, thinned

HOST = "127.0.0.1"
MOST_POINTS = 400  # of a line
# Okabe and Ito's colours; each line has a dash of its own too.
LOOKS = [("#0072B2", ""), ("#E69F00", "7 3"), ("#009E73", "2 2"), ("#CC79A7", "9 3 2 3")]


class Server(ThreadingHTTPServer):
    """Serves the page of a run at / and its metrics at /metrics.json, and nothing else.

    Port 0 is any free one. Raises ConfigError where the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched, self.lock = watched, Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--serve: cannot listen on port {port}: {reason}") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def metrics(self) -> dict[str, Any]:
        """How the run stands, and its charts."""
        with self.lock:
            watched = self.watched
            watched.look()
            return {
                "standing": watched.standing(),
                "fraction": watched.fraction,
                "ended": watched.ended,
                "charts": [
                    {"title": panel.title, "lines": lines(series)}
                    for panel in PANELS
                    if (series := watched.panel(panel))
                ],
            }


def lines(series: dict[str, Points]) -> list[dict[str, Any]]:
    """For CHARTS, the series of a panel."""
    return [
        {
            "name": name_of(tag),
            "color": color,
            "dash": dash,
            "dots": tag == "train/episode_return",
            "x": thinned([step for step, _ in points], MOST_POINTS),
            "y": thinned([value for _, value in points], MOST_POINTS),
            "low": [],
        }
        for (tag, points), (color, dash) in zip(series.items(), cycle(LOOKS))
    ]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        # A page from elsewhere whose name was pointed at this machine comes under its own name.
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        path = urlsplit(self.path).path
        if path == "/":
            return self._send("text/html; charset=utf-8", watch_page(self.server.watched))
        if path != "/metrics.json":
            return self.send_error(HTTPStatus.NOT_FOUND)
        self._send("application/json", json.dumps(self.server.metrics()))

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def serve(path: Path, port: int, on_start: Callable[[str], None]) -> None:
    """Serve a run's page until an interrupt; `on_start` gets its address. Raises ConfigError."""
    with Server(Watched(path), port) as server:
        on_start(server.url)
        server.serve_forever()


def watch_page(watched: Watched) -> str:
    config = yaml.safe_dump(watched.config.dump(), sort_keys=False)
    body = f"""<p id="standing" aria-live="polite">{escape(watched.standing())}</p>
<progress id="progress" max="1" value="{watched.fraction}"></progress>
<div id="charts" class="charts"></div>
<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"""
    accent, sources = COLORS[watched.config.actor_name], "connect-src 'self'"
    return page(watched.title, body, accent, HOVER + CHARTS, sources)


# Every chart is drawn anew from what the server tells; all of it is set as text.
CHARTS = """
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [640, 260, 74, 12, 12, 34];
const holders = new Map();
function draw(parent, name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
  return node;
}
function ticks(low, high, most) {
  const rough = (high - low) / most, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * size).find(k => k >= rough);
  const marks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) marks.push(i * step || 0);
  return marks;
}
function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}
function chartFor(title) {
  if (!holders.has(title)) {
    const figure = add(document.getElementById("charts"), "figure");
    add(figure, "figcaption", title);
    const holder = add(figure, "div"), key = add(figure, "div"), panels = [];
    holder.className = "hover";
    key.className = "key";
    const svg = draw(holder, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
    svg.setAttribute("aria-label", title);
    hover(holder, panels);
    holders.set(title, {svg, key, panels});
  }
  return holders.get(title);
}
function show(chart) {
  const {svg, key, panels} = chartFor(chart.title);
  const x = [0, Math.max(1, ...chart.lines.flatMap(line => line.x)) * 1.02];
  const y = range(chart.lines.flatMap(line => line.y));
  const across = v => LEFT + (v - x[0]) / (x[1] - x[0]) * (WIDTH - LEFT - RIGHT);
  const up = v => HEIGHT - BOTTOM - (v - y[0]) / (y[1] - y[0]) * (HEIGHT - TOP - BOTTOM);
  svg.replaceChildren();
  key.replaceChildren();
  for (const mark of ticks(...y, 5)) {
    draw(svg, "path", {class: "grid", d: `M${LEFT} ${up(mark)}H${WIDTH - RIGHT}`});
    draw(svg, "text", {x: LEFT - 8, y: up(mark) + 5, "text-anchor": "end"}, shown(mark));
  }
  for (const mark of ticks(...x, 6))
    draw(svg, "text", {x: across(mark), y: HEIGHT - 10, "text-anchor": "middle"}, shown(mark));
  for (const {name, color, dash, dots, x: xs, y: ys} of chart.lines) {
    const points = xs.map((v, i) => [across(v).toFixed(1), up(ys[i]).toFixed(1)]);
    if (dots) for (const [cx, cy] of points) draw(svg, "circle", {cx, cy, r: 2.2, fill: color});
    else draw(svg, "path", {d: `M${points.join("L")}`, stroke: color, class: "line",
      "stroke-dasharray": dash});
    if (!dots && points.length < 40)
      for (const [cx, cy] of points) draw(svg, "circle", {cx, cy, r: 3, fill: color});
    add(add(key, "span"), "b", dots ? "\u2022 " : dash ? "\u254c " : "\u2014 ").style.color = color;
    key.lastChild.append(`${name} ${shown(ys[ys.length - 1])}`);
  }
  const box = [LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH,
    (HEIGHT - TOP - BOTTOM) / HEIGHT];
  panels.splice(0, 1, {box, x, label: "environment steps", lines: chart.lines});
}
async function follow() {
  let ended = false;
  try {
    const run = await (await fetch("metrics.json")).json();
    document.getElementById("standing").textContent = run.standing;
    document.getElementById("progress").value = run.fraction;
    run.charts.forEach(show);
    ended = run.ended;
  } catch {
    document.getElementById("standing").textContent = "no answer: watch --serve has ended";
  }
  setTimeout(follow, ended ? 10000 : 1000);
}
follow();
"""
