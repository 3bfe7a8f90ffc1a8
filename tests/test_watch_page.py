"""The page of a run: what it serves, to whom, and that nothing in it is taken for code."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import INTERRUPTIBLE, start, tiny

import runner
from sansac.checkpoint import write_config, write_record
from sansac.config import ConfigError
from sansac.logger import JsonLines
from sansac.watch import Watched
from sansac.watch_page import MOST_POINTS, Server

EVIL = "<script>alert('1')</script>&amp;\"${x}`"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "<img src=x onerror=alert(1)>"
    path.mkdir()
    write_config(tiny(san=True, wandb_project=EVIL), path)
    write_record(path, {"status": "running"})
    log(path, step=40, **{"train/episode_return": -3.5, "sac/alpha": float("nan")})
    return path


def log(run_dir: Path, **values: Any) -> None:
    metrics = JsonLines(run_dir / "metrics.jsonl", 10**9)
    metrics.log({"step": 0, "updates": 0, "time": 1.0} | values)
    metrics.close()


@pytest.fixture
def server(run_dir: Path) -> Iterator[Server]:
    with Server(Watched(run_dir), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_holds_names_and_configuration_as_text(server: Server, run_dir: Path) -> None:
    status, headers, html = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    rest = html.replace(script, "")
    assert "alert('1')" not in rest and "<img" not in rest
    assert run_dir.name in unescape(rest) and "onerror" not in re.sub("&lt;.*?&gt;", "", rest)
    (shown,) = re.findall(r"<pre>(.*?)</pre>", html, re.S)
    assert yaml.safe_load(unescape(shown)) == tiny(san=True, wandb_project=EVIL).dump()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Security-Policy" content="(.*?)"', html)
    assert policy == (
        "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    assert "innerHTML" not in script and "eval" not in script.replace("evaluat", "")


def test_the_metrics_follow_the_run(server: Server, run_dir: Path) -> None:
    _, headers, text = ask(server, "/metrics.json?x=1")
    assert headers["Content-Type"] == "application/json"
    run = json.loads(text)
    assert (run["fraction"], run["ended"]) == (0.25, False)
    (chart,) = run["charts"]
    assert chart["title"] == "return"
    (line,) = chart["lines"]
    assert (line["name"], line["x"], line["y"]) == ("training episode return", [40.0], [-3.5])
    log(run_dir, step=80, **{"eval/return_mean": -1.0, "spiking/firing_rate/1": 0.5})
    write_record(run_dir, {"status": "interrupted"})
    run = json.loads(ask(server, "/metrics.json")[2])
    assert run["ended"] and run["standing"].startswith("interrupted, step 80 of 160 (50.0%)")
    names = [line["name"] for chart in run["charts"] for line in chart["lines"]]
    assert names == ["training episode return", "evaluation return mean", "firing rate, layer 1"]


def test_a_long_run_is_told_in_few_points(server: Server, run_dir: Path) -> None:
    metrics = JsonLines(run_dir / "metrics.jsonl", 10**9)
    for k in range(3 * MOST_POINTS):
        metrics.log({"step": 100 + k, "updates": 0, "time": 1.0, "loss/critic": float(k)})
    metrics.close()
    charts = json.loads(ask(server, "/metrics.json")[2])["charts"]
    (line,) = charts[-1]["lines"]
    assert len(line["x"]) == MOST_POINTS and line["y"][:2] == [1.0, 4.0]


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml", "/run.json", "/metrics.jsonl", "/../run.json", "/%2e%2e/run.json",
        "//etc/passwd", "/metrics.json/../run.json", "/metrics.json/", "/index.html", "/./",
        "/..%2frun.json", "/checkpoints/last.pt",
    ],
)  # fmt: skip
def test_nothing_else_is_served(server: Server, path: str) -> None:
    status, _, text = ask(server, path)
    assert status == 404 and "wandb_project" not in text and "status" not in text


def test_only_this_machine_asking_for_it_by_name_is_answered(server: Server) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, "/metrics.json", Host=host)[0] == 200
    for host in (f"evil.example:{port}", "127.0.0.1", "localhost:1", f"127.0.0.1:{port}.evil"):
        assert ask(server, "/metrics.json", Host=host)[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0] == 501


def test_a_port_that_is_taken_is_an_error(run_dir: Path, server: Server) -> None:
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=rf"--serve: cannot listen on port {port}: "):
        Server(Watched(run_dir), port)


def test_an_interrupt_ends_the_page_with_130(run_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start(
        "-c", INTERRUPTIBLE, "watch", str(run_dir), "--serve", str(port), new_group=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"http://127.0.0.1:{port}/\n"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics.json")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")


def test_what_is_no_run_is_refused_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        runner.main(["watch", str(tmp_path), "--serve"])
    assert ending.value.code == 2
    assert "holds no config.yaml" in capsys.readouterr().err
