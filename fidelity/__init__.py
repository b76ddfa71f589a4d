"""Is the pack still the same model? Divergences, statistics, verdicts and the receipt that records them.

`divergence` compares two sets of logits position by position, `statistics` turns the positions into numbers
with intervals (clustered by document), `gate` into pass, fail or inconclusive, and `receipt` writes all of it
down so that anyone can judge again without running a model.
"""

from .divergence import TokenRows, compare
from .gate import Corpus, Policy, Verdict, judge, negative_control
from .receipt import Protocol, Receipt, make_receipt, read_receipt, write_receipt
from .statistics import WindowRow, window_row

__all__ = [
    "Corpus",
    "Policy",
    "Protocol",
    "Receipt",
    "TokenRows",
    "Verdict",
    "WindowRow",
    "compare",
    "judge",
    "make_receipt",
    "negative_control",
    "read_receipt",
    "window_row",
    "write_receipt",
]
