"""Whole files or none."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from moefit.errors import MoefitError, PackError
from moefit.files import json_bytes, sha256_bytes, sha256_file, write_atomic, write_json


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": [1.5, None]})
    before = path.read_bytes()

    def half(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(OSError, match="No space"):
        write_atomic(path, half)
    assert path.read_bytes() == before
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]  # the temporary name was taken over


def test_json_is_canonical_and_never_nan() -> None:
    assert json_bytes({"b": 1, "a": "ä"}) == '{\n  "a": "ä",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes(float("nan"))


def test_hashes_agree(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    assert sha256_file(tmp_path / "f", block=7) == sha256_bytes(b"x" * 10_000)


def test_a_message_has_four_parts() -> None:
    error = PackError("a shard is missing", where="pack/x", found="expected 3, found 2", mend="download it")
    assert str(error) == "a shard is missing [pack/x]: expected 3, found 2. Download it."
    assert isinstance(error, MoefitError) and error.where == "pack/x"
