"""API keys: one a line in a file, each with its own prefix cache."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.request import NO_SLO, Slo, Tier
from octavo.errors import InvalidRequest, in_words

MIN_KEY = 16
LIMITS = ("rpm", "tpm", "concurrent")


@dataclass(frozen=True, slots=True)
class Key:
    """A key's digest and its name; `salt` separates its prefix cache from all others.

    tier: the best that it is served at; tightest: the tightest deadlines that it may ask for;
    weight: its share where tenants are served fairly. admin: whether it may see what others asked.
    rpm, tpm, concurrent: requests and tokens a minute, and requests at once; None is no limit.
    """

    name: str
    digest: bytes
    tier: Tier = Tier.PRIORITY
    tightest: Slo = NO_SLO
    weight: float = 1.0
    admin: bool = False
    rpm: int | None = None
    tpm: int | None = None
    concurrent: int | None = None

    @property
    def limited(self) -> bool:
        return not self.rpm is self.tpm is self.concurrent is None

    @property
    def salt(self) -> bytes:
        return b"key:" + self.digest


def _key(name: str, key: str, options: list[str], where: str) -> Key:
    tier, weight = Tier.PRIORITY, 1.0
    tightest: dict[str, Any] = {}
    limits: dict[str, int] = {}
    for option in options:
        what, _, value = option.partition("=")
        try:
            if what == "tier":
                tier = Tier[value.upper()]
                if tier is Tier.BATCH:
                    raise KeyError
            elif what == "weight":
                weight = decimal(value)
            elif what in ("ttft", "tpot", "e2e"):
                tightest[what] = decimal(value)
            elif what in LIMITS:
                limits[what] = _count(value)
            elif option == "admin":
                pass
            else:
                raise KeyError
            if not 1e-6 < weight < 1e6:  # what is charged is divided by it
                raise ValueError
            slo = Slo(**tightest)
        except (KeyError, ValueError):
            raise InvalidRequest(
                f"{where}: {option!r}: want tier=priority|default|flex, weight=NUMBER, rpm=, tpm= "
                "or concurrent= and a count, ttft=, tpot= or e2e= and seconds, or admin",
                "api_key_file",
            ) from None
    admin = "admin" in options
    return Key(name, _digest(key), tier, slo if tightest else NO_SLO, weight, admin, **limits)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:13]) <= 10**12:
        raise ValueError(f"{text!r} is not a count")
    return int(text)


def decimal(text: str) -> float:
    """A number as people write it. Raises ValueError for what only Python reads: 1_000, other
    scripts' digits."""
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _weights(keys: tuple[Key, ...]) -> dict[str, float]:
    return {key.name: key.weight for key in keys if key.weight != 1.0}


def exposed(path: str) -> bool:
    """Whether others on this machine can read or change the file of keys."""
    try:
        return bool(os.stat(path).st_mode & 0o077)
    except OSError:
        return False


class Keys:
    """The keys that may enter; none at all means that everybody may."""

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self._keys = keys
        self._path: str | None = None
        self.weights = _weights(keys)  # shares by name, of those that are not 1; one dict for life

    def reload(self) -> None:
        """Read the file again. Raises `InvalidRequest`, and then the old keys stay.

        The engine's thread reads the weights meanwhile: they are changed one by one, in place.
        """
        self._keys = Keys.read(self._path)._keys
        now = _weights(self._keys)
        self.weights.update(now)
        for name in self.weights.keys() - now.keys():
            del self.weights[name]

    @property
    def any_admin(self) -> bool:
        """Whether some keys are for those who run the server."""
        return any(key.admin for key in self._keys)

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """Lines "KEY", "NAME KEY" or "NAME KEY tier=flex ttft=1 tpot=0.05 weight=2" (seconds: no
        tighter deadlines than these), "NAME KEY rpm=60 tpm=20000 concurrent=4", "NAME KEY admin";
        # starts a comment. Raises `InvalidRequest`."""
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = in_words(error)
            text = f"--api-key-file: cannot read the API keys of {path}: {why}"
            raise InvalidRequest(text, "api_key_file") from None
        keys = []
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            options = [word for word in words[2:] if "=" in word or word == "admin"]
            words = words[:2] + words[2 + len(options) :]
            if len(words) > 2 or len(words[-1]) < MIN_KEY:
                raise InvalidRequest(
                    f"{path}, line {number}: want NAME KEY or KEY, {MIN_KEY} characters or more",
                    "api_key_file",
                )
            # Not by its line: after a reload that would be another key's name, and what it kept.
            name = words[0] if len(words) == 2 else f"key-{_digest(words[0]).hex()[:8]}"
            keys.append(_key(name, words[-1], options, f"{path}, line {number}"))
        if not keys:
            raise InvalidRequest(f"{path} has no keys", "api_key_file")
        names = [key.name for key in keys]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest(f"{path} names two keys {twice!r}", "api_key_file")
        made = cls(tuple(keys))
        made._path = path
        return made

    def __bool__(self) -> bool:
        return bool(self._keys)

    def known(self, digest: bytes) -> Key | None:
        """The key of that digest, as the file has it now."""
        return next((key for key in self._keys if key.digest == digest), None)

    def find(self, authorization: str) -> Key | None:
        """The key of an `Authorization: Bearer` header. Takes as long for any wrong key."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = _digest(given.strip()), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found
