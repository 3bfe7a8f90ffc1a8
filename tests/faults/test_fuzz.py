"""100,000 inputs made to break what reads them: each is taken, or refused by a named error.

A case that hangs, raises anything else, or opens a file for writing outside its own directory
fails. The quick half runs a few of each kind, `-m slow` all: TARGETS says how many.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from conftest import differences, tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import runner
from sansac import checkpoint, kernels, watch, watch_page
from sansac.checkpoint import CheckpointError
from sansac.config import NEURON_NAMES, Config, ConfigError, fields, load_yaml, resolve
from sansac.environments import EnvironmentFault
from sansac.logger import JsonLines, read_metrics
from sansac.manager import Manager
from sansac.progress import Progress

SECONDS = 20  # after which a case hangs: a hundred times what the slowest takes


@pytest.fixture(params=["few", pytest.param("all", marks=pytest.mark.slow)])
def share(request: pytest.FixtureRequest) -> float:
    """Of a target's cases, those that are run."""
    return 1.0 if request.param == "all" else float(os.environ.get("SHARE", 0.003))


def fuzz(strategy: st.SearchStrategy[Any], cases: float, case: Callable[[Any], None]) -> None:
    """Run so many cases, each within SECONDS."""
    count = 0

    @settings(
        max_examples=int(cases), derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(strategy)
    def run(value: Any) -> None:
        nonlocal count
        count += 1
        with in_time():
            case(value)

    run()
    print(f"\n{case.__qualname__}: {count:,} cases")
    assert count >= int(cases) * 0.9  # hypothesis ends early where it has seen all there is


class Hang(BaseException):
    """Not an Exception, which what is tested might take for its file's fault."""


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hang(f"no end after {SECONDS} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


allowed: list[Path] = []  # where files may be written at present; empty: nothing is watched
outside: list[str] = []


def watch_writes(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: what would write outside `allowed`, or start a process, is noted."""
    if not allowed:
        return
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork"):
        outside.append(f"{event} {arguments}")
    paths: tuple[Any, ...] = ()
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        paths = (path,) if writes or (mode and set(mode) & set("wax+")) else ()
    elif event in ("os.rename", "os.link", "os.symlink"):
        paths = arguments[:2]
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"):
        paths = arguments[:1]
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            place = Path(os.path.realpath(os.fsdecode(path)))
            if not any(place.is_relative_to(root) for root in [*allowed, Path("/dev")]):
                outside.append(f"{event} {place}")


sys.addaudithook(watch_writes)  # for as long as the process lives; idle while `allowed` is empty


@contextmanager
def writing_only_in(directory: Path) -> Iterator[None]:
    outside.clear()
    allowed.append(directory.resolve())
    try:
        yield
    finally:
        allowed.clear()
    assert not outside, outside


# -- configuration ---------------------------------------------------------------------------------

NAMES = [*fields(), *{name.rpartition(".")[0] for name in fields()} - {""}]
words = st.one_of(
    st.sampled_from(["auto", "lif", "cpu", "population", "../..", "/etc", "os:system", "1e999",
                     "0x1f", "~", "null", "2001-13-45", "9" * 400, "", "-", "[", "{a", "*a", "&a",
                     "!!python/object/apply:os.system [id]", "%", "\x00", "\ud800", "é"]),
    st.text(max_size=12),
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 10**400, True, None]),
    st.integers(),
    st.floats(),
)
values = st.recursive(
    numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"learning.gamma": 1}` -> `{"learning": {"gamma": 1}}`, as far as its values allow it."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".") if name in NAMES else [name]
        place = tree
        for key in path:
            place = place.setdefault(key, {}) if isinstance(place.get(key, {}), dict) else {}
        place[last] = value
    return tree


def as_yaml(tree: Any) -> str:
    try:
        return yaml.safe_dump(tree)
    except (yaml.YAMLError, UnicodeEncodeError):
        return repr(tree)


layers = st.dictionaries(st.sampled_from(NAMES) | words, values, max_size=5).map(nested)
edits = st.lists(
    st.tuples(
        st.floats(0, 1), st.integers(0, 4), st.sampled_from([*"&*!%@{}[]:|>?-#,\n\t'\"", ""])
    ),
    max_size=4,
)


def edited(text: str, changes: list[tuple[float, int, str]]) -> str:
    for place, cut, new in changes:
        at = int(place * len(text))
        text = text[:at] + new + text[at + cut :]
    return text


def test_configuration_files(share: float, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    whole = as_yaml(tiny(tmp_path).dump())
    texts = st.one_of(
        st.builds(edited, layers.map(as_yaml), edits),
        st.builds(edited, st.just(whole), edits.filter(bool)),
        st.text(max_size=200),
    )

    def configuration_file(text: str) -> None:
        path.write_bytes(text.encode(errors="surrogatepass"))
        with writing_only_in(tmp_path), suppress(ConfigError):
            config = resolve(load_yaml(path))
            assert Config(**config.dump()) == config or "nan" in text.lower()
            checkpoint.make_run_dir(config.model_copy(update={"runs_dir": tmp_path / "runs"}))
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)

    fuzz(texts, 25_000 * share, configuration_file)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nenv: *c",
        "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60)),
        "env_kwargs: &a {x: *a}",
        "[" * 100_000,
        "{a: " * 5_000,
        "seed: " + "9" * 100_000,
        "seed: 2001-13-45",
        "? [1]\n: 2",
        "!!binary x",
        "<<: 3",
    ],
    ids=["aliases", "a bomb of aliases", "a loop", "deep", "deep maps", "long number", "no date",
         "a list as key", "no binary", "no merge"],
)  # fmt: skip
def test_yaml_that_breaks_readers_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with in_time(), pytest.raises(ConfigError) as caught:
        resolve(load_yaml(tmp_path / "config.yaml"))
    assert len(str(caught.value)) < 250_000


# -- command lines ---------------------------------------------------------------------------------


class Reached(Exception):
    """The command line was taken: work would begin."""


OPTIONS = [f"--{name.replace('_', '-')}" for name in fields()]
OTHERS = [
    "--resume",
    "--config",
    "--checkpoint",
    "--trust-env",
    "--no-san",
    "--episodes",
    "--json",
    "--out",
    "--seeds",
    "--grid",
    "--actors",
    "--serve",
    "--by",
    "--neurons",
    "--help",
    "--",
]
KNOWN = [*runner.COMMANDS, "lr-range", "optimizers", "spiking.time-steps=1,2", "0..3", "9..1",
         "configs/popsan.yaml", "popsan", "Pendulum-v1", "nowhere"]  # fmt: skip
command_lines = st.lists(
    st.one_of(
        st.sampled_from(OPTIONS), st.sampled_from(OTHERS), st.sampled_from(KNOWN), words,
        numbers.map(str), st.builds("{}={}".format, st.sampled_from(OPTIONS), words | numbers),
    ),
    max_size=6,
)  # fmt: skip


def test_command_lines(
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ends with 0 (help), 2 (refused), or where work would begin."""
    monkeypatch.chdir(tmp_path)

    def command_line(arguments: list[str]) -> None:
        # No system passes on a zero, or what is no text.
        arguments = [word.replace("\0", "").encode(errors="replace").decode() for word in arguments]
        with writing_only_in(tmp_path):
            try:
                runner.main(arguments)
            except Reached:
                pass
            except SystemExit as ending:
                assert ending.code in (0, 2), capsys.readouterr().err
        assert "Traceback" not in capsys.readouterr().err

    stop = mock.Mock(side_effect=Reached)
    with ExitStack() as patches:
        for name in ("manager.Manager.__init__", "watch_page.serve", "sweep.sweep", "tune.tune"):
            patches.enter_context(mock.patch(f"sansac.{name}", stop))
        fuzz(command_lines, 5_000 * share, command_line)


# -- metrics and records ---------------------------------------------------------------------------

rows = st.dictionaries(
    st.sampled_from(["step", "updates", "time", "train/episode_return", "loss/critic", "<b>"])
    | words,
    st.integers(-5, 10**6) | values,
    max_size=6,
)


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode(errors="surrogatepass")


def test_metrics_files_and_records(share: float, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("env: Pendulum-v1\n")  # quick to read
    whole = as_json({"step": 2, "updates": 1, "time": 0.5, "train/episode_return": -3.0})
    line = st.one_of(rows.map(as_json), st.just(whole), st.binary(max_size=40))
    record = st.one_of(
        st.dictionaries(
            st.sampled_from(["status", "final", "format_version", "step"]), values, max_size=4
        ).map(as_json),
        st.binary(max_size=40),
        values.map(as_json),
    )

    def metrics_file(case: tuple[list[bytes], bytes, bytes, int]) -> None:
        lines, torn, note, step = case
        metrics = run / "metrics.jsonl"
        metrics.write_bytes(b"".join(part + b"\n" for part in lines) + torn)
        (run / "run.json").write_bytes(note)
        with writing_only_in(tmp_path):
            with suppress(ConfigError):
                watched = watch.Watched(run)
                assert isinstance(watch.line(watched), str)
                json.dumps(watch_page.lines(watched.series))
            with suppress(ValueError):
                read_metrics(metrics)
            JsonLines(metrics, step).close()
            assert all(row["step"] <= step for row in read_metrics(metrics))

    cases = st.tuples(st.lists(line, max_size=4), st.binary(max_size=9), record, st.integers(-1, 9))
    fuzz(cases, 30_000 * share, metrics_file)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manager = Manager(tiny(tmp_path_factory.mktemp("runs"), total_steps=80, san=True))
    manager.train()
    return manager.directory


def test_bytes_of_checkpoints(share: float, trained: Path, tmp_path: Path) -> None:
    """Damage anywhere is found, or changes nothing that is read."""
    path = tmp_path / "last.pt"
    whole = (trained / "checkpoints" / "best.pt").read_bytes()
    state = checkpoint.load(trained / "checkpoints" / "best.pt")
    place = st.floats(0, 1, exclude_max=True)
    damage = st.lists(
        st.tuples(place, st.sampled_from(["flip", "cut", "fill", "copy", "insert"]), place),
        min_size=1, max_size=3,
    )  # fmt: skip

    def bytes_of_a_checkpoint(changes: list[tuple[float, str, float]]) -> None:
        content = bytearray(whole)
        for where, how, more in changes:
            at, other = int(where * len(content)), int(more * len(content))
            if how == "flip":
                content[at] ^= 1 << (other % 8)
            elif how == "cut":
                del content[at : at + 1 + other]
            elif how == "fill":
                content[at : at + 64] = bytes(len(content[at : at + 64]))
            elif how == "copy":
                content[at : at + 32] = content[other : other + len(content[at : at + 32])]
            else:
                content[at:at] = content[other : other + 16]
            if not content:
                break
        path.write_bytes(content)
        with writing_only_in(tmp_path), suppress(CheckpointError):
            assert differences(checkpoint.load(path), state) == []

    fuzz(damage, 9_000 * share, bytes_of_a_checkpoint)


def test_contents_of_checkpoints(share: float, trained: Path, tmp_path: Path) -> None:
    """A checkpoint made by hand: anything in any place is refused by name, or goes on."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(trained / "config.yaml", run)
    state = checkpoint.load(trained / "checkpoints" / "last.pt")
    places = list(leaves(state))
    tensors = st.builds(
        lambda shape, kind: torch.zeros(shape, dtype=kind),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
    )
    gone = object()
    new = st.one_of(st.just(gone), numbers, words, tensors, st.just([]), st.just({}))

    def contents_of_a_checkpoint(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        changed = copied(state)
        for (*path, last), value in changes:
            with suppress(KeyError, IndexError, TypeError):
                place = changed
                for key in path:
                    place = place[key]
                if value is gone:
                    del place[last]
                else:
                    place[last] = value
        torch.save(changed, run / "checkpoints" / "last.pt")
        with writing_only_in(tmp_path):
            try:
                manager = Manager.resume(run)
                with manager.opened(Progress(10)):
                    pass
            except (CheckpointError, ConfigError, EnvironmentFault):
                pass

    changes = st.lists(st.tuples(st.sampled_from(places), new), min_size=1, max_size=3)
    fuzz(changes, 1_000 * share, contents_of_a_checkpoint)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in children:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def copied(tree: Any) -> Any:
    """Its own containers around the same tensors."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, list) else tree


# -- kernels ---------------------------------------------------------------------------------------

unusual = st.sampled_from([0.0, -0.0, 1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan")])
kernel_inputs = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(0, 5), max_size=3),
        "entries": st.lists(unusual | st.floats(width=32), min_size=1, max_size=8),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        "stride": st.integers(1, 2),
        "neuron": st.sampled_from(["lif", "plif", "cuba"]),
        "time_steps": st.integers(-1, 5),
        "constant": st.booleans(),
        "output": st.sampled_from(["spikes", "mean"]),
        "decay": st.floats(0.01, 0.99),
        "v_threshold": st.sampled_from([1e-39, 0.5, 1.0, 3e38]) | st.floats(0.01, 10),
        "v_reset": st.floats(-1, 1),
        "surrogate": st.sampled_from(list(kernels.SURROGATES)),
        "alpha": st.floats(0.1, 10),
        "detach_reset": st.booleans(),
    }
)


def test_kernel_inputs(share: float) -> None:
    """The compiled neurons give the bits of plain torch, or both refuse."""
    assert {"lif", "plif", "cuba"} <= set(NEURON_NAMES)

    def kernel_input(case: dict[str, Any]) -> None:
        answers = [answer(case, backend) for backend in ("native", "torch")]
        assert differences(answers[0], answers[1]) == []

    fuzz(kernel_inputs, 30_000 * share, kernel_input)


def answer(case: dict[str, Any], backend: str) -> Any:
    """Spikes, and whether a gradient of the current's shape came back; or the error's type."""
    shape, entries = case["shape"], case["entries"]
    size = int(torch.tensor(shape).prod()) * case["stride"]
    data = torch.tensor(entries).repeat(size // len(entries) + 1)[:size].to(case["dtype"])
    current = data[:: case["stride"]].reshape(shape).requires_grad_()
    chosen = {key: case[key] for key in ("time_steps", "constant", "output", "v_threshold",
              "v_reset", "surrogate", "alpha", "detach_reset")}  # fmt: skip
    try:
        if case["neuron"] == "cuba":
            decays = {"c_decay": case["decay"], "v_decay": 1 - case["decay"]}
            spikes = kernels.cuba_lif(current, **decays, **chosen, backend=backend)
        elif case["neuron"] == "plif":
            w = torch.tensor(case["decay"])
            spikes = kernels.parametric_lif(
                current, w=w, decay_input=True, **chosen, backend=backend
            )
        else:
            tau = 1 / case["decay"]
            spikes = kernels.lif(current, tau=tau, decay_input=True, **chosen, backend=backend)
        spikes.float().sum().backward()
    except (ValueError, IndexError):
        return "refused"
    assert current.grad is not None and current.grad.shape == current.shape
    return spikes.detach()
