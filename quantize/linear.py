"""One EXL3 linear: weight and Hessian in, packed tensors and an error report out, and back."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import QuantizeError
from .codebook import Codebook, check_bits, marker, table_float32
from .cuda_ldlq import ldlq_cuda, pack_cuda
from .encode import decode_states, encode_tiles
from .hadamard import rotate_columns, rotate_rows
from .ldlq import Encode, Factor, block_ldl, energy, ldlq
from .refit import refit_scales
from .regularize import fp16_values, pad, padded, regularize
from .trellis import TILE, from_tiles, pack, unpack

# Below this mean diagonal a Hessian carries no information and the identity takes its place.
EMPTY_HESSIAN: Final = 1e-20


@dataclass(frozen=True)
class Options:
    """How to quantize. bits: K. damping, output_damping: shares of the mean diagonal added to Hin and Hout.
    seed: of the signs. refit: rounds of scale refit, 0 for none."""

    bits: float = 3.0
    codebook: Codebook = "mul1"
    damping: float = 0.05
    seed: int = 0
    output_damping: float = 0.05
    refit: int = 2

    def __post_init__(self) -> None:
        check_bits(self.bits, self.codebook)
        for damping in (self.damping, self.output_damping):
            if not 0 < damping <= 1:
                raise QuantizeError("damping out of range", found=f"{damping:g}", mend="choose 0 < damping <= 1")
        if self.refit < 0:
            raise QuantizeError("rounds of refit out of range", found=f"{self.refit}", mend="choose 0 or more")


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


def _usable(hessian: Tensor | None, size: int, names: list[str], which: str) -> tuple[Tensor | None, list[bool]]:
    """The Hessian as [b or 1, m, m], size padded to whole Hadamard blocks, or None; and for whom it carried nothing,
    so that the identity stands in its place."""
    if hessian is None:
        return None, [True] * len(names)
    hessian = hessian if hessian.ndim == 3 else hessian[None]
    if hessian.shape[0] not in (1, len(names)) or hessian.shape[1:] != (size, size):
        raise QuantizeError(
            f"the {which} Hessian does not fit",
            where=names[0],
            found=f"expected {size} x {size}, found {tuple(hessian.shape)}",
        )
    bad = ~torch.isfinite(hessian).flatten(1).all(dim=1)
    if bool(bad.any()):
        where = names[int(bad.nonzero()[0])] if len(bad) > 1 else ", ".join(names)
        raise QuantizeError(f"the {which} Hessian is not finite", where=where, mend="recalibrate")
    empty = hessian.diagonal(dim1=1, dim2=2).mean(dim=1).abs() < EMPTY_HESSIAN  # [b or 1]
    hessian = torch.where(empty[:, None, None], torch.eye(size).to(hessian), hessian)
    return pad(hessian.float(), padded(size), padded(size)), empty.expand(len(names)).tolist()


def _factor(hessian: Tensor | None, scales: Tensor, damping: float, names: list[str]) -> Factor | None:
    """Block LDL of the Hessian as the codes see it: P diag(scales) H diag(scales) P."""
    if hessian is None:
        return None
    scaled = hessian * scales[:, :, None] * scales[:, None, :]
    try:
        return block_ldl(rotate_rows(rotate_columns(scaled)), damping)
    except QuantizeError as error:
        raise QuantizeError(error.what, where=", ".join(names), found=error.found, mend=error.mend) from None


def _damped(hessian: Tensor | None, damping: float) -> Tensor | None:
    if hessian is None:
        return None
    mean = hessian.diagonal(dim1=1, dim2=2).mean(dim=1)
    return hessian + damping * mean[:, None, None] * torch.eye(hessian.shape[1]).to(hessian)


def quantize_linears(
    weights: dict[str, Tensor], hin: Tensor | None, hout: Tensor | None, options: Options
) -> dict[str, Linear]:
    """Quantize linears of one shape together, on the device they lie on.

    weights: name -> float32 [k, n], the transpose of a checkpoint's [out, in]. hin: float32 [k, k] for all of them or
    [b, k, k], sum or mean of x x^T over the tokens that reach them; hout: [n, n] or [b, n, n], what the loss feels
    (`kronecker`). None or zeros means the identity.
    Deterministic given options.seed and the names; on the CPU single-threaded: run several at once through
    `core.parallel`. Raises QuantizeError naming the tensor: non-finite weight, scales outside fp16, impossible Hessian.
    """
    names = list(weights)
    shape = weights[names[0]].shape
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape != shape or 0 in weight.shape:
            raise QuantizeError("weights of a group differ in shape", where=name, found=f"{tuple(weight.shape)}")
        if not bool(torch.isfinite(weight).all()):
            raise QuantizeError("weight is not finite", where=name, mend="check the original shard")
    k, n = shape
    hin, blind = _usable(hin, k, names, "input")
    hout, _ = _usable(hout, n, names, "output")
    w = pad(torch.stack([weight.float() for weight in weights.values()]), padded(k), padded(n))
    rounded = _round(w, names, hin, hout, options)
    norm = energy(w, hin, hout)
    error = torch.where(norm > 0, rounded.error / norm, 0.0).tolist()
    states = rounded.states
    packed = pack_cuda(states, options.bits).cpu().numpy() if w.is_cuda else pack(states.numpy(), options.bits)
    suh, svh = rounded.suh.half().cpu().numpy(), rounded.svh.half().cpu().numpy()
    damping = rounded.damping.tolist()
    return {
        name: Linear(packed[i], suh[i], svh[i], options.bits, options.codebook, (k, n), error[i], damping[i], blind[i])
        for i, name in enumerate(names)
    }


def native_encoder(codebook: Codebook, bits: float) -> Encode:
    """The CPU's tile encoder as `ldlq` takes it."""
    values = torch.from_numpy(table_float32(codebook).copy())

    def encode(tiles: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.from_numpy(encode_tiles(tiles.numpy(), codebook, bits))
        return states, values[states.to(torch.int64)]

    return encode


class _Rounded(NamedTuple):
    """error [b]: tr(E^T Hin E Hout). states uint16 [b, k/16, n/16, 256]. suh [b, k]; svh [b, n]. damping [b]."""

    error: Tensor
    states: Tensor
    suh: Tensor
    svh: Tensor
    damping: Tensor


def _round(w: Tensor, names: list[str], hin: Tensor | None, hout: Tensor | None, options: Options) -> _Rounded:
    """Regularise, encode with error feedback, refit. w: [b, k, n], padded; hin, hout: [b or 1, ...], padded."""
    regular = regularize(w, names, options.bits, options.codebook, options.seed)
    inner = _factor(hin, regular.suh, options.damping, names)
    outer = _factor(hout, regular.svh, options.output_damping, names)
    lower_in = torch.zeros(1, w.shape[1], w.shape[1], device=w.device) if inner is None else inner.lower
    lower_out = None if outer is None else outer.lower
    if w.is_cuda:
        states, codes = ldlq_cuda(regular.codes, lower_in, lower_out, options.codebook, options.bits)
    else:
        states, codes = ldlq(regular.codes, lower_in, lower_out, native_encoder(options.codebook, options.bits))
    codes = rotate_columns(rotate_rows(codes))

    def error(suh: Tensor, svh: Tensor) -> Tensor:
        return energy(w - codes * suh[:, :, None] * svh[:, None, :], hin, hout)

    suh, svh = regular.suh, regular.svh
    least = error(suh, svh)
    if options.refit:
        metric = _damped(hin, options.damping), _damped(hout, options.output_damping)
        new_suh, new_svh = refit_scales(w, codes, suh, svh, *metric, options.refit)
        (new_suh, suh_fits), (new_svh, svh_fits) = fp16_values(new_suh), fp16_values(new_svh)
        refitted = error(new_suh, new_svh)
        better = (refitted < least) & suh_fits.all(dim=1) & svh_fits.all(dim=1)
        suh = torch.where(better[:, None], new_suh, suh)
        svh = torch.where(better[:, None], new_svh, svh)
        least = torch.where(better, refitted, least)
    damping = torch.zeros(1) if inner is None else inner.damping
    return _Rounded(least, states, suh, svh, damping.expand(len(names)).to(w.device))


def decode(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: Codebook) -> Tensor:
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
