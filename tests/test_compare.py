"""Comparing runs: groups, numbers checked by hand, what is flagged, and what is written."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import imageio.v3 as iio
import numpy as np
import pytest
from conftest import FINAL, tiny
from matplotlib.image import imread

import runner
from sansac import page, statistics
from sansac.checkpoint import write_config, write_record
from sansac.compare import (
    Comparison,
    check_environments,
    compare,
    curve,
    differences,
    find_flags,
    group_runs,
    natural,
    read_runs,
    summary,
)
from sansac.compare_plots import curve_lines, draw_curves, draw_pareto, front, looks
from sansac.config import ConfigError, merge
from sansac.environments import TRUST, env_factory
from sansac.evaluation import random_return
from sansac.logger import JsonLines
from sansac.manager import Manager

EVIL = "<script>alert('1')</script>|&amp;\"${x}$"
Make = Callable[..., Path]
FIGURES = ("curves", "final", "improvement", "profile")


def write_run(
    path: Path,
    returns: Sequence[float] = (1.0, 3.0),
    *,
    evaluations: Sequence[tuple[int, float]] = ((80, -5.0), (160, 2.0)),
    seconds: float = 120.0,
    record: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run directory: a finished run of two evaluations, unless told otherwise."""
    config = tiny(**changes)
    path.mkdir(parents=True)
    write_config(config, path)
    last = evaluations[-1][0] if evaluations else 0
    final = FINAL | {"step": last, "episodes": len(returns), "returns": list(returns)}
    if config.san:
        final["firing_rate"] = [0.25, 0.5]
    known = {"status": "finished", "step": last, "commit": "a" * 40, "dirty": False}
    known |= {"final": final, "machine": "m", "device": "cpu", "threads": 1}
    write_record(path, merge(known, record or {}))
    metrics = JsonLines(path / "metrics.jsonl", None)
    for step, value in evaluations:
        time = seconds * step / last
        row = {"step": step, "updates": step // 2, "time": time, "eval/return_mean": value}
        metrics.log(row)
    metrics.close()
    return path


def write_six(runs: Path, **dense: Any) -> Path:
    """Three seeds of each actor."""
    for seed in range(3):
        write_run(runs / f"d{seed}", [1.0 * seed, 3.0], seed=seed, **dense)
        write_run(runs / f"s{seed}", [2.0 * seed, 3.0], seed=seed, san=True)
    return runs


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda name, *returns, **changes: write_run(
        tmp_path / "runs" / name, *returns, **changes
    )


@pytest.fixture
def six(tmp_path: Path) -> Path:
    return write_six(tmp_path / "runs")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of nothing, for speed."""
    monkeypatch.setattr(page, "render", lambda draw, theme: b"\x89PNG " + theme.encode())
    monkeypatch.setattr("sansac.compare.render", lambda draw, theme, kind: b"<svg/>")


def flags(runs: Path, by: str = "actor") -> list[str]:
    return find_flags(group_runs(read_runs([runs]), by), by)


# -- reading and grouping --------------------------------------------------------------------------


def test_runs_are_found_by_name_below_directories_and_by_globs_each_once(six: Path) -> None:
    def found(*words: str | Path) -> list[str]:
        return sorted(run.name for run in read_runs(words))

    everything = ["d0", "d1", "d2", "s0", "s1", "s2"]
    assert found(six) == found(six.parent) == found(six / "*") == everything
    assert found(six / "d1", six / "d1", six / "d*", f"{six}/../runs/d1") == ["d0", "d1", "d2"]
    assert found(f"{six.parent}/**/s?") == ["s0", "s1", "s2"]


def test_what_holds_no_run_is_named(tmp_path: Path, six: Path) -> None:
    for word in (tmp_path / "absent", str(six / "x*"), six / "d0" / "metrics.jsonl"):
        with pytest.raises(ConfigError, match=re.escape(f"{word}: there is no run directory")):
            read_runs([six, word])
    (six / "d0" / "metrics.jsonl").write_text("{}\n[1]\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1"):
        read_runs([six])


def test_runs_are_grouped_by_actor_or_by_any_field(make: Make, tmp_path: Path) -> None:
    make("a", san=True, spiking={"time_steps": 10})
    make("b", san=True, spiking={"time_steps": 2})
    make("c", actor={"hidden": [8]})

    def names(by: str) -> dict[str, list[str]]:
        groups = group_runs(read_runs([tmp_path]), by)
        return {group.name: [run.name for run in group.runs] for group in groups}

    assert names("actor") == {"dense": ["c"], "spiking": ["a", "b"]}
    steps = {"dense": ["c"], "time_steps 2": ["b"], "time_steps 10": ["a"]}
    assert names("spiking.time-steps") == steps
    assert list(names("spiking.time_steps")) == list(steps)
    both = {"dense": ["c"], "spiking, time_steps 2": ["b"], "spiking, time_steps 10": ["a"]}
    assert names("actor, spiking.time_steps") == both
    assert names("actor.hidden") == {"hidden [8]": ["c"], "hidden [16, 16]": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"--by: unknown field 'gama'.*`learning.gamma`"):
        names("gama")


def test_runs_of_a_sweep_are_grouped_by_their_names_without_seeds(
    make: Make, tmp_path: Path
) -> None:
    for seed in (10, 2):
        make(f"spiking-s{seed}-narrow", seed=seed, san=True, actor={"hidden": [8]})
        make(f"spiking-s{seed}", seed=seed, san=True)
    groups = group_runs(read_runs([tmp_path]), "name")
    assert [(group.name, len(group.runs)) for group in groups] == [
        ("spiking", 2), ("spiking-narrow", 2),
    ]  # fmt: skip
    assert not any("groups differ" in flag for flag in find_flags(groups, "name"))
    assert any("groups differ" in flag for flag in find_flags(groups, "actor"))


def test_numbers_in_names_sort_by_value() -> None:
    shuffled = ["x 10", "x 2", "x 1e-05", "x 0.5", "x", "2"]
    assert sorted(shuffled, key=natural) == ["2", "x", "x 1e-05", "x 0.5", "x 2", "x 10"]


# -- numbers ---------------------------------------------------------------------------------------


def test_a_groups_numbers_are_those_worked_out_by_hand(make: Make, tmp_path: Path) -> None:
    for seed, (mean, last) in enumerate([(1.0, 5.0), (2.0, 6.0), (9.0, -1.0), (3.0, -1.0)]):
        curve = [(80, last if seed == 0 else -2.0), (160, last)]
        make(f"s{seed}", [mean - 1, mean + 1], evaluations=curve, seed=seed, san=True,
             seconds=60.0 * (seed + 1))  # fmt: skip
    make("cut", record={"status": "interrupted", "final": {}}, san=True, seconds=9e9)
    (group,) = group_runs(read_runs([tmp_path]), "actor")
    row = summary(group, 5.0)
    low, high = statistics.interval([1.0, 2.0, 9.0, 3.0])
    expected = {
        "group": "spiking", "seeds": 4, "runs": 5, "mean": 3.75, "iqm": 2.5, "low": low,
        "high": high, "coverage": statistics.coverage(4), "lowest": 1.0, "lowest_seed": 0,
        "minutes": 2.5, "firing_rate_0": 0.25, "firing_rate_1": 0.5,
        "steps_to_threshold": np.inf, "reached": 2,
    }  # fmt: skip
    rates = [160 / (60 * k) for k in (1, 2, 3, 4)]
    assert row.pop("steps_per_second") == pytest.approx(np.mean(rates))
    assert row.pop("updates_per_second") == pytest.approx(np.mean(rates) / 2)
    assert np.isnan(row.pop("gpu_energy_joules"))
    assert row == expected
    assert summary(group, -1.5)["steps_to_threshold"] == 160
    assert summary(group, -2.0)["steps_to_threshold"] == 80
    assert "reached" not in summary(group, None)


def test_a_curve_is_the_interquartile_mean_where_all_finished_seeds_have_been(
    make: Make, tmp_path: Path
) -> None:
    for seed, value in enumerate([0.0, 1.0, 2.0, 103.0]):
        make(f"d{seed}", evaluations=[(40, value), (80, value + 10), (80, value + 20)], seed=seed)
    make("long", evaluations=[(20, 1.5), (60, 1.5), (120, 1.5)], seed=9)
    make("cut", evaluations=[(70, 1e6)], record={"status": "running"})
    (group,) = group_runs(read_runs([tmp_path]), "actor")
    x, iqm, low, high = curve(group, "step")
    assert list(x) == [40, 60, 80]
    # Of 0, 1, 1.5, 2, 103; of 10, 11, 1.5, 12, 113; of 20, 21, 1.5, 22, 123.
    assert iqm == pytest.approx([1.5, 11.0, 21.0])
    assert (low <= iqm).all() and (iqm <= high).all() and (low < high).all()
    assert list(curve(group, "updates").x) == [20, 30, 40]


def test_runs_evaluated_at_different_times_alone_have_no_common_curve(
    make: Make, tmp_path: Path
) -> None:
    make("d0", evaluations=[(40, 1.0)], seed=0)
    make("d1", evaluations=[(80, 2.0)], seed=1)
    comparison = compare([tmp_path], tmp_path / "out")
    assert not len(comparison.curves["step"]["dense"].x)
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_group_with_nothing_finished_shows_how_far_it_is(make: Make, tmp_path: Path) -> None:
    make("one", evaluations=[(80, 4.0)], record={"status": "running", "final": {}})
    make("two", evaluations=[], record={"status": "failed", "final": {}})
    comparison = compare([tmp_path], tmp_path / "out")
    assert list(comparison.curves["step"]["dense"].y) == [4.0]
    assert comparison.table[1][:3] == ["dense", "0 of 2", "–"]
    assert comparison.improvements == []
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"curves"}


# -- unlike things ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"env": "MountainCarContinuous-v0"}, {"env_kwargs": {"max_episode_steps": 50}}]
)
def test_different_environments_are_refused(six: Path, make: Make, other: dict[str, Any]) -> None:
    check_environments(read_runs([six]))
    make("other", **(other | {"env_kwargs": other.get("env_kwargs", {})}))
    with pytest.raises(ConfigError, match=r"do not compare: Pendulum-v1 .*; .*\(other\)"):
        compare([six], six.parent / "out")
    assert not (six.parent / "out").exists()


def test_runs_alike_have_no_flag_but_their_number(six: Path) -> None:
    assert flags(six) == [
        "fewer than 5 finished seeds: dense has 3, spiking has 3; see the coverage"
    ]


def test_five_seeds_are_enough(make: Make, tmp_path: Path) -> None:
    for seed in range(5):
        make(f"d{seed}", seed=seed)
    assert flags(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"evaluations": [(80, 0.0)]}, "unequal budgets: 160 steps (d0, d1, d2 and 3 more); 80 "
                                       "steps (odd)"),
        ({"record": {"final": {"step": 161}}}, "unequal budgets: 160 steps (d0, d1, d2 and 3 more)"
                                               "; 161 steps (odd)"),
        ({"record": {"final": {"seed": 4}}}, "different evaluation seeds: seed 0 (d0, d1, d2 and 3 "
                                             "more); seed 4 (odd)"),
        ({"returns": [1.0] * 7}, "different evaluations: 2 episodes (d0, d1, d2 and 3 more); 7 "
                                 "episodes (odd)"),
        ({"record": {"commit": "b" * 40}}, "mixed commits: aaaaaaaaaa (d0, d1, d2 and 3 more); "
                                           "bbbbbbbbbb (odd)"),
        ({"record": {"dirty": True}}, "code changed since its commit: odd"),
        ({"record": {"versions": {"torch": "9"}}}, "mixed versions:  (d0, d1, d2 and 3 more); "
                                                   "torch 9 (odd)"),
        ({"record": {"threads": 2}}, "minutes do not compare: different machines: m, cpu, 1 threads"
                                     " (d0, d1, d2 and 3 more); m, cpu, 2 threads (odd)"),
        ({"record": {"status": "running"}}, "unfinished runs, drawn but in no statistic: running "
                                            "(odd)"),
        ({"seed": 1}, "dense: runs of one seed are not independent: seed 1 (d1, odd)"),
        ({"learning": {"gamma": 0.5}}, "settings vary within a group: learning.gamma"),
    ],
)  # fmt: skip
def test_what_makes_a_run_unlike_is_flagged(
    six: Path, make: Make, change: dict[str, Any], flag: str
) -> None:
    assert flag not in flags(six)
    make("odd", **({"seed": 8} | change))
    assert flag in flags(six)


def test_settings_that_differ_between_groups_are_listed_and_flagged(
    make: Make, tmp_path: Path
) -> None:
    make("a", san=True, spiking={"neuron": "plif"}, learning={"gamma": 0.9}, seed=4)
    make("b", learning={"gamma": 0.99}, seed=5, log_every=7)
    make("c", learning={"gamma": 0.99, "tau": 0.1}, seed=6)
    groups = group_runs(read_runs([tmp_path]), "actor")
    assert differences(groups, "actor") == [
        ["learning.gamma", "0.99", "0.9"],
        ["learning.tau", "0.005 | 0.1", "0.005"],
    ]
    found = find_flags(groups, "actor")
    assert "groups differ in more than actor: learning.gamma, learning.tau" in found
    assert "settings vary within a group: learning.tau" in found
    make("d", san=True, spiking={"neuron": "lif"}, learning={"gamma": 0.9}, seed=5)
    rows = differences(group_runs(read_runs([tmp_path]), "actor"), "actor")
    assert rows[-1] == ["spiking.neuron", "–", "lif | plif"]
    own = differences(group_runs(read_runs([tmp_path]), "learning.gamma"), "learning.gamma")
    assert [key for key, *_ in own] == ["san", "learning.tau", "spiking.neuron"]


# -- what is written -------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with their attributes, and what is written between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """Groups whose names are hostile, of three seeds and one that runs."""
    root = tmp_path_factory.mktemp("comparison")
    runs = write_six(root / "runs", wandb_project=EVIL)
    write_run(runs / "running", record={"status": "running"}, seed=9)
    directory = root / "a" / "out"
    return directory, compare([runs], directory, by="wandb_project", threshold=2.0)


def test_figures_tables_and_a_report_are_written(out: tuple[Path, Comparison]) -> None:
    directory, _ = out
    figures = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    others = {"curves.csv", "runs.csv", "table.csv", "table.md", "report.html"}
    assert {path.name for path in directory.iterdir()} == figures | others
    for name in FIGURES:
        image = imread(directory / f"{name}.png")
        assert image.shape[1] == 1540 and image[..., :3].std() > 0.03
        assert ElementTree.parse(directory / f"{name}.svg").getroot().tag.endswith("svg")


def test_curves_are_written_whole(out: tuple[Path, Comparison]) -> None:
    directory, comparison = out
    with open(directory / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["axis"] for row in rows} == {"step", "updates", "minutes"}
    assert {row["group"] for row in rows} == {f"wandb_project {EVIL}", "wandb_project sansac"}
    steps = [row for row in rows if row["axis"] == "step"]
    single = [(row["run"], float(row["x"]), float(row["return"])) for row in steps if row["run"]]
    assert ("d1", 80, -5) in single and ("running", 160, 2) in single and len(single) == 14
    means = [(float(row["x"]), float(row["return"])) for row in steps if not row["run"]]
    assert means == [(80, -5), (160, 2)] * 2
    minutes = {float(row["x"]) for row in rows if row["axis"] == "minutes"}
    assert minutes == {1.0, 2.0}
    with open(directory / "table.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in table] == [2.0, 2.5]
    assert [float(row["iqm"]) for row in table] == [row["iqm"] for row in comparison.summaries]
    with open(directory / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    scores = {row["run"]: row["score"] for row in rows}
    assert len(scores) == 7 and scores.pop("running") == "nan"
    for group in comparison.groups:
        assert [float(scores[run.name]) for run in group.finished] == [*group.scores]


def test_the_markdown_table_carries_its_notes(out: tuple[Path, Comparison]) -> None:
    directory, comparison = out
    text = (directory / "table.md").read_text()
    table = text.splitlines()[4:6]
    assert all(line.startswith("| wandb_project") for line in table) and "<script" not in text
    assert table[0].count("|") - table[0].count("\\|") == len(comparison.table[0]) + 1
    row = "| 3 of 4 | 2.5 | 2.5 | 1.5 to 3.5 | 75% | 1.5 (0) | 0.25, 0.50 | 2.0 | 160 (3 of 3) |"
    assert row in table[1]
    assert len(comparison.flags) == 4
    for flag in comparison.flags:
        assert f"- {flag}" in unescape(text)


def test_the_report_stands_on_its_own(out: tuple[Path, Comparison]) -> None:
    path = out[0] / "report.html"
    parsed = Page(path)
    assert [section["id"] for section in parsed.all("section")] == list(FIGURES)
    sources = [image["src"] for image in parsed.all("img")]
    sources += [source["srcset"] for source in parsed.all("source")]
    assert len(set(sources)) == 2 * len(FIGURES)
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    html = re.sub(r"base64,[A-Za-z0-9+/=]+", "", path.read_text())
    assert not re.search(r"https?:|url\(|@import|<link|<iframe|href|onclick", html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [meta["content"] for meta in parsed.all("meta") if "http-equiv" in meta]
    assert policy == (
        "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )


def test_the_report_tells_the_numbers_and_escapes_names(out: tuple[Path, Comparison]) -> None:
    directory, comparison = out
    parsed = Page(directory / "report.html")
    assert len(parsed.all("script")) == 1
    for row in [*comparison.table, *comparison.improvement_table, *comparison.cost_table]:
        assert "".join(row) in parsed.text
    for flag in comparison.flags:
        assert flag in parsed.text
    assert f"wandb_project {EVIL}" in parsed.text
    assert "running" in parsed.text and "aaaaaaaaaa" in parsed.text


def test_the_report_holds_the_values_under_the_pointer(out: tuple[Path, Comparison]) -> None:
    """They are the curves' own, and the panels lie where the picture has its axes."""
    directory, comparison = out
    held = [tag["data-panels"] for tag in Page(directory / "report.html").all("div")
            if "data-panels" in tag]  # fmt: skip
    curves, profile = (json.loads(panels) for panels in held if panels)
    assert [panel["label"] for panel in curves] == [
        "environment steps", "gradient updates", "minutes of collecting and learning"
    ]  # fmt: skip
    for panel, by_group in zip(curves, comparison.curves.values(), strict=True):
        assert {line["name"]: (line["x"], line["y"], line["low"]) for line in panel["lines"]} == {
            name: tuple(map(pytest.approx, (curve.x, curve.y, curve.low)))
            for name, curve in by_group.items()
        }
    image = imread(directory / "curves.png")[..., :3].mean(2)
    height, width = image.shape
    for left, bottom, wide, tall in (panel["box"] for panel in curves):
        spine = image[
            round(height * (1 - bottom - tall)) + 2 : round(height * (1 - bottom)) - 2,
            round(width * left) - 2 : round(width * left) + 3,
        ]
        assert spine.min(1).max() < 0.5, "the left end of the axes"
        below = image[
            round(height * (1 - bottom)) - 2 : round(height * (1 - bottom)) + 3,
            round(width * left) + 2 : round(width * (left + wide)) - 2,
        ]
        assert below.min(0).max() < 0.5, "their lower end"
    (panel,) = profile
    for line, group in zip(panel["lines"], comparison.groups, strict=True):
        above = [(group.scores > x).mean() for x in line["x"]]
        assert line["y"] == pytest.approx(above, abs=1e-5)


def test_what_is_not_known_is_null_under_the_pointer(make: Make, tmp_path: Path) -> None:
    """One seed has no interval, and JSON no NaN."""
    make("alone", evaluations=[(80, float("inf")), (120, 1.0), (160, 2.0)])
    (group,) = group_runs(read_runs([tmp_path]), "actor")
    lines = curve_lines(Comparison([group], "actor", None, []))
    shown = page.Picture("p", "", "", lambda: draw_curves(Comparison([group], "actor", None, [])),
                         lines)  # fmt: skip
    line = json.loads(page.panels(shown))[0]["lines"][0]
    assert line["x"] == [120, 160] and line["low"] == line["high"] == [None, None]


def film(run: Path, shade: int) -> bytes:
    path = run / "videos" / "step-160.mp4"
    path.parent.mkdir()
    iio.imwrite(path, np.full((5, 32, 32, 3), shade, np.uint8), fps=10)
    return path.read_bytes()


@pytest.mark.usefixtures("undrawn")
def test_a_report_shows_the_video_of_the_median_seed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = {
        seed: film(make(f"d{seed}", [float(score)], seed=seed), 60 * seed)
        for seed, score in enumerate([7, 1, 3, 9])
    }
    make("s", san=True, seed=5)
    out = tmp_path / "out"
    compare([tmp_path / "runs"], out)
    (video,) = Page(out / "report.html").all("video")
    assert str(video["src"]) == "data:video/mp4;base64," + base64.b64encode(videos[2]).decode()
    still = iio.imread(base64.b64decode(str(video["poster"]).partition(",")[2]))
    assert abs(still.mean() - 120) < 6
    text = Page(out / "report.html").text
    assert "dense, seed 2, score 3.0" in text and "spiking, seed 5, score 2.0: no video" in text
    monkeypatch.setattr("sansac.compare.MOST_VIDEO", 100)
    compare([tmp_path / "runs"], out, overwrite=True)
    parsed = Page(out / "report.html")
    assert not parsed.all("video") and "<h2>Videos" not in parsed.text
    (tmp_path / "runs" / "d2" / "videos" / "step-160.mp4").write_bytes(b"<torn>")
    monkeypatch.setattr("sansac.compare.MOST_VIDEO", 10**6)
    film(tmp_path / "runs" / "s", 90)
    compare([tmp_path / "runs"], out, overwrite=True)
    parsed = Page(out / "report.html")
    assert len(parsed.all("video")) == 1
    assert "dense, seed 2, score 3.0: no video (" in parsed.text


@pytest.mark.usefixtures("undrawn")
def test_throughput_and_energy_are_told(make: Make, tmp_path: Path) -> None:
    for seed, (seconds, joules) in enumerate([(16.0, 3000.0), (32.0, 6000.0)]):
        run = make(f"d{seed}", seed=seed, seconds=seconds)
        metrics = JsonLines(run / "metrics.jsonl", 160)
        row = {"step": 160, "updates": 80, "time": seconds, "gpu/energy_joules": joules}
        metrics.log(row)
        metrics.close()
    make("s", san=True, seconds=80.0)
    out = tmp_path / "out"
    comparison = compare([tmp_path / "runs"], out)
    assert comparison.cost_table == [
        ["training", "steps a second", "updates a second", "GPU energy"],
        ["dense", "8", "4", "4.5 kJ"],
        ["spiking", "2", "1", "–"],
    ]
    assert "| dense | 8 | 4 | 4.5 kJ |" in (out / "table.md").read_text()
    assert "4.5 kJ" in Page(out / "report.html").text


def deploy(run: Path, joules: float, *, whole: float | None = None, step: int = 160) -> None:
    """What `energy` and `latency` leave in a run."""
    sides = {"agent": joules} | ({} if whole is None else {"dense_all": whole})
    spent = {side: {"arithmetic": j, "with_memory": 10 * j} for side, j in sides.items()}
    account = {"step": step, "models": {"chip": {"joules": spent}}}
    (run / "energy.json").write_text(json.dumps(account))
    engines = {"c": {"p50": 1e4 * joules, "p99": 2e4 * joules}, "onnx": {"absent": "no onnx"}}
    (run / "latency.json").write_text(json.dumps({"step": step, "engines": engines}))


def test_return_against_energy_and_latency_are_told_where_runs_have_them(
    make: Make, tmp_path: Path
) -> None:
    for seed in range(2):
        deploy(make(f"d{seed}", seed=seed), 3e-7 + seed * 2e-7, whole=9e-7)
        make(f"s{seed}", san=True, seed=seed)
    deploy(tmp_path / "runs" / "s1", 1e-7)
    out = tmp_path / "out"
    comparison = compare([tmp_path / "runs"], out)
    assert comparison.deployment_table == [
        ["an action", "dense", "spiking"],
        ["nJ, chip", "400.0", "100.0"],  # means over the runs that have it
        ["nJ, chip, with memory", "4,000.0", "1,000.0"],
        ["ms in C, p50", "4.000", "1.000"],
        ["ms in C, p99", "8.000", "2.000"],
    ]
    assert "| nJ, chip | 400.0 | 100.0 |" in (out / "table.md").read_text()
    report = Page(out / "report.html").text
    assert "nJ, chip" in report and "Return against energy" in report
    assert imread(out / "pareto.png")[..., :3].std() > 0.01
    panel = draw_pareto(comparison.groups).axes[0]
    drawn = {
        (round(x, 6), round(y, 6))
        for line in panel.lines[:-1]  # the last is the front
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type,call-overload]
    }
    assert drawn == {(300, 2), (500, 2), (900, 2), (100, 2)}


def test_no_run_with_energy_makes_no_picture_of_it(six: Path) -> None:
    comparison = Comparison(group_runs(read_runs([six]), "actor"), "actor", None, [])
    assert comparison.deployment_table == []
    assert "pareto" not in [picture.name for picture in comparison.pictures()]


def test_energy_of_another_checkpoint_is_flagged_and_a_damaged_file_named(
    make: Make, tmp_path: Path
) -> None:
    run = make("d")
    deploy(run, 1e-7, step=160)
    assert not any("another checkpoint" in flag for flag in flags(tmp_path / "runs"))
    deploy(run, 1e-7, step=80)
    assert any("another checkpoint" in flag for flag in flags(tmp_path / "runs"))
    (run / "energy.json").write_text("{")
    with pytest.raises(ConfigError, match=r"energy\.json is damaged"):
        flags(tmp_path / "runs")


def test_the_front_is_what_no_other_point_beats_in_both() -> None:
    points = [(3.0, 5.0), (1.0, 2.0), (2.0, 1.0), (4.0, 5.0), (5.0, 9.0), (1.0, 1.0)]
    assert front(points) == ([1.0, 3.0, 5.0], [2.0, 5.0, 9.0])


@pytest.mark.usefixtures("undrawn")
def test_settings_unlike_the_first_groups_are_marked(make: Make, tmp_path: Path) -> None:
    make("d", learning={"gamma": 0.9, "tau": 0.1})
    make("s", san=True, learning={"gamma": 0.8, "tau": 0.1})
    make("t", san=True, learning={"gamma": 0.9, "tau": 0.2})
    compare([tmp_path / "runs"], tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text()
    assert re.findall("<mark>(.*?)</mark>", html) == ["0.8 | 0.9", "0.1 | 0.2"]


@pytest.mark.usefixtures("undrawn")
def test_a_directory_that_is_not_empty_is_left_alone_unless_told(six: Path) -> None:
    directory = six.parent / "out"
    directory.mkdir()
    (directory / "improvement.svg").write_text("old")
    (directory / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not empty"):
        compare([six], directory)
    compare([six / "d?"], directory, overwrite=True)
    assert (directory / "mine.txt").read_text() == "kept"
    assert not (directory / "improvement.svg").exists(), "of a comparison that was overwritten"


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_two_trained_agents_are_compared_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finals = {}
    for san in (False, True):
        manager = Manager(tiny(tmp_path / "runs", san=san, seed=3))
        finals[manager.config.actor_name] = manager.train()["return_mean"]
    out = tmp_path / "out"
    words = ["compare", str(tmp_path / "runs"), "--out", str(out), "--threshold", "-1e6"]
    capsys.readouterr()
    assert runner.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(out)
    for actor, mean in finals.items():
        assert actor in printed and f"{mean:.1f} (3)" in printed
    assert "spiking over dense" in printed and "80 (1 of 1)" in printed
    assert "note: fewer than 5 finished seeds: dense has 1, spiking has 1" in printed
    with open(out / "table.csv", newline="") as file:
        table = {row["group"]: float(row["iqm"]) for row in csv.DictReader(file)}
    assert table == pytest.approx(finals)


@pytest.mark.usefixtures("undrawn")
def test_parity_is_held_against_random_actions_in_the_same_episodes(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(5):
        make(f"d{seed}", [-150.0 - seed, -130.0 + seed], seed=seed)
        make(f"s{seed}", [-160.0, -160.0 - 2 * seed], seed=seed, san=True)
    words = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert runner.main([*words, "--parity", "dense"]) == 0
    random = random_return(env_factory(tiny()), episodes=2, seed=FINAL["seed"])
    ratio = (-162.0 - random) / (-140.0 - random)  # IQMs by hand
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "spiking to dense" in line)
    assert f"{ratio:.3f}" in row
    text = (tmp_path / "out" / "table.md").read_text()
    assert f"above {random:.1f}," in text and "in the same 2 episodes" in text
    assert text.count("to dense") == 1
    assert f"above {random:.1f}," in (tmp_path / "out" / "report.html").read_text()
    # Alone, the group is held against nothing.
    alone = ["compare", str(tmp_path / "runs" / "d*"), "--out", str(tmp_path / "alone")]
    assert runner.main([*alone, "--parity", "dense"]) == 0
    assert "above random" not in (tmp_path / "alone" / "table.md").read_text()


@pytest.mark.parametrize("better", [0.0, -100.0])
def test_parity_needs_a_group_that_is_better_than_random_actions(
    better: float, make: Make, tmp_path: Path
) -> None:
    """A worse group would be held to have more than all of the reference's return."""
    score = random_return(env_factory(tiny()), episodes=2, seed=FINAL["seed"]) + better
    for seed in range(2):
        make(f"d{seed}", [score, score], seed=seed)
        make(f"s{seed}", [score - 10, score - 10], seed=seed, san=True)
    with pytest.raises(ConfigError, match=r"better than random .*found 'dense' with an IQM"):
        compare([tmp_path / "runs"], tmp_path / "out", parity="dense")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_parity_plays_an_environment_of_a_module_where_it_is_trusted(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRUST, "0")
    make("d", [-10.0], env="os:Pendulum-v1")
    make("s", [-20.0], env="os:Pendulum-v1", san=True)
    words = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--parity", "dense"]
    with pytest.raises(SystemExit):
        runner.main(words)
    assert "give --trust-env" in capsys.readouterr().err
    assert runner.main([*words, "--trust-env"]) == 0
    assert "spiking to dense" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_many_groups_are_told_whole_and_drawn_apart(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("dense", [100.0])
    for steps in range(2, 7):
        make(f"s{steps}", [100.0 + steps], san=True, spiking={"time_steps": steps})
    words = [str(tmp_path / "runs"), "--by", "spiking.time-steps", "--out", str(tmp_path / "out")]
    assert runner.main(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert all(f"{100 + steps}.0 (0)" in printed for steps in (0, 2, 3, 4, 5, 6))
    assert "Pendulum-v1 by spiking.time-steps" in printed
    drawn = looks(group_runs(read_runs([tmp_path]), "spiking.time_steps"))
    shown = [drawn[name] for name in ("dense", *(f"time_steps {n}" for n in range(2, 7)))]
    assert len({look.color for look in shown}) == len({look.marker for look in shown}) == 6
    for steps in range(7, 20):
        make(f"s{steps}", [100.0 + steps], san=True, spiking={"time_steps": steps})
    assert runner.main(["compare", *words, "--overwrite"]) == 0
    printed = capsys.readouterr().out
    assert all(f"time_steps {n} over dense" in printed for n in range(2, 20))
    assert "over time_steps" not in printed and "…" not in printed
    groups = group_runs(read_runs([tmp_path / "runs"]), "spiking.time_steps")
    drawn = looks(groups)
    assert len({drawn[group.name][:2] for group in groups}) == len(groups) == 19


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "compare needs run directories"),
        (["absent"], "absent: there is no run directory"),
        (["RUNS", "--by", "sac.gamma"], "did you mean `learning.gamma`?"),
        (["RUNS", "--out", "RUNS"], "is not empty"),
        (["RUNS", "--parity", "dens"], "(dense, spiking), found 'dens'"),
    ],
)
def test_what_cannot_be_compared_ends_with_code_2(
    words: list[str], message: str, six: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        runner.main(["compare", *(word.replace("RUNS", str(six)) for word in words)])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_without_a_name_the_output_is_under_the_runs(
    six: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(six.parent)
    assert runner.main(["compare", "runs/d*"]) == 0
    out = Path(capsys.readouterr().out.splitlines()[-1])
    assert out.parent == Path("runs/comparisons") and (out / "report.html").is_file()
    assert len(read_runs(["runs"])) == 6, "a comparison is no run"
