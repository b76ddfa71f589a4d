"""What a checkpoint holds and what its pack will weigh: the real model's figures to the byte, from headers alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.layout import check_layout
from moefit.errors import CheckpointError
from moefit.packs.inspect import fit, inspect_model
from moefit.packs.layout import pack_layout
from moefit.packs.recipe import Recipe
from moefit.packs.report import size_summary
from moefit.placement import Machine

from ..calibrate.synthetic import REAL_CONFIG, header_only
from ..small_model import CLI, Built, Inputs, poke

GB = 10**9
MEMORY_BOUND = 700_000_000
"""Bytes of resident memory for 96,085 tensors (measured: 480 MB, of which Python and torch take 290 MB)."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V4.1-Flash's 48 shards: true headers, holes for data."""
    return header_only(tmp_path_factory.mktemp("real") / "model", REAL_CONFIG)


@pytest.fixture(scope="module")
def opened(real: Path) -> Checkpoint:
    return Checkpoint.open(real)


def test_the_real_models_bytes(real: Path) -> None:
    found = inspect_model(real, Recipe())
    assert found["source_bytes"] == 510_286_023_000
    assert (found["tensors"], found["shards"], found["layers"], found["experts"]) == (96_085, 48, 40, 384)
    assert found["experts_per_token"] == 6
    pack = found["pack"]
    assert (pack["expert_bytes"], pack["routed_experts"]) == (13_315_596, 15_360)
    assert pack["routed_bytes"] == 204_527_554_560
    census = {part: sum(dtypes.values()) for part, dtypes in found["census"].items()}
    assert census["routed experts"] == 288_777_830_400
    assert census["engram tables"] == 202_758_032_400
    assert census["drafter experts"] == 7_219_445_760
    assert census["drafter experts"] + census["drafter"] == 7_932_874_632
    assert pack["tensor_bytes"] == found["source_bytes"] - census["routed experts"] + 204_527_554_560

    # everything stored counts, scales and markers too
    assert pack["bits_per_weight"] == 13_315_596 * 8 / (3 * 5120 * 2304)
    assert round(pack["bits_per_weight"], 4) == 3.0101


@pytest.mark.parametrize(
    ("recipe", "expert", "routed"),
    [
        (Recipe(bits=2.0), 8_891_916, 136_579_829_760),
        (Recipe(bits=4.0), 17_739_276, 272_475_279_360),
        (Recipe(codebook="3inst"), 13_315_596 - 3 * 4, 204_527_554_560 - 46_080 * 4),  # which has no markers
    ],
)
def test_other_recipes(opened: Checkpoint, recipe: Recipe, expert: int, routed: int) -> None:
    sizes = size_summary(pack_layout(opened, check_layout(opened), recipe))
    assert (sizes["expert_bytes"], sizes["routed_bytes"]) == (expert, routed)
    assert sizes["tensor_bytes"] == 510_286_023_000 - 288_777_830_400 + routed


def test_what_fits_on_two_96_gb_cards(opened: Checkpoint) -> None:
    """The Engram tables stand in host memory, which 128 GB cannot hold; 512 GB can."""
    fixed = (510_286_023_000 - 288_777_830_400 - 202_758_032_400) // 2
    assert fixed == 9_375_080_100

    layout = pack_layout(opened, check_layout(opened), Recipe())

    def room_with(host: str) -> dict[str, Any]:
        return fit(opened, layout, Recipe(), Machine.from_flags(["96GB:8GB", "96GB:8GB"], host))

    small = room_with("128GB")
    assert [place["fixed"] for place in small["places"]] == [fixed, fixed, 202_758_032_400]
    assert [place["experts"] for place in small["places"]] == [(88 * GB - fixed) // 13_315_596] * 2 + [0]
    assert not small["fits"]
    assert f"{202_758_032_400 - 128 * GB:,} B too large" in small["verdict"]

    room = 2 * ((88 * GB - fixed) // 13_315_596) + (240 * GB - 202_758_032_400) // 13_315_596
    assert room < 15_360
    assert f"{15_360 - room:,} of 15,360 experts find no place" in room_with("240GB")["verdict"]
    assert f"{(15_360 - room) * 13_315_596:,} B more are needed" in room_with("240GB")["verdict"]

    large = room_with("512GB")
    assert large["fits"]
    assert large["verdict"].startswith("fits")


def test_memory_stays_bounded(real: Path) -> None:
    """The whole command. Its peak is read as VmHWM: ru_maxrss would count the process that started it, too."""
    script = (
        "import sys\n"
        "from moefit.cli.main import main\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    command = [
        CLI[0],
        "-c",
        script,
        "inspect",
        str(real),
        "--gpu",
        "96GB",
        "--gpu",
        "96GB",
        "--host",
        "128GB",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["pack"]["routed_bytes"] == 204_527_554_560
    peak = next(line for line in done.stderr.splitlines() if line.startswith("VmHWM:"))
    assert int(peak.split()[1]) * 1024 < MEMORY_BOUND


def test_what_inspect_says_is_what_build_writes(small_pack: Built) -> None:
    found = inspect_model(small_pack.inputs.model, Recipe())
    assert found["values"] is None
    sizes = small_pack.manifest["sizes"]
    assert {key: found["pack"][key] for key in sizes} == sizes
    data = 0
    for path in small_pack.path.glob("*.safetensors"):
        raw = path.read_bytes()
        data += len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert found["pack"]["tensor_bytes"] == data


@pytest.mark.parametrize(
    ("name", "offset", "value"),
    [
        ("layers.1.ffn.experts.1.w2.scale", 9, b"\xff"),
        ("layers.0.attn.wq_a.weight", 5, b"\x7f"),
        ("norm.weight", 10, np.uint16(0x7FC0).tobytes()),
        ("layers.2.hc_ffn_base", 8, np.float32(np.inf).tobytes()),
        ("mtp.0.ffn.experts.0.w1.scale", 0, b"\xff"),
        ("layers.1.engram.embed.scale", 77, b"\xff"),
    ],
)
def test_a_bad_value_is_named(mini: Inputs, tmp_path: Path, name: str, offset: int, value: bytes) -> None:
    model = mini.copy(tmp_path).model
    poke(model, name, offset, value)
    assert inspect_model(model, Recipe())["values"] is None  # headers alone do not show it
    where = Checkpoint.open(model).where(name)
    with pytest.raises(CheckpointError, match="NaN") as error:
        inspect_model(model, Recipe(), values=True)
    assert f"[{where}]" in str(error.value)


def test_sound_values(mini: Inputs) -> None:
    values = inspect_model(mini.model, Recipe(), values=True)["values"]
    checkpoint = Checkpoint.open(mini.model)
    assert values["bytes_read"] + values["bytes_integer"] == sum(i.nbytes for i in checkpoint.tensors.values())
