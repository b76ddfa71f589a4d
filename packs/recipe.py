"""The choices that decide a pack's bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import PackError
from ..quantize.codebook import Codebook, check_bits
from ..quantize.linear import Options


@dataclass(frozen=True)
class Recipe:
    """bits: K of the routed experts. codebook: mul1, mcg or 3inst. seed: of the sign vectors.

    two_sided: round under both sides of the Fisher information, from a backward pass; shrinkage and damping are then
        chosen by held-out error. Else under the input Hessian alone.
    copies: of the traffic, rewritten by the model, that take part in the backward pass.
    damping: one-sided: share of the Hessian's mean diagonal added to its diagonal.
    shrinkage: one-sided: an expert that n tokens reach gets n / (n + shrinkage) parts of its own Hessian and the rest
        of the prior: the one of `prior_tokens` tokens spread evenly over the traffic, whichever experts they chose.
    enough_tokens: an expert that fewer tokens chose also gets, at a lower weight, tokens for which it came just behind
        the router's top-k, until it has so many or they end; 0 takes none. 1000 is where an expert's own Hessian
        begins to outweigh the prior, and so where the prior's bias no longer rules it.
    window: tokens per window, each window a fresh context.
    hold_out: every n-th document of the traces is kept from calibration, for the gate; 0 keeps none.
    kv_quantization: calibrate with key/value caches rounded as the release rounds them; None: if the model is served
        so (`V41Config.served_with_kv_quantization`), which a build settles before it begins.
    keep_routing: put into the pack which experts the router chose for every token of the traffic, and their weights.
    """

    bits: float = 3.0
    codebook: Codebook = "mul1"
    seed: int = 0
    damping: float = 0.05
    shrinkage: float = 1000.0
    prior_tokens: int = 4096
    enough_tokens: int = 1000
    window: int = 512
    hold_out: int = 0
    two_sided: bool = True
    copies: int = 3
    kv_quantization: bool | None = None
    keep_routing: bool = True

    def __post_init__(self) -> None:
        check_bits(self.bits, self.codebook)
        Options(self.bits, self.codebook, self.damping, self.seed)
        if (
            self.hold_out < 0
            or self.hold_out == 1
            or self.window < 2
            or self.prior_tokens < 1
            or not 0 <= self.copies < 100
            or self.enough_tokens < 0
            or not 0 <= self.shrinkage < float("inf")
        ):
            raise PackError(
                "the recipe makes no sense",
                found="expected hold_out 0 or >= 2, window >= 2, prior_tokens >= 1, enough_tokens >= 0, "
                f"shrinkage >= 0, 0 <= copies < 100, found {self}",
            )

    @property
    def options(self) -> Options:
        return Options(self.bits, self.codebook, self.damping, self.seed)

    @property
    def passes(self) -> int | None:
        """Copies beside the traffic that go forward and back; None: the traffic's forward is enough."""
        return self.copies if self.two_sided else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
