"""wandb, TensorBoard, the terminal and NVML at fault: the weights are those of a run without."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import KEY, comparable, differences, load_state, tiny
from injection import PATIENCE, Harmed, last_step, marked_pids, train

from sansac import logger, manager
from sansac.checkpoint import read_record
from sansac.config import Config
from sansac.manager import Manager

STEPS = 2000


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without any service leaves."""
    alone = Manager(config_of(tmp_path_factory.mktemp("alone")))
    alone.train()
    return comparable(alone.directory)


def config_of(runs: Path, **changes: Any) -> Config:
    return tiny(runs, name="run", **{"total_steps": STEPS, "eval_every": 400, **changes})


def ends_alike(harmed: Harmed, run: Path, expected: dict[str, Any], warnings: int = 1) -> str:
    """Its stderr, of a run that ended well, with the weights and metrics of one without services,
    and told of the service's failure so often."""
    code, _, err = harmed.end()
    assert code == 0, err
    assert differences(comparable(run), expected) == []
    assert read_record(run)["status"] == "finished"
    assert "Traceback" not in err
    told = [
        line for line in err.splitlines() if "is dropped" in line or "wandb records off" in line
    ]
    assert len(told) == warnings, err
    assert harmed.left() == []
    return err


class Refusing(BaseHTTPRequestHandler):
    """wandb's server over quota: 429 to everything, and please wait an hour."""

    def answer(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def over_quota() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["down", "slow", "over quota"])
def test_wandbs_server(
    fault: str, no_account: None, request: pytest.FixtureRequest, expected: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Not there, never answering, or refusing: one warning, and the run is recorded offline."""
    server = "http://127.0.0.1:9"
    if fault != "down":
        server = request.getfixturevalue("silent" if fault == "slow" else "over_quota")
    config = config_of(tmp_path, wandb="online")
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}
    err = ends_alike(train(config, env=environment), tmp_path / config.env / "run", expected)
    assert "its server was not reached" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "halted"])
def test_wandbs_service_at_fault_in_mid_run(
    number: signal.Signals, no_account: None, expected: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(tmp_path, wandb="offline")
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run) > 100)
    (service,) = marked_pids(harmed.mark, "wandb-core")
    os.kill(service, number)
    ends_alike(harmed, run, expected)


@pytest.mark.slow
def test_no_home_that_can_be_written(
    no_account: None, expected: dict[str, Any], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.chmod(0o500)
    config = config_of(tmp_path, wandb="offline")
    harmed = train(config, env={"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"})
    ends_alike(harmed, tmp_path / config.env / "run", expected, warnings=0)


@pytest.mark.slow
def test_a_tensorboard_directory_that_goes_away(expected: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard=True)
    run = tmp_path / config.env / "run"
    harmed = train(config)
    harmed.wait_for(lambda: last_step(run) > 100)
    (run / "tensorboard").rename(tmp_path / "gone")  # at once: its writer would fill it anew
    (run / "tensorboard").write_text("in its place")
    code, _, err = harmed.end()
    assert code == 0 and "TensorBoard is dropped, training goes on" in err
    assert differences(comparable(run), expected) == []


@pytest.mark.slow
def test_stderr_closed(expected: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    harmed = train(config, stderr=None, preexec_fn=partial(os.close, 2))
    assert harmed.end()[0] == 0
    assert differences(comparable(tmp_path / config.env / "run"), expected) == []


@pytest.mark.slow
def test_stderr_whose_reader_has_gone(expected: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    harmed = train(config)
    assert harmed.process.stderr
    harmed.process.stderr.close()
    assert harmed.process.wait(PATIENCE) == 0
    assert differences(comparable(tmp_path / config.env / "run"), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_terminal_that_is_resized(locale: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """To nothing and back, all the while; with a locale and without."""
    ours, theirs = pty.openpty()
    config = config_of(tmp_path)
    environment = {"LC_ALL": locale, "LANG": locale, "TERM": "xterm", "PYTHONUTF8": "0",
                   "PYTHONCOERCECLOCALE": "0"}  # fmt: skip
    harmed = train(config, stderr=theirs, env=environment)
    os.close(theirs)
    sizes, over = [(24, 80), (1, 1), (200, 500), (0, 0)], threading.Event()

    def resize() -> None:
        turn = 0
        while not over.wait(0.05):
            turn += 1
            rows, columns = sizes[turn % len(sizes)]
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            harmed.process.send_signal(signal.SIGWINCH)

    def drain() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:
            pass

    threads = [threading.Thread(target=target, daemon=True) for target in (resize, drain)]
    for thread in threads:
        thread.start()
    assert harmed.process.wait(PATIENCE) == 0
    over.set()
    assert differences(comparable(tmp_path / config.env / "run"), expected) == []


@pytest.mark.slow
def test_no_locale_and_a_name_beyond_ascii(tmp_path: Path) -> None:
    config = config_of(tmp_path / "Läufe", total_steps=200)
    environment = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, _, err = train(config, env=environment).end()
    assert code == 0 and "Traceback" not in err, err
    assert load_state(tmp_path / "Läufe" / config.env / "run")["counters"]["step"] == 200


# -- NVML ------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


def nvml(fault: str) -> Any:
    """The library as far as it is used, at fault in one way from the third sample on."""
    calls = {"n": 0}

    def told(value: Any) -> Any:
        calls["n"] += 1
        if fault in ("disappears", "hot unplug") and calls["n"] > 6:
            raise NVMLError("GPU is lost")
        if fault == "every call":
            raise NVMLError("Not Supported")
        if fault == "other types":
            return (
                SimpleNamespace(gpu="much", used=None)
                if isinstance(value, SimpleNamespace)
                else "?"
            )
        return value

    def start() -> None:
        if fault == "init":
            raise NVMLError("Driver Not Loaded")

    def handle(uuid: str) -> str:
        if fault == "no such GPU":
            raise NVMLError("Not Found")
        return "gpu"

    library = SimpleNamespace(
        nvmlInit=start, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=handle,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda gpu: told(SimpleNamespace(gpu=50)),
        nvmlDeviceGetMemoryInfo=lambda gpu: told(SimpleNamespace(used=10**9)),
        nvmlDeviceGetPowerUsage=lambda gpu: told(90_000),
        nvmlDeviceGetTemperature=lambda gpu, kind: told(60),
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: told(5_000),
    )  # fmt: skip
    if fault == "half present":
        del library.nvmlDeviceGetPowerUsage, library.nvmlDeviceGetTotalEnergyConsumption
    return None if fault == "absent" else library


FAULTS = [
    "absent",
    "half present",
    "init",
    "no such GPU",
    "every call",
    "disappears",
    "other types",
]


@pytest.mark.parametrize(
    "fault", [*FAULTS[:2], *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[2:])]
)
def test_nvml(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is told it has a GPU: one note, and the weights of a run that has none."""
    runs = []
    for name in ("without", "with"):
        trained = Manager(tiny(tmp_path, name=name))
        if name == "with":
            monkeypatch.setitem(sys.modules, "pynvml", nvml(fault))
            monkeypatch.setattr(logger, "torch_uuid", lambda device: "GPU-1")
            quick = partial(logger.GpuMonitor, interval=0.01)
            monkeypatch.setattr(logger, "GpuMonitor", quick)
            monkeypatch.setattr(
                manager,
                "Logger",
                lambda *words, **more: logger.Logger(*words, **more | {"device": "cuda"}),
            )
            begun = time.monotonic()
        trained.train()
        runs.append(comparable(trained.directory))
    for row in runs[1]["rows"]:
        for tag in [tag for tag in row if tag.startswith("gpu/")]:
            del row[tag]
    assert differences(*runs) == []
    assert time.monotonic() - begun < 60
    assert len([r for r in caplog.records if "GPU metrics are incomplete" in r.message]) == 1
