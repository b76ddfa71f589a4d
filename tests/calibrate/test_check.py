"""Every stored number is looked at, and the first bad one is named."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moefit.calibrate import check
from moefit.calibrate.check import NONFINITE, ValueCheck, check_values
from moefit.calibrate.checkpoint import DTYPES, Checkpoint
from moefit.errors import CheckpointError
from moefit.progress import Silent

from .synthetic import small, write_checkpoint


def poke(folder: Path, name: str, offset: int, data: bytes) -> Checkpoint:
    """Write `data` at a byte offset of a tensor."""
    checkpoint = Checkpoint.open(folder)
    info = checkpoint.info(name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.start + offset)
        file.write(data)
    return checkpoint


def f32(value: float) -> bytes:
    return np.float32(value).tobytes()


def test_sound_checkpoints_pass(tiny_v41: Path, tmp_path: Path) -> None:
    class Count(Silent):
        total = done = 0

        def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
            self.total = total

        def advance(self, count: int = 1, note: str = "") -> None:
            self.done += count

    progress = Count()
    summary = check_values(Checkpoint.open(tiny_v41), progress, threads=2)
    # Only the MXFP4 codes are passed over: 6 layers of 32 experts and 16 of the drafter, 3 matrices 128x256.
    assert summary == ValueCheck(tensors=874, bytes_read=11_005_676, bytes_integer=208 * 3 * 128 * 128)
    assert summary.bytes_read + summary.bytes_integer == 21_229_292
    assert progress.total == progress.done == summary.bytes_read
    assert check_values(Checkpoint.open(small(tmp_path))).bytes_integer == 12 * 32


@pytest.mark.parametrize(
    ("name", "offset", "data", "message"),
    [
        ("expert.scale", 5, b"\xff", r"NaN \[.*a\.safetensors, expert\.scale\].*index 5 \(row 2, column 1\)"),
        ("table.scale", 99, b"\xff", r"b\.safetensors, table\.scale\].*index 99 \(row 49, column 1\)"),
        ("dense.weight", 100, b"\x7f", r"NaN or infinite .*dense\.weight\].*index 100 \(row 2, column 4\)"),
        ("table.weight", 64, b"\xff", r"table\.weight\].*F8_E4M3.*index 64 \(row 1, column 0\)"),
        ("norm.weight", 82, b"\x80\x7f", r"norm\.weight\].*BF16.*index 41 \(row 1, column 1\)"),
        ("norm.weight", 0, b"\xc1\xff", r"norm\.weight\].*index 0 "),
        ("half.weight", 6, b"\x00\xfc", r"half\.weight\].*F16.*index 3 "),
        ("sink", 160, f32(math.inf), r"sink\].*F32.*index 40 \(row 1, column 0\)"),
        ("sink", 4, f32(-math.nan), r"sink\].*index 1 "),
        ("scalar", 0, f32(-math.inf), r"scalar\].*index 0 \(row 0, column 0\)"),
    ],
)
def test_bad_number_is_named(tmp_path: Path, name: str, offset: int, data: bytes, message: str) -> None:
    checkpoint = poke(small(tmp_path), name, offset, data)
    with pytest.raises(CheckpointError, match=message):
        check_values(checkpoint)


def test_largest_finite_numbers_pass(tmp_path: Path) -> None:
    folder = small(tmp_path)
    poke(folder, "dense.weight", 0, b"\x7e\xfe")  # +-448
    poke(folder, "norm.weight", 0, b"\x7f\x7f\x7f\xff")
    poke(folder, "half.weight", 0, b"\xff\x7b\xff\xfb")
    poke(folder, "sink", 0, f32(3.4028235e38) + f32(-3.4028235e38))
    poke(folder, "expert.weight", 0, b"\xff\x7f")  # MXFP4: -6, -6, -6, 6
    check_values(poke(folder, "expert.scale", 0, b"\xfe\x00"))


@pytest.mark.parametrize("dtype", [name for name in NONFINITE if DTYPES[name].itemsize <= 2 and name != "F8_E8M0"])
def test_every_code_against_torch(tmp_path: Path, dtype: str) -> None:
    """Exactly the codes that torch calls non-finite are refused."""
    size = DTYPES[dtype].itemsize
    codes = np.arange(256**size, dtype=np.uint8 if size == 1 else np.uint16)
    numbers = torch.from_numpy(codes.view(np.uint8).copy()).view(DTYPES[dtype]).to(torch.float32)
    finite = torch.isfinite(numbers).numpy()
    kind, mask, limit = NONFINITE[dtype]
    assert np.array_equal((codes & kind(mask)) < limit, finite)
    shard: dict[str, tuple[str, tuple[int, ...], bytes | None]] = {
        "x": (dtype, (codes.size,), np.where(finite, codes, 0).astype(codes.dtype).tobytes())
    }
    folder = write_checkpoint(tmp_path, {"model.safetensors": shard}, {})
    check_values(Checkpoint.open(folder))
    bad = int(np.flatnonzero(~finite)[-1])
    with pytest.raises(CheckpointError, match=f"index {bad} "):
        check_values(poke(folder, "x", bad * size, codes[bad].tobytes()))


def test_first_in_file_order_for_any_thread_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces smaller than the tensors, so that batches and positions within a piece are crossed."""
    monkeypatch.setattr(check, "PIECE_BYTES", 64)
    folder = small(tmp_path)
    for name, offset, data in (
        ("sink", 956, f32(math.nan)),
        ("table.weight", 1999, b"\xff"),
        ("table.weight", 3000, b"\xff"),
    ):
        checkpoint = poke(folder, name, offset, data)
    messages = set()
    for threads in (1, 2, 5):
        with pytest.raises(CheckpointError, match=r"table\.weight\].*flat index 1999 \(row 31, column 15\)") as error:
            check_values(checkpoint, threads=threads)
        messages.add(str(error.value))
    assert len(messages) == 1


def test_index_counts_elements_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PIECE_BYTES", 64)
    checkpoint = poke(small(tmp_path), "sink", 956, f32(math.nan))
    with pytest.raises(CheckpointError, match=r"sink\].*flat index 239 \(row 5, column 39\)"):
        check_values(checkpoint)


def test_truncated_while_reading(tmp_path: Path) -> None:
    folder = small(tmp_path)
    checkpoint = Checkpoint.open(folder)
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="shrank"):
        check_values(checkpoint)
