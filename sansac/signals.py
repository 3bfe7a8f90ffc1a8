"""SIGINT and SIGTERM as requests, which whoever is at work answers when it can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask(number)` at SIGINT and SIGTERM; outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        ask(number)

    old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
