"""Numbers that move while an agent trains: constant, linear, exponential, cosine, or by return."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import tyro
from pydantic import AfterValidator, BeforeValidator, PlainSerializer

KINDS: dict[str, Callable[[float, float, float, float], float]] = {
    # Of start, end, and `left` of `span` still to go: exactly `start` where all is left.
    "linear": lambda start, end, left, span: end + (start - end) * left / span,
    "exponential": lambda start, end, left, span: start ** (left / span) * end ** (1 - left / span),
    "cosine": lambda start, end, left, span: (
        end + (start - end) * (1 - math.cos(math.pi * left / span)) / 2
    ),
    "return": lambda start, end, left, span: end + (start - end) * left / span,
}


class Schedule(NamedTuple):
    """A number that goes from `start` to `end` while training goes from `since` to `until`.

    Those two are shares of training, 0 to 1, or, of the kind `return`, evaluation returns: the
    number then follows the best return so far. Before and after it stays. As text
    KIND:START:END[:SINCE..UNTIL], such as linear:1:0.1:0.6..1 or return:2:1:-1200..-200.
    """

    kind: str
    start: float
    end: float
    since: float = 0.0
    until: float = 1.0

    def __str__(self) -> str:
        ends = f"{self.kind}:{self.start!r}:{self.end!r}"
        return f"{ends}:{self.since!r}..{self.until!r}"

    def at(self, progress: float, best_return: float | None = None) -> float:
        """`progress` is the share of training done; without a return, `return` is at `start`."""
        where = best_return if self.kind == "return" else progress
        if where is None or where <= self.since:
            return self.start
        if where >= self.until:
            return self.end
        left, span = self.until - where, self.until - self.since
        return KINDS[self.kind](self.start, self.end, left, span)


def at(value: float | Schedule, progress: float, best_return: float | None = None) -> float:
    """What an option that may be scheduled is at `progress`."""
    return value.at(progress, best_return) if isinstance(value, Schedule) else value


def initial(value: float | Schedule) -> float:
    return value.start if isinstance(value, Schedule) else value


def read(text: str) -> float | Schedule:
    """A number or a schedule from its text. Raises ValueError."""
    kind, *words = text.split(":")
    form = "KIND:START:END[:SINCE..UNTIL] with KIND linear, exponential, cosine or return"
    try:
        if kind not in KINDS:
            return float(text)
        if len(words) not in (2, 3):
            raise ValueError
        start, end = map(float, words[:2])
        since, _, until = (words[2] if len(words) == 3 else "0..1").partition("..")
        found = Schedule(kind, start, end, float(since), float(until))
    except ValueError:
        raise ValueError(f"expected a number or {form}, found {text!r}") from None
    if kind == "return" and len(words) == 2:
        raise ValueError(f"{text!r} names no returns: return:START:END:LOW..HIGH")
    if not all(map(math.isfinite, found[1:])):
        raise ValueError(f"a schedule's numbers are finite, found {text!r}")
    if found.since >= found.until:
        raise ValueError(f"{text!r}: {found.since} is not below {found.until}")
    if kind != "return" and not 0 <= found.since < found.until <= 1:
        raise ValueError(f"{text!r}: shares of training lie in 0..1")
    if kind == "exponential" and not (start > 0 and end > 0):
        raise ValueError(f"{text!r}: an exponential schedule needs ends above 0")
    return found


def _setting(value: Any) -> float | Schedule:
    if isinstance(value, Schedule):
        return value
    if isinstance(value, (bool, list, tuple, dict)):
        raise ValueError(f"expected a number or a schedule, found {value!r}")
    return read(str(value))


def _within(value: float | Schedule, above: float, least: float, most: float) -> float | Schedule:
    for number in (value.start, value.end) if isinstance(value, Schedule) else (value,):
        if not (math.isfinite(number) and above < number and least <= number <= most):
            low = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
            high = f" and at most {most:g}" if most < math.inf else ""
            found = value if isinstance(value, Schedule) else f"{value:g}"
            raise ValueError(f"expected a number {low}{high}, found {found}")
    return value


def bounded(
    above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> AfterValidator:
    """A check that a number, or both ends of a schedule, are finite and lie in bounds."""
    return AfterValidator(partial(_within, above=above, least=least, most=most))


# The type of an option that is a number or a schedule.
Scheduled = Annotated[
    float | Schedule,
    BeforeValidator(_setting),
    PlainSerializer(lambda value: str(value) if isinstance(value, Schedule) else value),
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|SCHEDULE",
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, (int, float, Schedule)),
        str_from_instance=lambda value: [str(value)],
    ),
]
