"""The machine at fault: too little memory, a clock that jumps, a second run beside the first."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import comparable, differences, tiny
from injection import Harmed, last_step, train

from sansac.checkpoint import read_record
from sansac.config import ConfigError
from sansac.logger import read_metrics
from sansac.manager import Manager, memory_limit

LIMIT = 6 * 2**30


@pytest.mark.slow
def test_a_buffer_beyond_a_memory_limit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """ulimit -v: a message with what fits, and what fits trains."""
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (LIMIT, LIMIT))
    config = tiny(tmp_path, name="run", replay={"capacity": 400_000_000})
    code, out, err = train(config, preexec_fn=limited).end()
    assert (code, out) == (2, "") and not (tmp_path / config.env).exists()
    match = re.search(r"replay.capacity: 400000000 .* take (\S+) GiB.* at most (\d+) fit", err)
    assert match and "Traceback" not in err
    fitting = tiny(tmp_path, name="run", replay={"capacity": int(match[2]) // 2})
    assert train(fitting, preexec_fn=limited).end()[0] == 0


@pytest.mark.slow
def test_memory_that_runs_out_all_the_same_is_one_message(tmp_path: Path) -> None:
    config = tiny(tmp_path, name="run", critic={"hidden": [200_000, 200_000]})
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (LIMIT, LIMIT))
    code, out, err = train(config, preexec_fn=limited).end()
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: out of memory") and "Traceback" not in err


def test_a_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as a kernel shows it, version 2: a limit above this process's own group holds too."""
    group = tmp_path / "jobs" / "job1" / "task"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{10**8}\n")
    (tmp_path / "cgroup").write_text(f"0::{'/jobs/job1/task'}\n1:cpu:/\n")
    monkeypatch.setattr("sansac.manager.CGROUPS", (tmp_path / "cgroup", tmp_path))
    assert memory_limit() == 10**8
    with pytest.raises(ConfigError, match=r"0\.1 GiB can be used here"):
        Manager(tiny(tmp_path, replay={"capacity": 3_000_000}))


SHIFT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* The wall clock is an hour earlier once the file named by SHIFTED exists. */
static int shifted(void) { return access(getenv("SHIFTED"), F_OK) == 0; }
int clock_gettime(clockid_t kind, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(kind, now);
  if (kind == CLOCK_REALTIME && shifted()) now->tv_sec -= 3600;
  return result;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec, out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


@pytest.mark.slow
def test_a_clock_set_back_an_hour(tmp_path: Path) -> None:
    """In mid-run: rates, ETAs and seconds stay those of the work, and the weights are the same."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "shift.c").write_text(SHIFT)
    library, shifted = tmp_path / "shift.so", tmp_path / "shifted"
    words = [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "shift.c", "-ldl"]
    subprocess.run(words, check=True)
    config = tiny(tmp_path, name="run", total_steps=3000, eval_every=100)
    run = tmp_path / config.env / "run"
    harmed = train(config, env={"LD_PRELOAD": str(library), "SHIFTED": str(shifted)})
    harmed.wait_for(lambda: last_step(run) > 500)
    started = read_record(run)["updated"]
    shifted.touch()
    code, _, err = harmed.end()
    assert code == 0, err
    assert read_record(run)["updated"] < started  # the fault was there
    seconds = [row["time"] for row in read_metrics(run / "metrics.jsonl")]
    assert seconds == sorted(seconds) and seconds[-1] < 600
    rates = [r["perf/steps_per_second"] for r in read_metrics(run / "metrics.jsonl")
             if "perf/steps_per_second" in r]  # fmt: skip
    assert min(rates) > 0
    for eta in re.findall(r"ETA (\d+):", err):
        assert int(eta) == 0
    for elapsed in re.findall(r"elapsed (\d+):", err):
        assert int(elapsed) == 0
    alone = Manager(config.model_copy(update={"name": "alone"}))
    alone.train()
    assert differences(comparable(run), comparable(alone.directory)) == []


@pytest.mark.slow
def test_two_runs_side_by_side(tmp_path: Path) -> None:
    """The same and another one at the same time: each as if alone."""
    configs = [tiny(tmp_path, name=name, san=True, seed=seed, total_steps=800)
               for name, seed in (("a", 1), ("b", 1), ("c", 2))]  # fmt: skip
    together: list[Harmed] = [train(config) for config in configs]
    assert [harmed.end()[0] for harmed in together] == [0, 0, 0]
    a, b, c = (comparable(tmp_path / config.env / str(config.name)) for config in configs)
    assert differences(a, b) == []
    assert differences(a, c) != []
