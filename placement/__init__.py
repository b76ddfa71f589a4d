"""Placement: which expert lies on which card or on the host, and how far that is from the best possible."""

from .machine import Gpu, Machine, parse_bytes
from .plan import Plan, check_plan
from .solve import solve
from .traffic import TokenLabels, TrafficTable, merge, stack

__all__ = [
    "Gpu",
    "Machine",
    "Plan",
    "TokenLabels",
    "TrafficTable",
    "check_plan",
    "merge",
    "parse_bytes",
    "solve",
    "stack",
]
