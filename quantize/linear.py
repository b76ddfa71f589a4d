"""One EXL3 linear: weight and Hessian in, packed tensors and an error report out, and back."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch

from ..errors import QuantizeError
from .codebook import Codebook, check_bits, marker
from .encode import decode_states, encode_tiles
from .hadamard import rotate_columns, rotate_rows
from .ldlq import block_ldl, ldlq, proxy_error
from .regularize import pad, padded, regularize
from .trellis import RING, TILE, from_tiles, pack, to_tiles, unpack

# Below this mean diagonal a Hessian carries no information and the identity takes its place.
EMPTY_HESSIAN: Final = 1e-20


@dataclass(frozen=True)
class Options:
    """How to quantize. bits: K. damping: share of the mean diagonal added to the Hessian. seed: of the signs."""

    bits: float = 3.0
    codebook: Codebook = "mul1"
    damping: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_bits(self.bits, self.codebook)
        if not 0 < self.damping <= 1:
            raise QuantizeError("damping out of range", found=f"{self.damping:g}", mend="choose 0 < damping <= 1")


@dataclass(frozen=True)
class Linear:
    """A quantized linear y = x W, W [k, n], both padded to multiples of 128 in the tensors.

    trellis: int16 [k/16, n/16, 16 K]; suh: float16 [k]; svh: float16 [n].
    shape: (k, n) before padding. proxy_error: tr(E^T H E) / tr(W^T H W) of the decoded tensors, H undamped.
    damping: the share used. identity_hessian: True when no usable Hessian was given.
    """

    trellis: np.ndarray
    suh: np.ndarray
    svh: np.ndarray
    bits: float
    codebook: Codebook
    shape: tuple[int, int]
    proxy_error: float
    damping: float
    identity_hessian: bool

    def tensors(self, prefix: str) -> dict[str, np.ndarray]:
        """Tensors as stored: `<prefix>.trellis .suh .svh` and the codebook's marker."""
        stored = {f"{prefix}.trellis": self.trellis, f"{prefix}.suh": self.suh, f"{prefix}.svh": self.svh}
        if (mark := marker(self.codebook)) is not None:
            stored[f"{prefix}.{mark[0]}"] = np.array(mark[1], dtype=np.int32)
        return stored


def stored_layout(k: int, n: int, bits: float, codebook: Codebook) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Suffix -> (safetensors dtype, shape, bytes) of the tensors `Linear.tensors` gives for a [k, n] weight."""
    k, n = padded(k), padded(n)
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "trellis": ("I16", (k // TILE, n // TILE, int(TILE * bits))),
        "suh": ("F16", (k,)),
        "svh": ("F16", (n,)),
    }
    if (mark := marker(codebook)) is not None:
        layout[mark[0]] = ("I32", ())
    size = {"I16": 2, "F16": 2, "I32": 4}
    return {suffix: (dtype, shape, size[dtype] * prod(shape)) for suffix, (dtype, shape) in layout.items()}


def quantize_shared_input(
    weights: dict[str, torch.Tensor], hessian: torch.Tensor | None, options: Options
) -> dict[str, Linear]:
    """Quantize linears that read the same input (gate and up of an expert; or a single one).

    weights: name -> float32 [k, n_i], the transpose of a checkpoint's [out, in]. hessian: float32 [k, k], sum or
    mean of x x^T over the tokens that reach them; None or all zeros means the identity.
    Deterministic given options.seed and the names. Single-threaded: run several at once through `core.parallel`.
    Raises QuantizeError naming the tensor: non-finite weight, scales outside fp16, impossible Hessian.
    """
    names = list(weights)
    k = weights[names[0]].shape[0]
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape[0] != k or 0 in weight.shape:
            raise QuantizeError(
                "weights that share an input differ in shape", where=name, found=f"{tuple(weight.shape)}"
            )
        if not torch.isfinite(weight).all():
            raise QuantizeError("weight is not finite", where=name, mend="check the original shard")
    if hessian is not None and hessian.shape != (k, k):
        raise QuantizeError(
            "Hessian does not fit", where=names[0], found=f"expected {k} x {k}, found {tuple(hessian.shape)}"
        )
    if hessian is not None and not torch.isfinite(hessian).all():
        raise QuantizeError("the Hessian is not finite", where=names[0], mend="recalibrate")
    if hessian is not None and float(hessian.diagonal().mean()) < EMPTY_HESSIAN:
        hessian = None

    rows = padded(k)
    regular = regularize(
        [pad(w.float(), rows, padded(w.shape[1])) for w in weights.values()],
        names, options.bits, options.codebook, options.seed,
    )  # fmt: skip
    lower, damping = torch.zeros(rows, rows), 0.0
    if hessian is not None:
        scaled = pad(hessian.float(), rows, rows) * regular.suh[:, None] * regular.suh[None, :]
        try:
            factor = block_ldl(rotate_rows(rotate_columns(scaled)), options.damping)
        except QuantizeError as error:
            raise QuantizeError(error.what, where=names[0], found=error.found, mend=error.mend) from None
        lower, damping = factor.lower, factor.damping

    widths = [c.shape[1] for c in regular.codes]
    states = np.empty((rows // TILE, sum(widths) // TILE, RING), dtype=np.uint16)
    row = rows // TILE

    def encode(block: torch.Tensor) -> torch.Tensor:  # [16, sum n], called bottom-up
        nonlocal row
        row -= 1
        states[row] = encode_tiles(to_tiles(block.numpy())[0], options.codebook, options.bits)
        values = decode_states(states[row : row + 1], options.codebook)
        return torch.from_numpy(from_tiles(values).astype(np.float32))

    ldlq(torch.cat(regular.codes, dim=1), lower, encode)

    linears, start = {}, 0
    for name, width, svh in zip(names, widths, regular.svh, strict=True):
        trellis = pack(states[:, start // TILE : (start + width) // TILE], options.bits)
        start += width
        suh16, svh16 = regular.suh.half().numpy(), svh.half().numpy()
        weight = weights[name].float()
        decoded = decode(trellis, suh16, svh16, options.codebook)[: weight.shape[0], : weight.shape[1]]
        linears[name] = Linear(
            trellis, suh16, svh16, options.bits, options.codebook, (k, weight.shape[1]),
            proxy_error(weight, decoded, hessian), damping, hessian is None,
        )  # fmt: skip
    return linears


def decode(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: Codebook) -> torch.Tensor:
    """W = diag(suh) P C P diag(svh) in float32 [k, n] (padded sizes) from the stored tensors.

    K follows from the trellis' last dimension. Raises QuantizeError when the three do not belong together.
    """
    if trellis.ndim != 3 or suh.shape != (trellis.shape[0] * TILE,) or svh.shape != (trellis.shape[1] * TILE,):
        raise QuantizeError(
            "trellis, suh and svh do not belong together",
            found=f"trellis {trellis.shape}, suh {suh.shape}, svh {svh.shape}",
        )
    bits = trellis.shape[2] / TILE
    check_bits(bits, codebook)
    codes = torch.from_numpy(from_tiles(decode_states(unpack(trellis, bits), codebook)).astype(np.float32))
    weight = rotate_columns(rotate_rows(codes))
    return weight * torch.from_numpy(suh.astype(np.float32))[:, None] * torch.from_numpy(svh.astype(np.float32))
