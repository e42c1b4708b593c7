"""Fixtures for tests of every room."""

from __future__ import annotations

import inspect
from pathlib import Path

import httpx
import pytest

from octavo.models import hub

# No test is about how soon an answer comes: the five seconds that httpx gives one are too few on a
# machine that is busy. This is the one object that all its functions and clients start from.
PATIENCE = inspect.signature(httpx.get).parameters["timeout"].default
PATIENCE.connect = PATIENCE.read = PATIENCE.write = PATIENCE.pool = 60.0
assert httpx.Client().timeout == httpx.Timeout(60.0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the user's cache."""
    return hub.resolve("smollm2-135m")
