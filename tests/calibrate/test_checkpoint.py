"""Opening and reading: sound checkpoints give what the safetensors library gives, damaged ones are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from moefit.calibrate.checkpoint import INDEX, Checkpoint, read_header, source_identity
from moefit.errors import CheckpointError

from .synthetic import edit_header, small, write_checkpoint, write_shard


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return small(tmp_path / "toy")


def test_every_tensor_equals_the_safetensors_library(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    assert len(checkpoint.tensors) == 1498
    assert checkpoint.shards == sorted(file.name for file in tiny_v41.glob("*.safetensors"))
    seen = set()
    for shard in checkpoint.shards:
        with safe_open(str(tiny_v41 / shard), "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                theirs, ours = file.get_tensor(name), checkpoint.stored(name)
                assert ours.shape == theirs.shape == checkpoint.info(name).shape
                assert raw(ours) == raw(theirs) == checkpoint.bytes(name)
                assert checkpoint.info(name).file == shard
                seen.add(name)
    assert seen == set(checkpoint.tensors)


def test_weights_and_rows(toy: Path) -> None:
    """`weight` decodes each kind, and `rows` equals its rows."""
    checkpoint = Checkpoint.open(toy)
    assert checkpoint.weight("expert").shape == (12, 64)
    assert torch.equal(checkpoint.weight("sink"), checkpoint.stored("sink"))
    assert torch.equal(checkpoint.weight("norm"), checkpoint.stored("norm.weight").float())
    assert torch.equal(checkpoint.weight("norm.weight"), checkpoint.weight("norm"))
    assert checkpoint.weight("scalar").item() == 2.5
    for prefix in ("expert", "dense", "table", "norm", "half", "sink"):
        whole = checkpoint.weight(prefix)
        assert whole.dtype == torch.float32
        indices = torch.tensor([5, 0, 5, whole.shape[0] - 1, 3])
        assert torch.equal(checkpoint.rows(prefix, indices), whole[indices])
        assert checkpoint.rows(prefix, indices[:0]).shape == (0, whole.shape[1])
    with pytest.raises(CheckpointError, match=r"table\.weight\]: expected 0\.\.49, found 3\.\.50"):
        checkpoint.rows("table", torch.tensor([3, 50]))
    part = checkpoint.read("dense.weight", 100, 140)
    assert raw(part) == checkpoint.bytes("dense.weight")[100:140]
    with pytest.raises(ValueError, match=r"dense\.weight has bytes 0\.\.3360"):
        checkpoint.read("dense.weight", 100, 3361)


def test_threads_read_the_same(tiny_v41: Path) -> None:
    checkpoint = Checkpoint.open(tiny_v41)
    names = list(checkpoint.tensors)[:200]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(checkpoint.bytes, names)) == [checkpoint.bytes(name) for name in names]


def test_unknown_tensor_is_named(toy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such tensor .*toy, absent\.weight\]"):
        Checkpoint.open(toy).weight("absent")


def test_single_file_without_index(toy: Path) -> None:
    (toy / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"no index .*found a\.safetensors, b\.safetensors"):
        Checkpoint.open(toy)
    (toy / "b.safetensors").unlink()
    (toy / "a.safetensors").rename(toy / "model.safetensors")
    assert list(Checkpoint.open(toy).tensors) == [
        "expert.weight",
        "expert.scale",
        "dense.weight",
        "dense.scale",
    ]


def test_not_a_model_directory(tmp_path: Path, toy: Path) -> None:
    with pytest.raises(CheckpointError, match="no model directory"):
        Checkpoint.open(tmp_path / "nowhere")
    (toy / "config.json").write_text('{"architectures": [}')
    with pytest.raises(CheckpointError, match=r"JSON does not parse .*config\.json\]: .*line 1 column"):
        Checkpoint.open(toy)
    (toy / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        Checkpoint.open(toy)
    (toy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing .*config\.json"):
        Checkpoint.open(toy)


# --- files


def truncate(folder: Path) -> None:
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def lengthen(folder: Path) -> None:
    with (folder / "a.safetensors").open("ab") as file:
        file.write(b"x")


def cut_in_header(folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def absurd_length(folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def over_the_cap(folder: Path) -> None:
    """A header longer than the cap in a file long enough to hold it."""
    with (folder / "a.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)


def empty(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"")


def lfs_pointer(folder: Path) -> None:
    (folder / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def missing_shard(folder: Path) -> None:
    (folder / "b.safetensors").unlink()


def stray_shard(folder: Path) -> None:
    shutil.copy(folder / "b.safetensors", folder / "c.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"truncated .*b\.safetensors, sink\]: .*file is 10 bytes short\. Download the file again"),
        (lengthen, r"bytes of no tensor .*a\.safetensors\]"),
        (cut_in_header, r"cut off in its header .*a\.safetensors\].*in a file of 50"),
        (absurd_length, r"expected a header of at most 100000000 bytes, found 1152921504606846976"),
        (over_the_cap, r"at most 100000000 bytes, found 100000001 in a file of 100000100"),
        (empty, r"not a safetensors file.*found 0 in a file of 0"),
        (lfs_pointer, "Git LFS pointer .*git lfs pull"),
        (missing_shard, r"shards are missing .*2 files.*missing b\.safetensors\. Download the missing files"),
        (stray_shard, r"index does not name .*found also c\.safetensors"),
    ],
)
def test_damaged_file(toy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(toy)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(toy)


# --- headers


def hole(header: dict[str, Any]) -> None:
    for name in ("dense.weight", "dense.scale"):
        header[name]["data_offsets"] = [offset + 4 for offset in header[name]["data_offsets"]]


def overlap(header: dict[str, Any]) -> None:
    header["dense.scale"]["data_offsets"] = [offset - 6 for offset in header["dense.scale"]["data_offsets"]]


def unknown_dtype(header: dict[str, Any]) -> None:
    header["dense.weight"]["dtype"] = "F8_E9M9"


def other_itemsize(header: dict[str, Any]) -> None:
    header["dense.weight"]["dtype"] = "BF16"


def other_shape(header: dict[str, Any]) -> None:
    header["dense.weight"]["shape"] = [70, 47]


def negative_shape(header: dict[str, Any]) -> None:
    header["dense.weight"]["shape"] = [-70, -48]


def huge_shape(header: dict[str, Any]) -> None:
    header["dense.weight"]["shape"] = [1 << 62, 1 << 62]


def backwards(header: dict[str, Any]) -> None:
    header["dense.weight"]["data_offsets"].reverse()


def three_offsets(header: dict[str, Any]) -> None:
    header["dense.weight"]["data_offsets"].append(0)


def boolean_offset(header: dict[str, Any]) -> None:
    header["expert.weight"]["data_offsets"][0] = False


def no_object(header: dict[str, Any]) -> None:
    header["dense.weight"] = [1, 2]


def beyond_the_file(header: dict[str, Any]) -> None:
    header["dense.scale"]["shape"] = [1000, 1000]
    header["dense.scale"]["data_offsets"][1] = header["dense.scale"]["data_offsets"][0] + 1_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hole, r"hole between tensors .*dense\.weight\]: expected data from offset 408, found 412"),
        (overlap, r"tensors overlap .*dense\.scale\]: expected data from offset 3768, found 3762"),
        (unknown_dtype, r"unknown dtype .*dense\.weight\]: .*found 'F8_E9M9'"),
        (other_itemsize, r"do not fit its shape .*expected 6720 bytes for BF16 \[70, 48\], found 3360"),
        (other_shape, r"expected 3290 bytes for F8_E4M3 \[70, 47\], found 3360"),
        (negative_shape, "malformed"),
        (huge_shape, "do not fit its shape"),
        (backwards, "do not fit its shape"),
        (three_offsets, "malformed"),
        (boolean_offset, "malformed"),
        (no_object, r"malformed .*dense\.weight\]: .*found \[1, 2\]"),
        (beyond_the_file, r"truncated .*dense\.scale\].*file is 999994 bytes short"),
    ],
)
def test_damaged_header(toy: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_header(toy / "a.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint.open(toy)
    assert "a.safetensors" in str(error.value)


def test_repeated_key_in_a_header(tmp_path: Path) -> None:
    one = '"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    header = f"{{{one}, {one}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(CheckpointError, match=r"key stands twice .*model\.safetensors, x\]"):
        read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_header_byte_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Damage in the header raises CheckpointError, or leaves a consistent list of tensors."""
    path = tmp_path / "model.safetensors"
    write_shard(path, {"a": ("BF16", (2, 3), None), "b": ("U8", (5,), None), "c": ("F32", (), None)})
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 22))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    end = tensors[0].start if tensors else len(content)
    for info in tensors:
        assert info.start == end
        end = info.stop
    assert end == len(content)


# --- index


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sink": "a.safetensors"},
            r"wrong shard .*sink\]: expected in a\.safetensors, found in b\.safetensors",
        ),
        (
            {"ghost.weight": "a.safetensors"},
            r"lacks tensors that the index names .*a\.safetensors, ghost\.weight\]",
        ),
        ({"sink": None}, r"holds tensors that the index does not name .*b\.safetensors, sink\]"),
        ({"sink": "../b.safetensors"}, r"not a shard .*sink\]"),
        ({"sink": 3}, r"not a shard"),
        ({"sink": "b.bin"}, r"not a shard"),
    ],
)
def test_index_and_shards_disagree(toy: Path, change: dict[str, Any], message: str) -> None:
    def apply(weight_map: dict[str, Any]) -> None:
        for name, shard in change.items():
            if shard is None:
                del weight_map[name]
            else:
                weight_map[name] = shard

    edit_index(toy, apply)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(toy)


def test_index_itself_is_damaged(toy: Path) -> None:
    text = (toy / INDEX).read_text()
    (toy / INDEX).write_text(text.replace('"sink":', '"scalar": "b.safetensors", "sink":'))
    with pytest.raises(CheckpointError, match=r"key stands twice .*, scalar\]"):
        Checkpoint.open(toy)
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": []}'):
        (toy / INDEX).write_text(content)
        with pytest.raises(CheckpointError, match="no weight_map"):
            Checkpoint.open(toy)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    """A stale copy in a hard-linked shard would silently win or lose in some loaders."""
    tensor: Any = {"x": ("U8", (4,), b"abcd")}
    write_checkpoint(tmp_path, {"a.safetensors": tensor, "b.safetensors": tensor | {"y": ("U8", (1,), b"z")}}, {})
    edit_index(tmp_path, lambda weight_map: weight_map.update(x="a.safetensors"))
    with pytest.raises(CheckpointError, match=r"stored twice .*b\.safetensors, x\]: .*found in a\.safetensors"):
        Checkpoint.open(tmp_path)


# --- decoding errors carry the tensor's name


def test_weight_errors_name_file_and_tensor(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        {
            "model.safetensors": {
                "bare.weight": ("F8_E4M3", (2, 32), None),
                "plain.weight": ("F8_E4M3", (2, 32), None),
                "plain.scale": ("F32", (1, 1), None),
                "misfit.weight": ("I8", (2, 32), None),
                "misfit.scale": ("F8_E8M0", (2, 1), None),
                "nan.weight": ("I8", (1, 16), None),
                "nan.scale": ("F8_E8M0", (1, 1), b"\xff"),
                "inf.weight": ("BF16", (1, 2), b"\x00\x00\x80\x7f"),
                "count": ("I64", (2,), None),
            }
        },
        {},
    )
    checkpoint = Checkpoint.open(tmp_path)
    for prefix, message in {
        "bare": r"no scale .*model\.safetensors, bare\.weight\]: expected bare\.scale as F8_E8M0, found none",
        "plain": r"no scale .*plain\.weight\]: .*found F32",
        "misfit": r"misfit\.weight\]: expected shape \[2, 2\], found \[2, 1\]",
        "nan": r"scale is NaN .*model\.safetensors, nan\.weight\]",
        "inf": r"not finite .*inf\.weight\]: .*found inf at \[0, 1\]",
        "count": r"cannot decode .*count\]: .*found I64 \[2\]",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            checkpoint.weight(prefix)


def test_shard_that_shrinks_after_opening(toy: Path) -> None:
    checkpoint = Checkpoint.open(toy)
    truncate(toy)
    with pytest.raises(CheckpointError, match=r"shrank .*b\.safetensors, scalar\]"):
        checkpoint.stored("scalar")


# --- identity


def test_source_identity(toy: Path, tmp_path: Path) -> None:
    """Equal for a copy elsewhere; different for another config, another header or other weights."""
    identity = source_identity(Checkpoint.open(toy))
    assert identity == source_identity(Checkpoint.open(Path(shutil.copytree(toy, tmp_path / "copy"))))
    assert set(identity["shards"]) == {"a.safetensors", "b.safetensors"}

    other = source_identity(Checkpoint.open(small(tmp_path / "retrained", seed=1)))
    assert other["config"] == identity["config"]
    for shard in identity["shards"]:
        assert other["shards"][shard]["bytes"] == identity["shards"][shard]["bytes"]
        assert other["shards"][shard]["sha256"] != identity["shards"][shard]["sha256"]

    (toy / "config.json").write_text('{"architectures": ["Toys"]}')
    edit_header(toy / "a.safetensors", lambda header: header.update(__metadata__={"format": "np"}))
    changed = source_identity(Checkpoint.open(toy))
    assert changed["config"] != identity["config"]
    assert changed["shards"]["a.safetensors"] != identity["shards"]["a.safetensors"]
    assert changed["shards"]["b.safetensors"] == identity["shards"]["b.safetensors"]
