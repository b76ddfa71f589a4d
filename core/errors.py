"""Typed errors. Each message has four parts: what, where, expected against found, and the mend."""

from __future__ import annotations


class MoefitError(Exception):
    """Base of every error a user can cause. The command line prints it without a traceback.

    what: one clause saying what is wrong.
    where: file, tensor or line.
    found: expected against found, in the reader's units.
    mend: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", found: str = "", mend: str = "") -> None:
        self.what, self.where, self.found, self.mend = what, where, found, mend
        text = what
        if where:
            text += f" [{where}]"
        if found:
            text += f": {found}"
        if mend:
            text += f". {mend[0].upper()}{mend[1:]}"
        super().__init__(text if text.endswith((".", "?")) else text + ".")


class CheckpointError(MoefitError):
    """The original weights are missing, damaged, or not what config.json says."""


class TraceError(MoefitError):
    """Traffic or evaluation text cannot be read or does not fit the tokenizer."""


class CalibrationError(MoefitError):
    """Captured statistics cannot be right (non-finite activations, no routed token at all)."""


class QuantizeError(MoefitError):
    """A weight, Hessian or option that the EXL3 codec cannot take."""


class PlanError(MoefitError):
    """A placement that cannot exist, or a plan file that does not describe this pack."""


class PackError(MoefitError):
    """A pack directory that is incomplete, damaged, in use or made by another recipe."""


class FidelityError(MoefitError):
    """A comparison that would not mean anything (other tokens, vocabulary, too few documents)."""
