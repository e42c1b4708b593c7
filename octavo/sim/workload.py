"""What arrives when: requests as sizes and identities, read from public traces or drawn.

A trace says nothing about text. Where it gives identities of prefix blocks (Mooncake's hash ids),
prompts are built so that equal ids are equal tokens; where it does not, every prompt is its own,
and no sharing is invented.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import errno
import gzip
import io
import json
import math
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from octavo.core.request import Request, SamplingParams
from octavo.errors import BadFile, InvalidRequest, OctavoError

MOONCAKE_BLOCK = 512  # tokens for each hash id
MOONCAKE_TICK = 3.0  # the conversation trace's timestamps are multiples of this many seconds
MAX_TOKEN = 2**31 - 1


class Item(NamedTuple):
    """One request of a workload. at: seconds from the start. blocks: identities of the prompt's
    successive runs of `Workload.block_tokens` tokens; empty where nothing is shared."""

    id: str
    at: float
    prompt: int
    output: int
    tenant: str = ""
    priority: int = 0
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. source: where they come from, and what was changed."""

    name: str
    items: tuple[Item, ...]
    block_tokens: int = MOONCAKE_BLOCK
    source: str = ""
    changes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for item in self.items:
            if item.id in seen:
                raise InvalidRequest(f"{self.name}: two requests are called {item.id!r}")
            seen.add(item.id)
        for before, after in pairwise(self.items):
            if after.at < before.at:
                raise InvalidRequest(f"{self.name}: {after.id} arrives before {before.id}")

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.items[-1].at - self.items[0].at if self.items else 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.items) / self.seconds if self.seconds else float(len(self.items))

    @property
    def shares_prefixes(self) -> bool:
        return any(item.blocks for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def _with(self, items: Iterable[Item], change: str, **more: Any) -> Workload:
        changes = (*self.changes, change)
        return dataclasses.replace(self, items=tuple(items), changes=changes, **more)

    def at_rate(self, rate: float) -> Workload:
        """The same requests at `rate` a second on average: gaps stretched, their shape kept."""
        _positive("rate", rate)
        return self.faster(rate / self.rate)

    def faster(self, factor: float) -> Workload:
        """All gaps divided by `factor`."""
        _positive("rate factor", factor)
        items = (item._replace(at=item.at / factor) for item in self.items)
        return self._with(items, f"{factor:.4g}x the rate")

    def window(self, start: float, end: float) -> Workload:
        """Requests that arrive in [start, end), from zero again."""
        kept = [i._replace(at=i.at - start) for i in self.items if start <= i.at < end]
        if not kept:
            raise InvalidRequest(f"{self.name} has no request between {start:g} and {end:g} s")
        return self._with(kept, f"seconds {start:g} to {end:g}")

    def head(self, count: int) -> Workload:
        return self._with(self.items[:count], f"first {count}")

    def lengths(self, factor: float) -> Workload:
        """Prompts, outputs and blocks of identity all `factor` times as long, at least 1."""
        _positive("length factor", factor)
        block = max(1, round(self.block_tokens * factor))
        items = (
            i._replace(
                prompt=max(1, round(i.prompt * factor)), output=max(1, round(i.output * factor))
            )
            for i in self.items
        )
        return self._with(items, f"lengths x {factor:g}", block_tokens=block)

    def fitting(self, max_tokens: int) -> Workload:
        """Without the requests that need more than max_tokens of context."""
        kept = [i for i in self.items if i.prompt + i.output <= max_tokens]
        lost = len(self.items) - len(kept)
        if not lost:
            return self
        return self._with(kept, f"{lost} requests beyond {max_tokens} tokens left out")

    def resampled(self, seed: int) -> Workload:
        """A bootstrap: the same gaps and sizes, drawn anew with replacement and seed, in runs of
        20 neighbours so that bursts stay bursts."""
        draw, n, run = random.Random(f"resample {seed}"), len(self.items), 20
        gaps = [0.0, *(b.at - a.at for a, b in pairwise(self.items))]
        picked: list[int] = []
        while len(picked) < n:
            start = draw.randrange(n)
            picked.extend((start + k) % n for k in range(run))
        items, now = [], 0.0
        for number, index in enumerate(picked[:n]):
            now += gaps[index] if number else 0.0
            items.append(self.items[index]._replace(id=f"r{number}", at=now))
        return self._with(items, f"resampled with seed {seed}")

    def requests(
        self, on: Callable[[Item], dict[str, Any]] = lambda _: {}
    ) -> Iterator[tuple[Item, Request]]:
        """Requests of the core, made one at a time, lengths forced. on: more of their fields."""
        made: dict[int, SamplingParams] = {}  # by length: what checks itself is made once
        for number, item in enumerate(self.items):
            # Without identities a namespace of its own keeps a prompt from being anybody's prefix.
            shared = bool(item.blocks)
            prompt = _prompt(item, self.block_tokens) if shared else array("i", (1,)) * item.prompt
            params = made.get(item.output)
            if params is None:
                params = made[item.output] = SamplingParams(
                    max_tokens=item.output, temperature=0.0, ignore_eos=True, speculation=False
                )
            yield (
                item,
                Request(
                    id=item.id, prompt=prompt, params=params, arrival=item.at, seed=number,
                    priority=item.priority, tenant=item.tenant,
                    namespace=b"" if shared else item.id.encode(), **on(item),
                ),
            )  # fmt: skip


def _positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidRequest(f"the {what} must be positive, got {value!r}")


def _prompt(item: Item, block: int) -> array[int]:
    """Tokens of which the i-th run is a function of the i-th identity alone."""
    tokens = array("i")
    most = MAX_TOKEN // block - 1
    for identity in item.blocks:
        first = (identity % most) * block
        tokens.extend(range(first, first + block))
        if len(tokens) >= item.prompt:
            break
    if len(tokens) < item.prompt:
        raise BadFile(f"{item.id}: {len(item.blocks)} blocks of {block} for {item.prompt} tokens")
    return tokens[: item.prompt]


# ---- reading ----


def read(path: str | Path, *, seed: int = 0) -> Workload:
    """A trace file: Azure's CSV, our reduced sample, Mooncake's JSONL, a log of requests.

    The first line tells the kind;
    `.gz` is read, and so is a recording. seed: for the jitter within Mooncake's
    coarse timestamps. Raises BadFile, naming the line.
    """
    path = Path(path)
    try:
        with open_text(path) as lines:
            first = lines.readline()
            if first.startswith(RECORDED):
                from octavo.sim import recording

                return recording.workload(recording.open_recording(path))
            lines.seek(0)
            items = list(_items(path, first, lines))
    except UNREADABLE as error:
        raise BadFile(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not items:
        raise BadFile(f"{path}: no request in it")
    items.sort(key=lambda item: item.at)
    source = str(path.name)
    if '"hash_ids"' in first:
        items = _jittered(items, seed)
    start = items[0].at
    return Workload(
        path.name.split(".")[0],
        tuple(item._replace(at=item.at - start) for item in items),
        source=source,
    )


# What reading a file raises that is not there, is cut off, or is no text.
RECORDED = '{"kind":"head"'  # how what `octavo serve --record` wrote begins
MOST_LINE = 64 * 2**20  # characters of a line; a packed file may say without end
UNREADABLE = (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError)


class Lines(io.TextIOWrapper):
    """A text of lines, none of them beyond MOST_LINE: a longer one is an OSError."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        line = super().readline(MOST_LINE if size < 0 else size)
        if size < 0 and len(line) == MOST_LINE and line[-1] != "\n":
            raise OSError(errno.EFBIG, f"a line has more than {MOST_LINE} characters")
        return line

    def __next__(self) -> str:  # type: ignore[override]
        line = self.readline()
        if not line:
            raise StopIteration
        return line


def open_text(path: Path) -> Lines:
    """A file's lines, unpacked if it is called `.gz`. Reading raises what `UNREADABLE` names."""
    if path.suffix == ".gz":
        return Lines(io.BufferedReader(gzip.open(path)))  # type: ignore[type-var]
    return Lines(path.open("rb"))


def _items(path: Path, first: str, lines: Iterable[str]) -> Iterator[Item]:
    head = first.strip().lower()
    if head.startswith("{"):
        yield from _json_items(path, lines)
    elif head in ("timestamp,contexttokens,generatedtokens", "arrival_s,context_tokens,"
                  "generated_tokens"):  # fmt: skip
        yield from _csv_items(path, lines)
    else:
        raise BadFile(f"{path}: no trace that we know begins with {first.strip()[:60]!r}")


def _csv_items(path: Path, lines: Iterable[str]) -> Iterator[Item]:
    rows = csv.reader(lines)
    next(rows)
    for number, row in enumerate(rows):
        if not row:
            continue
        try:
            when, prompt, output = row
            at = _finite(_seconds(when))
            yield Item(f"r{number}", at, _tokens(prompt), _tokens(output))
        except ValueError as error:
            raise BadFile(f"{path}, line {number + 2}: {error}") from None


def _seconds(when: str) -> float:
    """Seconds, of a number or of a wall clock time (whose 7th fractional digit is dropped)."""
    try:
        return float(when)
    except ValueError:
        return datetime.fromisoformat(when[:26]).timestamp()


def _finite(at: float) -> float:
    if not math.isfinite(at):
        raise ValueError(f"no request can arrive at {at}")
    return at


def _tokens(count: str | float) -> int:
    """Traces hold zeros: a request that was answered with nothing still had a step."""
    if int(count) < 0:
        raise ValueError(f"{count} is no number of tokens")
    return max(1, int(count))


# Fields of JSON traces: (arrival, its unit in seconds, prompt tokens, output tokens).
_LAYOUTS = (
    ("timestamp", 1e-3, "input_length", "output_length"),  # Mooncake, aiperf
    ("arrival_time", 1.0, "input_toks", "output_toks"),  # LLMServingSim's measured runs
    ("arrival_s", 1.0, "prompt_tokens", "output_tokens"),  # ours
)


def _json_items(path: Path, lines: Iterable[str]) -> Iterator[Item]:
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            item = _json_item(row, number)
        except MALFORMED as error:
            raise BadFile(f"{path}, line {number + 1}: {_said(error)}") from None
        yield item


# What a line of JSON raises that holds something else than it should.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
             RecursionError)  # fmt: skip


def _json_item(row: dict[str, Any], number: int) -> Item:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    for when, unit, prompt, output in _LAYOUTS:
        if when in row and prompt in row:
            return Item(
                _name(row.get("request_id", f"r{number}")),
                _finite(float(row[when]) * unit),
                _tokens(row[prompt]),
                _tokens(row[output]),
                _name(row.get("tenant", "")),
                int(row.get("priority", 0)),
                tuple(int(i) for i in row.get("hash_ids", ())),
            )
    raise ValueError(f"no arrival and lengths among {', '.join(sorted(row))[:80]}")


def _name(value: object) -> str:
    """JSON can spell what is no text: half a pair of surrogates, which nobody could write out."""
    name = str(value)
    name.encode()
    return name


def _jittered(items: list[Item], seed: int) -> list[Item]:
    """Spread arrivals over a coarse clock's tick, if they all stand on its multiples."""
    if len(items) < 100 or any(item.at % MOONCAKE_TICK for item in items):
        return items
    draw = random.Random(f"jitter {seed}").uniform
    moved = [item._replace(at=item.at + draw(0.0, MOONCAKE_TICK)) for item in items]
    return sorted(moved, key=lambda item: item.at)


# ---- drawing ----

Draw = Callable[[random.Random], float]
MOST_SPREAD = 10.0
MOST_CV = 100.0
LEAST_CV = 1e-3  # below it a gap is constant for all that matters, and its Gamma is none


@dataclass(frozen=True, slots=True)
class Sizes:
    """A distribution of token counts: `spread` 0 is constant, else log-normal with that sigma of
    the logarithm around the mean, capped."""

    mean: float
    spread: float = 0.0
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.most:
            raise InvalidRequest(f"a mean length must be in [1, {self.most}], got {self.mean!r}")
        if not 0 <= self.spread <= MOST_SPREAD:
            raise InvalidRequest(
                f"the spread of lengths must be in [0, {MOST_SPREAD:g}], got {self.spread!r}"
            )

    def __call__(self, draw: random.Random) -> int:
        if not self.spread:
            return max(1, round(self.mean))
        mu = math.log(self.mean) - 0.5 * self.spread**2
        return min(self.most, max(1, round(draw.lognormvariate(mu, self.spread))))


def synthetic(
    rate: float,
    seconds: float,
    prompt: Sizes,
    output: Sizes,
    *,
    cv: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Independent gaps with coefficient of variation cv: 1 is Poisson, above it is bursty (Gamma),
    0 is a metronome."""
    _positive("rate", rate)
    _positive("duration", seconds)
    draw = random.Random(f"synthetic {seed}")
    gap = _gamma_gap(rate, cv)
    items: list[Item] = []
    now = gap(draw)
    while now < seconds:
        items.append(Item(f"r{len(items)}", now, prompt(draw), output(draw)))
        now += gap(draw)
    if not items:
        raise InvalidRequest(f"nothing arrives within {seconds:g} s at {rate:g} a second")
    kind = "poisson" if cv == 1.0 else f"gamma-cv{cv:g}"
    return Workload(kind, tuple(items), source=f"drawn at {rate:g} a second with seed {seed}")


def _gamma_gap(rate: float, cv: float) -> Draw:
    if not 0 <= cv <= MOST_CV:
        raise InvalidRequest(f"the gaps' cv must be in [0, {MOST_CV:g}], got {cv!r}")
    if cv < LEAST_CV:
        return lambda _: 1.0 / rate
    shape = 1.0 / cv**2
    return lambda draw: draw.gammavariate(shape, 1.0 / (rate * shape))


def servegen(path: str | Path, start: float, seconds: float, *, seed: int = 0) -> Workload:
    """A mix of clients as ServeGen describes them (rates, burstiness and lengths by client and
    time of day), drawn for `seconds` from second `start` of the day. Clients become tenants."""
    path = Path(path)
    try:
        with open_text(path) as file:
            clients = json.load(file)["clients"]
        items: list[Item] = []
        for client in clients:
            draw = random.Random(f"servegen {seed} {client['client']}")
            items.extend(_client_items(client, draw, start, start + seconds))
    except (*UNREADABLE, *MALFORMED) as error:
        if isinstance(error, OctavoError):
            raise
        raise BadFile(f"{path}: not a ServeGen pool: {_said(error)}") from error
    if not items:
        raise InvalidRequest(f"{path.name}: nobody sends between {start:g} and {start + seconds:g}")
    items.sort(key=lambda item: (item.at, item.tenant))
    numbered = tuple(item._replace(id=f"r{i}") for i, item in enumerate(items))
    return Workload(path.name.split(".")[0], numbered, source=f"{path.name}, seed {seed}")


def _said(error: BaseException) -> str:
    return f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)


def _client_items(
    client: dict[str, Any], draw: random.Random, start: float, end: float
) -> Iterator[Item]:
    windows = client["rate_windows"]
    lengths = {float(at): fields for at, fields in client["length_windows"].items()}
    starts = sorted(lengths)
    for window, rate, _, pattern, shape, scale in windows:
        if window + 600.0 <= start or window >= end or rate <= 0:
            continue
        place = max(0, bisect.bisect_right(starts, window) - 1)
        fields = lengths[starts[place]]
        gap = _pattern_gap(pattern, shape, scale, rate)
        now = window + gap(draw) * draw.random()
        while now < window + 600.0:
            prompt = _quantile(fields["input_tokens"]["q101"], draw.random())
            output = _quantile(fields["output_tokens"]["q101"], draw.random())
            if start <= now < end:
                yield Item("", now - start, prompt, output, f"client-{client['client']}")
            now += gap(draw)


def _pattern_gap(pattern: str, shape: float, scale: float, rate: float) -> Draw:
    """Gaps of the fitted shape, rescaled so that their mean is 1 / rate."""
    if pattern == "Gamma":
        factor = 1.0 / (rate * shape * scale)
        return lambda draw: factor * draw.gammavariate(shape, scale)
    if pattern == "Weibull":
        factor = 1.0 / (rate * scale * math.gamma(1.0 + 1.0 / shape))
        return lambda draw: factor * draw.weibullvariate(scale, shape)
    raise BadFile(f"a pattern of gaps is called {pattern!r}: Gamma and Weibull are known")


def _quantile(grid: list[float], u: float) -> int:
    place = u * (len(grid) - 1)
    low = int(place)
    high = min(low + 1, len(grid) - 1)
    return max(1, round(grid[low] + (grid[high] - grid[low]) * (place - low)))


# ---- the command line's way of naming one ----

DRAWN = {"rate": 1.0, "seconds": 600.0, "cv": 1.0, "prompt": 1024.0, "output": 128.0,
              "spread": 0.8, "seed": 0.0}  # fmt: skip


GENERATORS = ("poisson", "gamma", "servegen")


def named(
    text: str, *, seed: int = 0, usual: Mapping[str, float] = MappingProxyType({})
) -> Workload:
    """A file's path, or `poisson:rate=5,seconds=600,prompt=1024,output=128,spread=0.8`, or `gamma:`
    with `cv` beside, or `servegen:FILE,start=0,seconds=600`. usual: what is drawn where the text
    leaves it out, if it is another than in `DRAWN`. Raises InvalidRequest, BadFile."""
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "gamma"):
        given = DRAWN | {"seed": float(seed)} | dict(usual) | _pairs(rest, set(DRAWN))
        if kind == "poisson" and given["cv"] != 1.0:
            raise InvalidRequest("a Poisson process has cv 1; say gamma: for another", "trace")
        sizes = (Sizes(given["prompt"], given["spread"]), Sizes(given["output"], given["spread"]))
        rate, seconds = given["rate"], given["seconds"]
        if not given["seed"].is_integer():
            raise InvalidRequest(f"seed={given['seed']}: not a whole number", "trace")
        return synthetic(rate, seconds, *sizes, cv=given["cv"], seed=int(given["seed"]))
    if kind == "servegen":
        path, _, more = rest.partition(",")
        given = {"start": 0.0, "seconds": 600.0} | _pairs(more, {"start", "seconds"})
        return servegen(path, given["start"], given["seconds"], seed=seed)
    if re.fullmatch(r"[\w-]+", kind) and rest and not Path(text).exists():
        known = ", ".join(f"{name}:" for name in GENERATORS)
        raise InvalidRequest(f"no generator is called {kind!r}: {known}, or a trace file", "trace")
    return read(text, seed=seed)


def _pairs(text: str, known: set[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise InvalidRequest(f"{name!r} is none of {', '.join(sorted(known))}", "trace")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidRequest(f"{name}={value!r}: not a number", "trace") from None
    return found
