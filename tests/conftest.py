"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .small_model import mini, mini_pack, small, small_pack  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_v41() -> Path:
    """The embedded example checkpoint."""
    return ROOT / "examples" / "tiny-v41"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden vectors beside the repository (MOEFIT_SHARED overrides).

    In CI its absence is a failure, never a skip.
    """
    path = Path(os.environ.get("MOEFIT_SHARED", ROOT.parent / "shared"))
    if not (path / "golden").is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"golden vectors not found at {path}: CI must have them (set MOEFIT_SHARED)")
        pytest.skip(f"golden vectors not found at {path}")
    return path
