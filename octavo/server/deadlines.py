"""What a client asks of time, and what it gets: headers, body, tier and key become one `Slo`.

`x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms` and `x-slo-fallback: best-effort` say it in
headers, `slo: {"ttft_ms": ...}` in the body; what neither says comes from the tier's defaults. Both
are wishes: a key may be held to a tier and to deadlines no tighter than its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from starlette.types import Scope

from octavo.core.request import NO_SLO, Slo, Tier, shown
from octavo.errors import InvalidRequest, Unsupported
from octavo.server.auth import Key, decimal

FIELDS = ("ttft", "tpot", "e2e")
HEADERS = tuple(f"x-slo-{name}-ms" for name in FIELDS)
TIERS = {tier.name.lower(): tier for tier in Tier if tier is not Tier.BATCH}
TIERS |= {"auto": Tier.DEFAULT}
ASKED = TIERS | {"scale": Tier.DEFAULT}  # what was bought in advance is not here
FALLBACK = "x-slo-fallback"


class SloBody(msgspec.Struct, forbid_unknown_fields=True):
    """The `slo` extension of a request body; milliseconds."""

    STRICT: ClassVar[bool] = True
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """What a request is held to, and whether it had asked for more. named: whether it names a
    service tier, so that the answer is to say which one it was served at."""

    slo: Slo = NO_SLO
    tier: Tier = Tier.DEFAULT
    clamped: bool = False
    named: bool = False


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The house's defaults by tier. kept: whether the policy keeps deadlines at all."""

    kept: bool = False
    defaults: Mapping[Tier, Slo] = field(default_factory=dict)

    @classmethod
    def read(cls, kept: bool, given: tuple[str, ...]) -> Deadlines:
        """From `--slo [TIER:]ttft=SECONDS,tpot=SECONDS,e2e=SECONDS`. Raises `InvalidRequest`."""
        defaults: dict[Tier, Slo] = {}
        for text in given:
            tier, slo = parse_slo(text)
            if tier in defaults:
                raise InvalidRequest(f"--slo: {tier.name.lower()} is given twice", "slo")
            defaults[tier] = slo
        if given and not kept:
            raise InvalidRequest("--slo needs --policy slo or fair-slo", "slo")
        return cls(kept, defaults)

    def asked(self, scope: Scope) -> Slo:
        """What the headers ask for. Raises `InvalidRequest` naming the header."""
        given = _given(scope)
        for title in given:
            self._known(title)
        found = {
            name: _milliseconds(given[title], title)
            for name, title in zip(FIELDS, HEADERS, strict=True)
            if title in given
        }
        return Slo(**found, degrade=_fallback(given.get(FALLBACK), FALLBACK))

    def held(self, asked: Slo, key: Key | None, data: bytes) -> Slo:
        """What is known before a body is read of what it will be held to: no tighter than its key
        may ask, and to be served late rather than refused if the body may say so."""
        slo = asked if key is None else _no_tighter(asked, key.tightest)
        return dataclasses.replace(slo, degrade=slo.degrade or b"best-effort" in data)

    def granted(
        self, asked: Slo, body: SloBody | None, service_tier: str | None, key: Key | None
    ) -> Granted:
        """Headers, body and defaults together, held to what the key may ask. A tier is a wish, by
        OpenAI's reference: where the policy has none, all are served at the default one."""
        if body is not None:
            self._known("slo")
            asked = _merged(asked, body)
        tier = ASKED.get("auto" if service_tier is None else service_tier)
        if tier is None:
            words = ", ".join(ASKED)
            text = f"service_tier must be one of {words}, got {shown(service_tier)}"
            raise Unsupported(text, "service_tier")
        tier = tier if self.kept else Tier.DEFAULT
        held = max(tier, key.tier) if key is not None else tier
        slo = _with_defaults(asked, self.defaults.get(held, NO_SLO))
        least = key.tightest if key is not None else NO_SLO
        kept = _no_tighter(slo, least)
        return Granted(kept, held, kept != slo or held != tier, service_tier is not None)

    def _known(self, name: str) -> None:
        if not self.kept:
            needs = "needs a server started with --policy slo or fair-slo"
            raise Unsupported(f"{name} {needs}", name)


def parse_slo(text: str) -> tuple[Tier, Slo]:
    """One `[TIER:]ttft=SECONDS,...`. Raises `InvalidRequest`."""
    head, colon, rest = text.partition(":")
    tier = TIERS.get(head.strip()) if colon else Tier.DEFAULT
    if tier is None:
        raise InvalidRequest(f"--slo: {head!r} is not a tier; there are {', '.join(TIERS)}", "slo")
    values: dict[str, Any] = {}
    for part in (rest if colon else text).split(","):
        name, equals, value = part.strip().partition("=")
        if name not in FIELDS or not equals:
            raise InvalidRequest(
                f"--slo: want [TIER:]ttft=SECONDS,tpot=SECONDS,e2e=SECONDS, got {text!r}", "slo"
            )
        try:
            values[name] = decimal(value)
        except ValueError:
            raise InvalidRequest(f"--slo: {value!r} is not a number of seconds", "slo") from None
    try:
        return tier, Slo(**values)
    except InvalidRequest as error:
        raise InvalidRequest(f"--slo {text}: {str(error).removeprefix('slo ')}", "slo") from None


def in_force(slo: Slo) -> str:
    """The deadlines as a header says them."""
    parts = [f"{n}-ms={getattr(slo, n) * 1e3:g}" for n in FIELDS if getattr(slo, n) is not None]
    return ", ".join(parts)


def _given(scope: Scope) -> dict[str, str]:
    """The x-slo- headers by name. One that is unknown, or there twice, is refused, not ignored."""
    found: dict[str, str] = {}
    for key, value in scope["headers"]:
        if key.startswith(b"x-slo-"):
            name = key.decode("latin-1")
            if name not in HEADERS and name != FALLBACK:
                known = ", ".join((*HEADERS, FALLBACK))
                raise Unsupported(f"unknown header {shown(name)}; there are {known}", name)
            if name in found:
                raise InvalidRequest(f"{name} is given twice", name)
            found[name] = value.decode("latin-1").strip()
    return found


def _milliseconds(text: str, name: str) -> float:
    try:
        value = decimal(text)
    except ValueError:
        what = f"{name} must be a number of milliseconds, got {shown(text)}"
        raise InvalidRequest(what, name) from None
    return _seconds(value, name)


def _seconds(value: float, name: str) -> float:
    try:
        Slo(ttft=value / 1e3)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name} must be above 0 and at most 86400000 milliseconds, got {value:g}", name
        ) from None
    return value / 1e3


def _fallback(text: str | None, name: str) -> bool:
    if text not in (None, "best-effort"):
        raise Unsupported(f"{name} must be best-effort, got {shown(text)}", name)
    return text is not None


def _merged(asked: Slo, body: SloBody) -> Slo:
    """Headers and body; the same field in both must say the same."""
    values: dict[str, Any] = {}
    for name in FIELDS:
        there, given = getattr(asked, name), getattr(body, f"{name}_ms")
        here = None if given is None else _seconds(given, f"slo.{name}_ms")
        if there is not None and here is not None and there != here:
            both = f"got {here * 1e3:g} and {there * 1e3:g}"
            what = f"slo.{name}_ms and x-slo-{name}-ms disagree, {both}"
            raise InvalidRequest(what, f"slo.{name}_ms")
        values[name] = there if here is None else here
    return Slo(**values, degrade=asked.degrade or _fallback(body.fallback, "slo.fallback"))


def _with_defaults(asked: Slo, default: Slo) -> Slo:
    missing = {n: getattr(default, n) for n in FIELDS if getattr(asked, n) is None}
    return dataclasses.replace(asked, **missing)


def _no_tighter(slo: Slo, least: Slo) -> Slo:
    held = {
        n: max(getattr(slo, n), getattr(least, n))
        for n in FIELDS
        if getattr(slo, n) is not None and getattr(least, n) is not None
    }
    return dataclasses.replace(slo, **held)
