"""Where a build computes: on a CUDA card if there is one that this installation can use, else on the CPU."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from ..errors import MoefitError, PackError
from ..quantize.cuda_encode import library

Device = Literal["auto", "cpu", "cuda"]


def settle_device(wanted: Device) -> Literal["cpu", "cuda"]:
    """Raises PackError or QuantizeError if a card is asked for that this machine or this installation cannot use."""
    if wanted == "cpu":
        return "cpu"
    try:
        if not torch.cuda.is_available():
            mend = "install a CUDA build of torch and the driver, or use --device cpu"
            raise PackError("there is no CUDA card that torch can use", found=f"torch {torch.__version__}", mend=mend)
        library()
    except MoefitError:
        if wanted == "cuda":
            raise
        return "cpu"
    return "cuda"


def start_card() -> None:
    """What torch does at first use and cannot do in several threads at once: load its solvers, begin a backward."""
    one = torch.ones(1, 1, device="cuda", requires_grad=True)
    torch.linalg.cholesky(one.detach())
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it makes a CUDA context there, as it should
        (one @ one).backward()
