"""Is this pack whole? Every file against the manifest, every header against index and config, every expert decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibrate.deepseek_v41 import layout as v41
from ..calibrate.layout import PROJECTIONS
from ..errors import MoefitError, PackError
from ..files import sha256_file
from ..parallel import default_threads, ordered_map
from ..placement import Plan
from ..progress import Progress, Silent
from .layout import expert_layout
from .manifest import MANIFEST, read_manifest
from .plan import EXL3_SUFFIXES, PLAN
from .reader import Pack
from .recipe import Recipe


@dataclass(frozen=True)
class Findings:
    """problems: one sentence each, naming file or tensor; empty when the pack is whole. files, experts: checked."""

    problems: list[str]
    files: int
    experts: int


def verify(path: Path, quick: bool = False, threads: int = 0, progress: Progress | None = None) -> Findings:
    """Check a finished pack; everything that is wrong is listed, not only the first.

    quick: sizes and headers only, no hashing and no decoding. Raises PackError only where there is no manifest, so
    that nothing says that this is a pack at all.
    """
    path, progress, threads = Path(path), progress or Silent(), threads or default_threads()
    try:
        manifest = read_manifest(path)
    except PackError as error:
        if not (path / MANIFEST).is_file():
            raise
        return Findings([str(error)], 0, 0)  # a damaged manifest is nothing to check against
    problems = _check_files(path, manifest["files"], quick, threads, progress)
    experts = 0
    try:
        pack = Pack(path)
        recipe = Recipe(**manifest["recipe"])
        problems += _check_tensors(pack, recipe)
        if not problems:
            problems += _check_plan(pack, path)
        if not quick:
            found, experts = _decode_all(pack, threads, progress)
            problems += found
    except MoefitError as error:
        problems.append(str(error))
    except TypeError as error:  # an unknown recipe field
        problems.append(f"the recipe cannot be read [{path / MANIFEST}, recipe]: {error}.")
    return Findings(problems, len(manifest["files"]), experts)


def _check_files(
    path: Path, files: dict[str, dict[str, Any]], quick: bool, threads: int, progress: Progress
) -> list[str]:
    problems = []
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
    problems += [
        f"a file is missing [{path / name}]. Restore it, or build again." for name in sorted(files.keys() - present)
    ]
    problems += [
        f"a file stands here that the manifest does not name [{path / name}]. Move it elsewhere."
        for name in sorted(present - files.keys())
    ]
    sound = []
    for name in sorted(files.keys() & present):
        size, expected = (path / name).stat().st_size, files[name]["bytes"]
        if size != expected:
            kind = "truncated" if size < expected else "too long"
            problems.append(f"a file is {kind} [{path / name}]: expected {expected} bytes, found {size}. Restore it.")
        else:
            sound.append(name)
    if quick:
        return problems
    progress.stage("hash", sum(files[name]["bytes"] for name in sound), "B")
    for name, digest in zip(sound, ordered_map(lambda n: sha256_file(path / n), sound, threads), strict=True):
        progress.advance(files[name]["bytes"])
        if digest != files[name]["sha256"]:
            problems.append(
                f"a file's bytes have changed [{path / name}]: expected sha256 {files[name]['sha256']}, "
                f"found {digest}. Restore it."
            )
    progress.finish()
    return problems


def _check_tensors(pack: Pack, recipe: Recipe) -> list[str]:
    """Names, dtypes and shapes against config and recipe.

    Of families other than DeepSeek-V4.1 only the routed experts' are known here; their forward knows the others.
    """
    layout, config = pack.layout, pack.source.config
    parts = expert_layout(layout, recipe)
    expected: v41.Expected = {} if layout.names else v41.expected_tensors(config)
    for place in layout.places():
        prefix = layout.expert_prefix(*place)
        expected.pop(f"{prefix}.weight", None)
        expected.pop(f"{prefix}.scale", None)
        for suffix, (dtype, shape, _) in parts[place[2]].items():
            expected[f"{prefix}.{suffix}"] = (dtype, shape)
    problems = []
    for name, info in pack.checkpoint.tensors.items():
        if name not in expected:
            passes = not layout.names.owns(name) if layout.names else v41.is_vision(config, name)
            if not passes:
                problems.append(f"a stray tensor [{pack.checkpoint.where(name)}]. Rebuild that shard.")
        elif (info.dtype, info.shape) != expected[name]:
            problems.append(
                f"a tensor has the wrong dtype or shape [{pack.checkpoint.where(name)}]: expected {expected[name]}, "
                f"found {(info.dtype, info.shape)}."
            )
    problems += [
        f"a tensor is missing [{pack.path}, {name}]." for name in expected if name not in pack.checkpoint.tensors
    ]
    if not problems:
        try:
            pack.model()
        except MoefitError as error:
            problems.append(str(error))
    return problems


def _check_plan(pack: Pack, path: Path) -> list[str]:
    """plan.json is valid in itself and places exactly this pack's experts, at their exact size."""
    plan, layout = Plan.load(path / PLAN), pack.layout
    sizes = [
        [
            sum(
                pack.checkpoint.tensors[name].nbytes
                for projection in PROJECTIONS
                for suffix in EXL3_SUFFIXES
                if (name := f"{layout.expert_prefix(layer, expert, projection)}.{suffix}") in pack.checkpoint.tensors
            )
            for expert in range(layout.experts)
        ]
        for layer in layout.moe_layers
    ]
    if plan.layers != layout.moe_layers or plan.host_sizes.tolist() != sizes:
        return [f"the plan is of another pack [{path / 'plan.json'}]: layers or expert sizes differ. Plan again."]
    return []


def _decode_all(pack: Pack, threads: int, progress: Progress) -> tuple[list[str], int]:
    """Decode every expert from the stored bytes."""
    layout = pack.layout
    experts = [(layer, expert) for layer in layout.moe_layers for expert in range(layout.experts)]
    progress.stage("decode", len(experts), "experts")

    def one(which: tuple[int, int]) -> str | None:
        try:
            for weight in pack.expert(*which):
                if not weight.isfinite().all():
                    return f"an expert decodes to values that are not finite [layer {which[0]}, expert {which[1]}]."
        except MoefitError as error:
            return str(error)
        return None

    problems = []
    for problem in ordered_map(one, experts, threads):
        progress.advance(1)
        if problem:
            problems.append(problem)
    progress.finish()
    return problems, len(experts)
