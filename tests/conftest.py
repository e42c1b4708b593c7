"""Fixtures for tests of every room."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.models import hub


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the user's cache."""
    return hub.resolve("smollm2-135m")
