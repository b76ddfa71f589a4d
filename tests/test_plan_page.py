"""docs/plan.md held to the code: figures, fields, examples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from moefit.files import sha256_bytes
from moefit.placement import (
    Cpu,
    Plan,
    TrafficTable,
    aim,
    check_plan,
    decompose,
    limits,
    moves_file,
    objective,
    program,
    rates,
    replan,
)
from moefit.placement import plan as plan_file
from moefit.placement.solve import GAP, LAYERS_TARGET, PROGRAM_COLUMNS, solve

from .test_docs import blocks, quoted, rows, section, words


def test_plan_page() -> None:
    page = words("docs/plan.md")
    assert f"version {plan_file.KIND.version}" in page.splitlines()[0][:30]
    assert f'`"{plan_file.KIND.format}"`, `{plan_file.KIND.version}`' in page
    assert f'`"{moves_file.KIND.format}"`, `{moves_file.KIND.version}`' in page
    assert plan_file.KIND.most == moves_file.KIND.most and f"files over {plan_file.KIND.most >> 20} MiB" in page
    assert f"(an expert's bytes: 2^{plan_file.MAX_SIZE.bit_length() - 1})" in page
    assert f"more than 2^{plan_file.MAX_CELLS.bit_length() - 1} layers x experts x places" in page
    assert f"{limits.MAX_RULES:,} rules of {limits.MAX_RULE:,} characters" in page
    assert f"up to {moves_file.MAX_MOVES:,}, in order" in page
    assert f"chunks of {rates.CHUNK:,} tokens" in page
    assert f"less than 2^{objective.LOAD_BITS}" in page
    assert f"up to {decompose.COLUMNS:,} columns a layer" in page and f"for {decompose.ROUNDS} rounds" in page
    assert f"of the whole problem, up to {PROGRAM_COLUMNS:,} columns" in page
    assert float(program.TRUST) == 1e-6 and "lowered by 1e-6 (relative)" in page
    assert f"a gap of {100 * GAP:g} %; programs by layer" in page
    assert f"at {100 * LAYERS_TARGET:g} %." in page
    objectives = [
        (quoted(row[0])[0].removesuffix(":W"), row[1]) for row in rows(section("docs/plan.md", "## The objective"))
    ]
    assert dict(objectives[:-1]) == aim.UNITS
    assert objectives[-1][1] == aim.Aim.parse(objectives[-1][0]).unit


def leaves(value: Any, prefix: str = "") -> set[str]:
    """Names of all fields of a JSON value, each with those that it is in."""
    if isinstance(value, list) and value:
        return set().union(*(leaves(item, f"{prefix}[]" if isinstance(item, dict) else prefix) for item in value))
    if isinstance(value, dict) and value:
        return set().union(*(leaves(item, f"{prefix}.{key}".lstrip(".")) for key, item in value.items()))
    return {prefix}


def test_fields_of_the_plan_page() -> None:
    """Those of a file that has all, and no other."""
    example, moves = blocks("docs/plan.md", "json")[0], blocks("docs/plan.md", "json moves")[0]
    plan = Plan.from_bytes(example.encode())
    whole = replace(plan, machine=replace(plan.machine, cpu=Cpu(1)), aim=aim.Aim(sources=(("chat", 1.0),)))
    for heading, text in (("## Fields", whole.to_bytes()), ("## Replanning: the list of moves", moves.encode())):
        said = set()
        for row in rows(section("docs/plan.md", heading)):
            name = ""
            for given in quoted(row[0]):
                name = name.rpartition(".")[0] + given if given.startswith(".") else given
                inner = re.fullmatch(r"\{([^:]*)\}", (quoted(row[1]) or [""])[0])
                said |= {f"{name}.{key.removesuffix('[]')}" for key in inner[1].split(", ")} if inner else {name}
        named = r"(layers\[\]\.experts|inputs|objective\.sources)\..*"  # by place, input and source
        said = {name for name in said if name != "machine" and not name.endswith("[]")}
        assert said == {re.sub(named, r"\1", name) for name in leaves(json.loads(text))}


def test_examples_of_the_plan_page() -> None:
    """The plan is what is found, and the moves lead from it to what is found for the other traffic."""
    plan = Plan.from_bytes(blocks("docs/plan.md", "json")[0].encode())
    moves = moves_file.parse_moves(blocks("docs/plan.md", "json moves")[0].encode())
    traffic, other = (TrafficTable(np.array([counts]), 100, (0,), 2) for counts in ([80, 25, 75, 20], [80, 75, 25, 20]))
    check_plan(plan, traffic)
    assert f"one card of {plan.machine.gpus[0].bytes:,} B with {plan.machine.gpus[0].reserve:,} B in reserve" in words(
        "docs/plan.md"
    )
    found = solve(plan.card_sizes, traffic, plan.machine)
    assert (found.value, found.greedy, found.gap) == (plan.value, plan.greedy, plan.gap)
    assert np.array_equal(found.holds, plan.holds)
    moved = replan.replan(plan, other, curve=False)
    assert (moves.moves, moves.stay, moves.value) == (moved.moves, moved.stay, moved.plan.value)
    assert moves.old == sha256_bytes(plan.to_bytes())
    assert np.array_equal(moves_file.apply_moves(plan, moves.moves), moved.plan.holds)
