"""Whatever is wrong with a pack is named; a sound one passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moefit.calibrate.checkpoint import INDEX
from moefit.errors import PackError
from moefit.packs import verify
from moefit.packs.manifest import MANIFEST, read_manifest
from moefit.placement import TrafficTable, solve

from ..calibrate.synthetic import Stored, edit_header
from ..small_model import MACHINE, Built, poke
from .damage import MARKER, edit_json, flip, rewrite, shard_of, sign_again

PREFIX = "layers.1.ffn.experts.1.w1"


@pytest.fixture
def pack(mini_pack: Built, tmp_path: Path) -> Path:
    return mini_pack.copy(tmp_path)


def problems(pack: Path, quick: bool = False) -> list[str]:
    return verify(pack, quick, threads=2).problems


def only(pack: Path, *parts: str, quick: bool = False) -> None:
    """Exactly one problem, which says all of `parts`."""
    found = problems(pack, quick)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0], found


def test_a_sound_pack(small_pack: Built, mini_pack: Built) -> None:
    found = verify(small_pack.path)
    assert found.problems == []
    assert (found.files, found.experts) == (len(small_pack.manifest["files"]), 18)
    quick = verify(mini_pack.path, quick=True)
    assert (quick.problems, quick.experts) == ([], 0)


# Against the manifest


@pytest.mark.parametrize(
    "name",
    [
        *("model-00001-of-00019.safetensors", "model-00019-of-00019.safetensors", "config.json", INDEX, "plan.json"),
        *("tokenizer.json", "fidelity.json", "encoding/encoding.py", "calibration/traffic.safetensors"),
        "calibration/experts.json",
    ],
)
def test_a_flipped_bit_is_named(pack: Path, name: str) -> None:
    flip(pack / name, -1)
    found = problems(pack)
    assert f"a file's bytes have changed [{pack / name}]: expected sha256 " in found[0]
    assert problems(pack, quick=True) == [] or name.endswith(".json")  # which may not parse any more


def test_a_truncated_shard_is_named(pack: Path) -> None:
    shard = pack / "model-00003-of-00019.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1000])
    for quick in (False, True):
        found = problems(pack, quick)
        assert f"a file is truncated [{shard}]: expected {size} bytes, found {size - 1000}" in found[0]
        assert "the shard is truncated" in found[1]


def test_a_shard_that_is_too_long_is_named(pack: Path) -> None:
    shard = pack / "model-00003-of-00019.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert f"a file is too long [{shard}]" in problems(pack)[0]


def test_a_missing_shard_is_named(pack: Path) -> None:
    shard = pack / "model-00003-of-00019.safetensors"
    shard.unlink()
    for quick in (False, True):
        found = problems(pack, quick)
        assert f"a file is missing [{shard}]" in found[0]
        assert "shards are missing" in found[1]
        assert shard.name in found[1]


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "calibration/old.json", "kernels/a/b.so", "moefit.json.tmp"])
def test_a_stray_file_is_named(pack: Path, name: str) -> None:
    (pack / name).parent.mkdir(parents=True, exist_ok=True)
    (pack / name).write_text("x")
    only(pack, "a file stands here that the manifest does not name", str(pack / name))


def test_a_stray_shard_is_named(pack: Path) -> None:
    """Loaders that take every shard they see would read it."""
    shutil.copy(pack / "model-00003-of-00019.safetensors", pack / "model-00003-of-00017.safetensors")
    found = problems(pack)
    assert "does not name [" + str(pack / "model-00003-of-00017.safetensors") in found[0]
    assert "shards that the index does not name" in found[1]


def test_all_problems_are_listed(pack: Path) -> None:
    flip(pack / "tokenizer.json", 100)
    flip(pack / "model-00001-of-00019.safetensors", -5)
    (pack / "notes.txt").write_text("x")
    (pack / "encoding" / "encoding.py").unlink()
    poke(pack, f"{PREFIX}.suh", 0, np.float16(np.nan).tobytes())
    poke(pack, "layers.2.ffn.experts.0.w2.mul1", 0, b"\0\0\0\0")
    found = "\n".join(problems(pack))
    for name in ("tokenizer.json", "model-00001-of-00019.safetensors", "notes.txt", "encoding/encoding.py"):
        assert str(pack / name) in found
    assert f"a scale is not finite [{pack / shard_of(pack, f'{PREFIX}.suh')}, {PREFIX}.suh]" in found
    assert "layers.2.ffn.experts.0.w2.mul1]: expected int32 -2082680531, found torch.int32 [0]" in found
    assert len(problems(pack)) == 8  # two shards' hashes besides


# The manifest itself


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"moefit.pack"', '"moefit.plan"'),
        lambda text: text.replace('"sizes"', '"size"'),
        lambda text: text.replace('"bits": 3.0', '"bits": 2.0'),
        lambda text: text.replace('"tokens": 1027', '"tokens": 1028'),
        lambda text: text.replace('"bits": 3.0', '"bits": NaN'),
        lambda text: text.replace('"plan.json"', '"../plan.json"'),
        lambda text: text + " ",
    ],
)
def test_a_damaged_manifest_is_named(pack: Path, damage: Callable[[str], str]) -> None:
    path = pack / MANIFEST
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    for quick in (False, True):
        only(pack, "manifest", str(path), quick=quick) if '"size"' not in path.read_text() else only(pack, "sizes")


def test_without_a_manifest_it_is_no_pack(pack: Path, tmp_path: Path) -> None:
    (pack / MANIFEST).unlink()
    for folder in (pack, tmp_path / "nowhere"):
        with pytest.raises(PackError, match=r"no manifest, so this is not a finished pack \[.*moefit\.json\]\. Give"):
            verify(folder)


def test_a_recipe_of_another_kind_is_named(pack: Path) -> None:
    """A manifest that is sound in itself, and not of this pack."""

    def change(manifest: dict[str, dict[str, object]]) -> None:
        manifest["recipe"]["colour"] = "blue"

    edit_json(pack / MANIFEST, change)
    sign_again(pack)
    only(pack, "the recipe cannot be read", "colour")


# Behind a manifest that agrees: headers, index, config, plan


def test_a_stale_index_entry_is_named(pack: Path) -> None:
    edit_json(
        pack / INDEX, lambda index: index["weight_map"].update({"layers.9.old": "model-00003-of-00019.safetensors"})
    )
    sign_again(pack)
    for quick in (False, True):
        only(pack, "lacks tensors that the index names", "model-00003-of-00019", "layers.9.old", quick=quick)


def test_an_index_that_points_at_the_wrong_shard_is_named(pack: Path) -> None:
    edit_json(
        pack / INDEX, lambda index: index["weight_map"].update({"norm.weight": "model-00003-of-00019.safetensors"})
    )
    sign_again(pack)
    only(pack, str(pack / INDEX), "norm.weight", "wrong shard")


@pytest.mark.parametrize("index", [False, True])
def test_a_stray_tensor_is_named(pack: Path, index: bool) -> None:
    shard = "model-00003-of-00019.safetensors"

    def add(tensors: Stored) -> None:
        tensors["layers.0.ffn.experts.0.w1.weight"] = ("I8", (4,), b"\1\2\3\4")

    rewrite(pack, shard, add, index)
    sign_again(pack)
    for quick in (False, True):
        only(pack, "layers.0.ffn.experts.0.w1.weight", shard, *(["a stray tensor"] if index else []), quick=quick)


def test_a_missing_tensor_is_named(pack: Path) -> None:
    """The marker: without it, the trellis would be decoded with another codebook, to noise."""
    rewrite(pack, shard_of(pack, MARKER), lambda tensors: tensors.pop(MARKER))
    sign_again(pack)
    only(pack, "a tensor is missing", MARKER)


def test_wrong_marker_value_is_named(pack: Path) -> None:
    poke(pack, MARKER, 0, (0x83DCD12C).to_bytes(4, "little"))
    sign_again(pack)
    only(pack, "a codebook marker has the wrong value", MARKER, "-2082680531", "-2082680532")


def test_both_markers_are_named(pack: Path) -> None:
    def add(tensors: Stored) -> None:
        tensors[f"{PREFIX}.mcg"] = ("I32", (), (0xCBAC1FED).to_bytes(4, "little"))

    rewrite(pack, shard_of(pack, MARKER), add)
    sign_again(pack)
    found = problems(pack)
    assert len(found) == 2
    assert "a stray tensor" in found[0] and f"{PREFIX}.mcg" in found[0]
    assert "two codebook markers" in found[1] and PREFIX in found[1]


@pytest.mark.parametrize("suffix", ["suh", "svh"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_named(pack: Path, suffix: str, value: float) -> None:
    poke(pack, f"{PREFIX}.{suffix}", 6, np.float16(value).tobytes())
    sign_again(pack)
    only(pack, "a scale is not finite", f"{PREFIX}.{suffix}", shard_of(pack, MARKER))


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        (f"{PREFIX}.trellis", {"dtype": "U16"}),
        (f"{PREFIX}.trellis", {"dtype": "BF16"}),
        (f"{PREFIX}.trellis", {"shape": [8, 16, 48]}),
        (f"{PREFIX}.trellis", {"shape": [16, 16, 24]}),
        (f"{PREFIX}.suh", {"dtype": "I16"}),
        (f"{PREFIX}.svh", {"dtype": "BF16"}),
        (f"{PREFIX}.svh", {"shape": [1, 128]}),
        (MARKER, {"dtype": "F32"}),
        (MARKER, {"shape": [1]}),
        ("norm.weight", {"dtype": "F16"}),
        ("layers.0.ffn.gate.weight", {"shape": [256, 2]}),
    ],
)
def test_wrong_dtype_or_shape_is_named(pack: Path, name: str, entry: dict[str, object]) -> None:
    edit_header(pack / shard_of(pack, name), lambda header: header[name].update(entry))
    sign_again(pack)
    for quick in (False, True):
        found = problems(pack, quick)
        assert "a tensor has the wrong dtype or shape" in found[0]
        assert name in found[0]
        assert all(PREFIX in problem or "expert 1" in problem for problem in found[1:])  # not decodable either


def test_another_configuration_is_named(pack: Path) -> None:
    edit_json(pack / "config.json", lambda config: config["text_config"].update(n_routed_experts=3))
    sign_again(pack)
    found = problems(pack)
    assert any("layers.0.ffn.experts.2.w1.trellis" in problem for problem in found)
    assert any("layers.0.ffn.gate.weight" in problem for problem in found)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("quantization_config"),
        lambda config: config["quantization_config"].update(quant_method="fp8"),
        lambda config: config["quantization_config"].pop("non_routed_quantization"),
        lambda config: config["quantization_config"].update(non_routed_quantization=[1]),
        lambda config: config.update(quantization_config="exl3"),
        lambda config: config.update(text_config=None),
        lambda config: config.update(architectures=["Llama"]),
    ],
)
def test_a_configuration_that_is_no_packs_is_named(
    pack: Path, change: Callable[[dict[str, dict[str, str]]], None]
) -> None:
    edit_json(pack / "config.json", change)
    sign_again(pack)
    only(pack, "config.json")


def test_the_plan_of_another_pack_is_named(pack: Path, small_pack: Built) -> None:
    """Of another model, and of this model with other bits."""
    shutil.copy(small_pack.path / "plan.json", pack / "plan.json")
    sign_again(pack)
    only(pack, "the plan is of another pack", str(pack / "plan.json"))
    traffic = TrafficTable.load(pack / "calibration" / "traffic.safetensors")
    sizes = np.full(traffic.counts.shape, 26_892, dtype=np.int64)
    solve(sizes, traffic, MACHINE, (0, 0, 0), {"traces": "0" * 64}).save(pack / "plan.json")
    sign_again(pack)
    only(pack, "the plan is of another pack", str(pack / "plan.json"))


def test_a_plan_that_is_wrong_in_itself_is_named(pack: Path) -> None:
    edit_json(pack / "plan.json", lambda plan: plan["places"][0].update(budget_bytes=1))
    sign_again(pack)
    only(pack, str(pack / "plan.json"), "places[0].budget_bytes")


# Anything at all


def _damage_one_byte(pack: Path, name: str, offset: int, value: int) -> list[str]:
    path = pack / name
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[offset] = value if damaged[offset] != value else value ^ 1
    path.write_bytes(damaged)
    try:
        return problems(pack)
    finally:
        path.write_bytes(sound)


@pytest.fixture(scope="module")
def scratch(mini_pack: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini_pack.copy(tmp_path_factory.mktemp("scratch"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_single_byte_of_a_header_crashes_it(scratch: Path, data: st.DataObject) -> None:
    """Every such change is found, and named, whatever the byte."""
    name = shard_of(scratch, MARKER)
    raw = (scratch / name).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:end].decode()
    near = text.index(f'"{PREFIX}.')  # half of them where the experts' entries stand
    offset = data.draw(
        st.one_of(st.integers(0, end - 1), st.integers(near, min(near + 800, end - 9)).map(lambda n: n + 8))
    )
    value = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b'0189"IUBF,:{}[]-'))))
    found = _damage_one_byte(scratch, name, offset, value)
    assert str(scratch / name) in found[0]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([MANIFEST, "config.json", INDEX, "plan.json"]), st.data())
def test_no_single_byte_of_a_json_file_crashes_it(scratch: Path, name: str, data: st.DataObject) -> None:
    size = (scratch / name).stat().st_size
    value = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b'0189",:{}[]-.eN'))))
    found = _damage_one_byte(scratch, name, data.draw(st.integers(0, size - 1)), value)
    assert str(scratch / name) in found[0]


def test_manifest_reads_back(mini_pack: Built) -> None:
    assert read_manifest(mini_pack.path) == mini_pack.manifest == json.loads((mini_pack.path / MANIFEST).read_bytes())
