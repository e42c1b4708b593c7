"""API keys: one a line in a file, each with its own prefix cache."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import InvalidRequest

MIN_KEY = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A key's digest and its name; `salt` separates its prefix cache from all others."""

    name: str
    digest: bytes

    @property
    def salt(self) -> bytes:
        return b"key:" + self.digest


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys that may enter; none at all means that everybody may."""

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """Lines "KEY" or "NAME KEY"; # starts a comment. Raises `InvalidRequest`."""
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the API keys: {error}", "api_key_file") from None
        keys = []
        for number, line in enumerate(lines, 1):
            words = line.split("#")[0].split()
            if not words:
                continue
            if len(words) > 2 or len(words[-1]) < MIN_KEY:
                raise InvalidRequest(
                    f"{path}, line {number}: want NAME KEY or KEY, {MIN_KEY} characters or more",
                    "api_key_file",
                )
            name = words[0] if len(words) == 2 else f"key-{number}"
            keys.append(Key(name, _digest(words[-1])))
        if not keys:
            raise InvalidRequest(f"{path} has no keys", "api_key_file")
        return cls(tuple(keys))

    def __bool__(self) -> bool:
        return bool(self._keys)

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
