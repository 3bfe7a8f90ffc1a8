"""SIGINT and SIGTERM as requests, which whoever is at work answers when it can; SIGTERM, where
nobody does, as an orderly exit."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask(number)` at SIGINT and SIGTERM; outside the main thread nothing changes."""
    with _handler(ask, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def exiting() -> Iterator[None]:
    """At SIGTERM exit with 143, closing what is open and ending what was started."""
    with _handler(lambda number: sys.exit(128 + number), signal.SIGTERM):
        yield


@contextmanager
def _handler(ask: Callable[[int], object], *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        ask(number)

    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
