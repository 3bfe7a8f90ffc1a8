"""Planted keys and values of the environment: none of them is found in anything that is written."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from conftest import KEY, ROOT, options, tiny
from injection import Harmed, train

from sansac.manager import Manager

# WANDB_ENTITY is none of them: wandb's record names the account that it is for.
CANARIES = {
    "WANDB_API_KEY": KEY,
    "WANDB_USERNAME": "canary-user-81c4",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-9b1e77f0",
    "HF_TOKEN": "hf_canary3c5a",
    "SOME_VARIABLE": "canary-value-77aa01",
}
NETRC = "canary-netrc-40f2c0ffee"


def sung(directory: Path) -> list[str]:
    """Files, and parts of archives, that hold a canary."""
    words = [word.encode() for word in (*CANARIES.values(), NETRC)]
    found = []
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        contents = {str(path): path.read_bytes()}
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents |= {f"{path}:{name}": archive.read(name) for name in archive.namelist()}
        found += [name for name, content in contents.items() if any(w in content for w in words)]
    return found


@pytest.mark.slow
def test_no_canary_sings(no_account: None, tmp_path: Path) -> None:
    """Runs with every sink, an agent, an inspection, a comparison, a sweep and a search."""
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {NETRC}\n")
    (home / ".netrc").chmod(0o600)
    environment = {**CANARIES, "HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache"),
                   "WANDB_BASE_URL": "http://127.0.0.1:9"}  # fmt: skip
    said = []
    for san, wandb in ((False, "offline"), (True, "online")):
        config = tiny(work, name=f"run-{san}", san=san, wandb=wandb, tensorboard=True, video=True)
        code, out, err = train(config, env=environment).end()
        assert code == 0, err
        said += [out, err]
    run = work / "Pendulum-v1" / "run-True"
    Manager.load(run).save(work / "agent")
    words = options(total_steps=420, learning={"learning_starts": 400})
    for command in (
        ("inspect", run),
        ("evaluate", run, "--video", "--episodes", "1"),
        ("compare", work / "Pendulum-v1", "--out", work / "comparison"),
        ("sweep", "--out", work / "sweep", "--seeds", "0", "--workers", "1", *words),
        ("tune", "--out", work / "tune", "--trials", "2", "--workers", "1", *words),
    ):
        code, out, err = Harmed("runner.py", *command, env=environment, cwd=ROOT).end()
        assert code == 0, err
        said += [out, err]
    assert len(list(work.rglob("*"))) > 50
    assert sung(work) == []
    assert not any(word in text for text in said for word in (*CANARIES.values(), NETRC))


def test_a_canary_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" + NETRC)
    with zipfile.ZipFile(tmp_path / "b", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", CANARIES["HF_TOKEN"])
    assert sorted(map(os.path.basename, sung(tmp_path))) == ["a", "b:inside"]
