"""LDLQ and packing on the card: schedule, checks and structures everywhere; the kernels where there is a card."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import QuantizeError
from moefit.quantize import cuda_encode, cuda_ldlq
from moefit.quantize.codebook import CODEBOOKS, HALF_BITS, INTEGER_BITS, table_float32
from moefit.quantize.cuda_ldlq import ldlq_cuda, pack_cuda, schedule
from moefit.quantize.ldlq import ldlq
from moefit.quantize.trellis import TILE, from_tiles, pack, to_tiles, unpack

EVERY_K = [(c, k) for c in CODEBOOKS for k in INTEGER_BITS] + [("mul1", k) for k in HALF_BITS]
needs_card = pytest.mark.skipif(not cuda_encode.available(), reason="no CUDA card, or built without MOEFIT_CUDA")


# Everywhere


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 7, 16, 264]), st.booleans()
)  # fmt: skip
def test_schedule_is_an_order_that_feedback_allows(
    matrices: int, rows: int, columns: int, round_tiles: int, two_sided: bool
) -> None:
    order, ends = schedule(matrices, rows, columns, round_tiles, two_sided)
    assert sorted(order.tolist()) == list(range(matrices * rows * columns))
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == len(order) and sizes.min() >= 1
    assert all(size < round_tiles or size % round_tiles == 0 for size in sizes)
    assert sizes.max() <= cuda_ldlq.MOST_ROUNDS * round_tiles
    step = np.empty(len(order), dtype=np.int64)
    step[order] = np.repeat(np.arange(len(ends)), sizes)
    step = step.reshape(matrices, rows, columns)
    assert (step[:, :-1] > step[:, 1:]).all()
    if two_sided:
        assert (step[:, :, :-1] > step[:, :, 1:]).all()


@pytest.mark.parametrize(("two_sided", "steps"), [(True, 463), (False, 349)])
def test_schedule_of_real_groups_wastes_no_rounds(two_sided: bool, steps: int) -> None:
    order, ends = schedule(16, 320, 144, 264, two_sided)
    rounds = -(-np.diff(ends, prepend=0) // 264)
    assert rounds.sum() <= 1.02 * len(order) / 264
    assert steps <= len(ends) <= 1.2 * steps  # no fewer are possible: anti-diagonals; 2,304 chains at 2,112 a step


def test_block_columns() -> None:
    lower = torch.randn(2, 48, 48)
    blocks = cuda_ldlq._block_columns(lower)
    assert blocks.shape == (2, 3, 48, 16) and blocks.is_contiguous()
    assert torch.equal(blocks[1, 2], lower[1, :, 32:])


def test_structure_is_the_header_s() -> None:
    header = Path(cuda_ldlq.__file__).parent / "cuda" / "ldlq.h"
    struct = re.search(r"struct moefit_ldlq_group \{(.*?)\n\};", header.read_text(), re.S)
    assert struct
    types = {"int64_t": "c_long", "int32_t": "c_int", "size_t": "c_ulong"}
    expected = []
    for declaration in re.sub(r"//.*", "", struct[1]).split(";"):
        if words := declaration.replace(",", " ").split():
            pointer = "*" in declaration
            names = [w for w in words if w not in ("const", *types) and not w.endswith("*")]
            kind = next((types[w] for w in words if w in types), "")
            expected += [(name, "c_void_p" if pointer else kind) for name in names]
    assert [(name, kind.__name__) for name, kind in cuda_ldlq._Group._fields_] == expected


@pytest.mark.parametrize(
    ("weight", "lower_in", "lower_out", "message"),
    [
        ((2, 32, 24), (2, 32, 32), None, "no group of weights"),
        ((32, 16), (2, 32, 32), None, "no group of weights"),
        ((0, 32, 16), (1, 32, 32), None, "no group of weights"),
        ((3, 32, 16), (2, 32, 32), None, r"lower_in does not fit.*\[3 or 1, 32, 32\], found \[2, 32, 32\]"),
        ((3, 32, 16), (3, 16, 16), None, "lower_in does not fit"),
        ((3, 32, 16), (1, 32, 32), (3, 32, 32), "lower_out does not fit"),
        ((3, 32, 16), (1, 32, 32), (16, 16), "lower_out does not fit"),
        ((3, 32, 16), (1, 32, 32), (1, 16, 16), "weight is not ready for the card.*on cpu"),
    ],
)
def test_inputs_that_do_not_fit(
    weight: tuple[int, ...], lower_in: tuple[int, ...], lower_out: tuple[int, ...] | None, message: str
) -> None:
    out = None if lower_out is None else torch.zeros(lower_out)
    # The first mismatch is named: shapes of all three before what only the card could take.
    with pytest.raises(QuantizeError, match=message):
        ldlq_cuda(torch.zeros(weight), torch.zeros(lower_in), out, "mul1", 3.0)


def test_no_such_k() -> None:
    with pytest.raises(QuantizeError, match="no such K"):
        ldlq_cuda(torch.zeros(1, 16, 16), torch.zeros(1, 16, 16), None, "mcg", 2.5)
    with pytest.raises(QuantizeError, match="no such K"):
        pack_cuda(torch.zeros(1, 256, dtype=torch.uint16), 9.0)
    with pytest.raises(QuantizeError, match="no states on the card"):
        pack_cuda(torch.zeros(1, 256, dtype=torch.uint16), 3.0)


# On a card


def group(b: int, k: int, n: int, own_in: bool, own_out: bool | None, seed: int = 0) -> list[torch.Tensor | None]:
    """Weights and factors; every block of a factor is large enough that leaving it out would show. own_out None: M = I.

    What LDLQ must not read, the diagonal blocks and all above, is filled with large numbers.
    """
    random = torch.Generator().manual_seed(seed)

    def lower(matrices: int, size: int) -> torch.Tensor:
        block = torch.arange(size) // TILE
        below = block[:, None] > block[None, :]
        return torch.where(below, torch.randn(matrices, size, size, generator=random) / 16, 1e4).cuda()

    weight = torch.randn(b, k, n, generator=random).cuda()
    lower_out = None if own_out is None else lower(b if own_out else 1, n)
    return [weight, lower(b if own_in else 1, k), lower_out]


def unit(lower: torch.Tensor) -> torch.Tensor:
    """I + the part below the diagonal blocks, in float64."""
    size = lower.shape[-1]
    block = torch.arange(size, device=lower.device) // TILE
    below = torch.where(block[:, None] > block[None, :], lower.double(), 0.0)
    return below + torch.eye(size, device=lower.device, dtype=torch.float64)


def tiles(matrices: torch.Tensor) -> torch.Tensor:
    """[b, k, n] -> float32 [b * k/16 * n/16, 256] in ring order, on the card."""
    return (
        torch.from_numpy(np.concatenate([to_tiles(m.cpu().numpy()).reshape(-1, 256) for m in matrices])).float().cuda()
    )


def check_group(weight: torch.Tensor, lower_in: torch.Tensor, lower_out: torch.Tensor | None, bits: float) -> None:
    """Each tile must be as near to the target that follows from all others as a fresh encoding of that target is.

    Near, not equal: targets are rounded to float32 and the encoder is discrete. A single 16x16 term left out or
    misplaced would add 16 / 16^2 to a tile's error, a single row or column of each term 1/16 of that to all tiles.
    """
    b, k, n = weight.shape
    states, quantized = ldlq_cuda(weight, lower_in, lower_out, "mul1", bits)
    assert states.shape == (b, k // 16, n // 16, 256) and quantized.shape == weight.shape
    stored = states.cpu().numpy()
    np.testing.assert_array_equal(unpack(pack(stored, bits), bits), stored)
    values = np.stack([from_tiles(table_float32("mul1")[s]) for s in stored])
    np.testing.assert_array_equal(quantized.cpu().numpy(), values)

    fed_back = unit(lower_in).mT @ (weight.double() - quantized.double())
    if lower_out is not None:
        fed_back = fed_back @ unit(lower_out)
    target = tiles(quantized.double() + fed_back)  # the tile's own error is in both
    table = torch.from_numpy(table_float32("mul1").copy()).cuda()
    fresh = table[cuda_encode.encode_tiles_cuda(target, "mul1", bits).long()]
    best, got = ((x - target).square().mean(1) for x in (fresh, tiles(quantized)))
    assert float(((got - best).abs() / best).max()) < 0.01
    assert abs(float(got.mean() / best.mean()) - 1) < 0.001


@needs_card
@pytest.mark.parametrize(
    ("own_in", "own_out"), [(True, None), (False, None), (True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize(
    ("b", "k", "n"), [(1, 16, 16), (1, 160, 16), (2, 16, 160), (3, 80, 48), (5, 48, 80), (3, 256, 128), (2, 128, 384)]
)
def test_every_tile_is_encoded_for_its_target(b: int, k: int, n: int, own_in: bool, own_out: bool | None) -> None:
    check_group(*group(b, k, n, own_in, own_out), 3.0)  # type: ignore[arg-type]


@needs_card
@pytest.mark.parametrize("bits", [1.0, 1.5, 2.0, 2.5, 3.5, 4.0, 5.0, 6.0, 8.0])
def test_other_k(bits: float) -> None:
    check_group(*group(2, 48, 64, True, True), bits)  # type: ignore[arg-type]


@needs_card
def test_large_group_of_several_rounds_a_step() -> None:
    check_group(*group(24, 512, 384, True, False), 3.0)  # type: ignore[arg-type]


@needs_card
@pytest.mark.parametrize("own_out", [None, True])
def test_result_does_not_depend_on_the_group(own_out: bool | None) -> None:
    weight, lower_in, lower_out = group(5, 128, 160, True, own_out, seed=4)
    assert weight is not None and lower_in is not None
    together = ldlq_cuda(weight, lower_in, lower_out, "mul1", 3.0)
    assert all(
        torch.equal(a, b) for a, b in zip(together, ldlq_cuda(weight, lower_in, lower_out, "mul1", 3.0), strict=True)
    )
    for m in range(5):
        own = slice(m, m + 1)
        alone = ldlq_cuda(weight[own], lower_in[own], None if lower_out is None else lower_out[own], "mul1", 3.0)
        assert torch.equal(together[0][own], alone[0]) and torch.equal(together[1][own], alone[1])


@needs_card
@pytest.mark.parametrize("own_out", [None, True])
def test_as_good_as_the_plain_one(own_out: bool | None) -> None:
    """A rounding that flips one tile changes all later ones, so the results differ; their quality does not."""
    weight, lower_in, lower_out = group(4, 256, 256, True, own_out, seed=6)
    assert weight is not None and lower_in is not None
    factors = [None if f is None else unit(f) - torch.eye(256).cuda() for f in (lower_in, lower_out)]
    table = torch.from_numpy(table_float32("mul1").copy()).cuda()

    def encode(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = cuda_encode.encode_tiles_cuda(tiles, "mul1", 3.0)
        return states, table[states.long()]

    states, quantized = ldlq_cuda(weight, lower_in, lower_out, "mul1", 3.0)
    lower_in, lower_out = (None if f is None else f.float() for f in factors)
    assert lower_in is not None
    plain_states, plain = ldlq(weight, lower_in, lower_out, encode)
    assert torch.equal(states[:, -1, -1], plain_states[:, -1, -1])
    # What feedback through L and M minimises, with D = I: the squares of (I + L)^T E (I + M).
    left, right = unit(lower_in).mT, torch.eye(256).cuda().double() if lower_out is None else unit(lower_out)
    ours, theirs = (float((left @ (weight - q).double() @ right).square().mean()) for q in (quantized, plain))
    assert abs(ours / theirs - 1) < 0.002


@needs_card
def test_one_sided_is_two_sided_with_no_feedback_along_n() -> None:
    weight, lower_in, _ = group(3, 96, 112, True, None, seed=5)
    assert weight is not None and lower_in is not None
    one, two = (ldlq_cuda(weight, lower_in, out, "mul1", 3.0) for out in (None, torch.zeros(1, 112, 112).cuda()))
    assert torch.equal(one[0], two[0])


@needs_card
def test_not_finite_is_refused() -> None:
    for at, name in enumerate(("weight", "lower_in", "lower_out")):
        inputs = group(2, 32, 48, True, True)
        inputs[at][1, 20, 3] = float("nan")  # type: ignore[index]
        with pytest.raises(QuantizeError, match=f"{name} is not finite.*matrix 1"):
            ldlq_cuda(*inputs, "mul1", 3.0)  # type: ignore[arg-type]


@needs_card
@pytest.mark.parametrize(("codebook", "bits"), EVERY_K)
def test_pack_equals_the_plain_one(codebook: str, bits: float) -> None:
    states = np.random.default_rng(0).integers(0, 1 << 16, (3, 5, 256), dtype=np.uint16)  # not even closed
    np.testing.assert_array_equal(pack_cuda(torch.from_numpy(states).cuda(), bits).cpu().numpy(), pack(states, bits))
    assert pack_cuda(torch.empty((0, 256), dtype=torch.uint16, device="cuda"), bits).shape == (0, int(16 * bits))
