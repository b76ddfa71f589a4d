"""Placement: which expert lies on which card or on the host, and how far that is from the best possible."""

from .aim import Aim
from .limits import Limits
from .machine import Cpu, Gpu, Machine, parse_bytes
from .plan import Plan
from .recorded import Recorded
from .solve import check_plan, solve
from .traffic import TokenLabels, TrafficTable, merge, stack

__all__ = [
    "Aim",
    "Cpu",
    "Gpu",
    "Limits",
    "Machine",
    "Plan",
    "Recorded",
    "TokenLabels",
    "TrafficTable",
    "check_plan",
    "merge",
    "parse_bytes",
    "solve",
    "stack",
]
