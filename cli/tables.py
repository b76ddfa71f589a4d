"""Plain-text tables of what the commands found: every number with its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..placement import Recorded, TrafficTable
from ..placement.captures import CaptureFile
from ..placement.drift import Drift
from ..placement.report import quantity
from ..placement.skew import hit_curve, layer_skew, source_skew, window_shares

LISTED = 10
"""Files of captures named one by one."""


def human(count: float) -> str:
    """Bytes in decimal units, as cards and disks are sold: 13315596 -> "13.32 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def traces_text(made: Mapping[str, Any]) -> str:
    """What an import found, kept and left out."""
    lines = [
        f"{f['name']}: {f['format']} ({f['why']}), {f['records']:,} records, {f['bad']} bad" for f in made["files"]
    ]
    lines += [f"skipped, in no known format: {name}" for name in made["skipped"]]
    lines += [f"bad: {bad['where']}: {bad['why']}" for bad in made["bad_records"]]
    if made["bad"] > len(made["bad_records"]):
        lines.append(f"bad: {made['bad'] - len(made['bad_records']):,} more")
    redacted = made["redacted"]
    lines += [
        "",
        f"traffic       {made['documents']:,} documents, {made['tokens']:,} tokens of {made['records']:,} records",
        f"repeated      {made['repeated']:,} records that others hold whole, {made['shared_tokens']:,} tokens of "
        "histories in common",
        f"redacted      {redacted['keys']:,} keys, {redacted['emails']:,} e-mail addresses, {redacted['homes']:,} home "
        "directories"
        if made["redact"]
        else "redacted      nothing, as told",
    ]
    for part, counts in made["parts"].items():
        lines.append(
            f"{part:13} {counts['conversations']:,} conversations, {counts['documents']:,} documents, "
            f"{counts['tokens']:,} tokens"
        )
    for title in ("source", "role", "language"):
        counts = made[f"tokens_by_{title}"]
        lines += ["", f"{title:40} {'tokens':>12}   share"]
        lines += [f"{name:40} {count:>12,} {count / made['tokens']:>7.1%}" for name, count in counts.items()]
    return "\n".join([*lines, "", f"written to {made['out']}" if made["out"] else "nothing written"])


def traffic_summary(
    table: TrafficTable,
    files: Sequence[CaptureFile],
    out: Path | None,
    recorded: Recorded | None = None,
    drift: Drift | None = None,
) -> dict[str, Any]:
    """What an import of captures found: as JSON, and for `traffic_text`. recorded: what is kept of the routing."""
    return {
        "files": [asdict(file) | {"path": str(file.path)} for file in files],
        "tokens": table.tokens,
        "phase_tokens": table.phase_tokens,
        "sources": [asdict(source) for source in source_skew(table)],
        "layers": len(table.layers),
        "experts": table.counts.shape[1],
        "top_k": table.top_k,
        "hit_curve": [[share, served] for share, served in hit_curve(table).items()],
        "skew": [asdict(layer) for layer in layer_skew(table)],
        "windows": [asdict(window) for window in window_shares(table)],
        "recorded": {"tokens": recorded.tokens, "conversations": recorded.conversations} if recorded else None,
        "drift": drift.to_json() if drift else None,
        "out": str(out) if out else None,
    }


def traffic_text(made: Mapping[str, Any]) -> str:
    """Files with their formats, tokens, and how uneven each layer is."""
    lines = []
    for file in made["files"][:LISTED]:
        phases = ", ".join(f"{phase} {tokens:,}" for phase, tokens in file["phase_tokens"].items())
        left = "".join(f", left out: {number:,} {what}" for what, number in file["left"].items())
        told = f" ({phases})" if phases else ""
        lines.append(f"{file['path']}: {file['format']} ({file['why']}), {file['tokens']:,} tokens{told}{left}")
    if len(made["files"]) > LISTED:
        lines.append(f"and {len(made['files']) - LISTED:,} more files (--json has all)")
    known = made["phase_tokens"]
    unknown = {"unknown": made["tokens"] - sum(known.values())}
    curve = ", ".join(f"{share:.0%} {served:.1%}" for share, served in made["hit_curve"])
    unused = sum(layer["unused"] for layer in made["skew"])
    lines += [
        "",
        f"traffic       {made['tokens']:,} tokens, {made['layers']} layers x {made['experts']} experts, "
        f"top-{made['top_k']}",
        "phases        " + ", ".join(f"{phase} {tokens:,}" for phase, tokens in (known | unknown).items() if tokens),
        f"hit curve     busiest experts serve of all activations: {curve}",
        f"unused        {unused:,} of {made['layers'] * made['experts']:,} experts",
        *_window_lines(made),
        *_drift_lines(made["drift"]),
        *_source_lines(made),
        "",
        "layer  busiest/mean  busiest 10 %  half in  unused  entropy, bits",
    ]
    lines += [
        f"{layer['layer']:>5}  {layer['busiest']:>12.2f}  {layer['tenth']:>12.1%}  {layer['half']:>7}  "
        f"{layer['unused']:>6}  {layer['entropy']:>13.2f}"
        for layer in made["skew"]
    ]
    return "\n".join([*lines, *(["", f"written to {made['out']}"] if made["out"] else [])])


def _window_lines(made: Mapping[str, Any]) -> list[str]:
    """Windows of steps, and the routing that is kept."""
    lines = []
    if made["windows"]:
        shares = ", ".join(f"{window['size']}: {window['distinct']:.1%}" for window in made["windows"])
        last = made["windows"][-1]
        lines += [
            f"windows       distinct experts per activation in steps of so many tokens: {shares}",
            f"              ({last['steps']:,} windows of {last['size']}; independent tokens would ask for "
            f"{last['independent']:.1%})",
        ]
    if kept := made["recorded"]:
        lines.append(
            f"recorded      {kept['tokens']:,} tokens of {kept['conversations']:,} conversations, kept for plans"
        )
    return lines


def _drift_lines(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    effects = " and ".join(f"{effect:.1f}" for effect in found["design_effects"])
    counted = f"{effects} tokens count for one independent token, by halves of the conversations"
    return [
        "",
        f"drift         of {found['compared']} tokens, {found['tokens'][0]:,} here and {found['tokens'][1]:,} there; "
        "in brackets what sampling alone gives",
        f"              total variation mean {found['variation']:.2%} [{found['variation_floor']:.2%}], worst "
        f"{found['variation_worst']:.2%} in layer {found['variation_worst_layer']}",
        f"              Jensen-Shannon mean {found['divergence']:.5f} bits [{found['divergence_floor']:.5f}], worst "
        f"{found['divergence_worst']:.5f} in layer {found['divergence_worst_layer']}",
        f"              busiest third of the experts: {found['hot_set_changed']:.1%} are others "
        f"[{found['hot_set_changed_floor']:.1%}]",
        *([f"              {counted}"] if found["by_conversation"] else []),
        f"              {found['verdict']}",
    ]


def _source_lines(made: Mapping[str, Any]) -> list[str]:
    """Sources of a table that tells them apart, and what came from others."""
    if not made["sources"]:
        return []
    lines = ["", f"{'source':40} {'tokens':>12}   share  busiest 10 %  unused experts"]
    lines += [
        f"{source['source']:40} {source['tokens']:>12,} {source['tokens'] / made['tokens']:>7.1%}  "
        f"{source['tenth']:>12.1%}  {source['unused']:>14,}"
        for source in made["sources"]
    ]
    if rest := made["tokens"] - sum(source["tokens"] for source in made["sources"]):
        lines.append(f"{'(others)':40} {rest:>12,} {rest / made['tokens']:>7.1%}")
    return lines


def fidelity_lines(fidelity: Mapping[str, Any] | None) -> list[str]:
    if not fidelity:
        return ["fidelity      not measured (no --eval)"]
    lines = [
        f"fidelity      {'corpus':10} {'KL, nats/token':>28} {'top-1':>24} {'docs':>5}  limit {fidelity['max_kl']}"
    ]
    for name, corpus in fidelity["corpora"].items():
        lines.append(
            f"              {name:10} {_interval(corpus['kl'], corpus['kl_interval'], 4):>28} "
            f"{_interval(corpus['top1'], corpus['top1_interval'], 3):>24} {corpus['documents']:>5}  {corpus['outcome']}"
        )
    return [*lines, f"gate          {fidelity['outcome']}"]


def _interval(value: float, ends: list[float | None], digits: int) -> str:
    if None in ends:
        return f"{value:.{digits}f} (no interval)"
    return f"{value:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def percent(gap: float) -> str:
    """A gap for people: 5.72e-05 -> "0.0057 %"; what is rounding in the end is 0."""
    if gap < 1e-12:
        return "0 %"
    if gap < 1e-6:
        return "under 0.0001 %"
    return f"{100 * gap:.2g} %" if gap < 0.1 else f"{100 * gap:.1f} %"


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Where the experts are, what that costs, and how far it is from the best possible."""
    shares = ", ".join(
        f"{place} {count} ({plan['activation_share'][place]:.1%} of activations)"
        for place, count in plan["experts"].items()
    )
    unit = plan["unit"]
    greedy = "not within these limits" if plan["greedy"] is None else quantity(plan["greedy"], unit)
    return [
        f"plan          experts on {shares}",
        f"              {plan['objective']}: {quantity(plan['value'], unit)}, proven bound "
        f"{quantity(plan['bound'], unit)} (gap {percent(plan['gap'])}), frequency-greedy {greedy}",
    ]


def unseen_lines(row: Mapping[str, Any] | None) -> list[str]:
    """A build's plan on conversations that it has not seen."""
    if not row or "why" in row:
        return []
    hits, seconds = ([row[key][end] for end in ("value", "low", "high")] for key in ("hit_rate", "seconds"))
    rate = f"cards serve {hits[0]:.1%}" + (f" [{hits[1]:.1%}, {hits[2]:.1%}]" if hits[1] is not None else "")
    time = quantity(seconds[0], "seconds per step")
    return [
        f"              unseen traffic ({row['conversations']} conversations): {rate} of activations, {time} replayed"
    ]


def rung_lines(rungs: Mapping[str, Any]) -> list[str]:
    """The coverage ladder: experts on each rung, and what it gave them."""
    natural, adjacent, prior, identity = (rungs[name] for name in ("natural", "adjacent", "prior", "identity"))
    return [
        f"rungs         natural {natural['experts']} experts ({natural['tokens']:,} tokens), "
        f"adjacent {adjacent['experts']} ({adjacent['tokens']:,} tokens), prior alone {prior['experts']} "
        f"(mean weight {prior['weight']:.2f}), identity {identity['experts']}"
    ]


def coverage_text(found: Mapping[str, Any], pack: Path, finished: bool) -> str:
    """Tokens per expert, of all layers, each layer, phase and source, and the rung that the last of them needed."""
    whole, experts, layers = found["overall"], found["experts"], len(found["layers"])
    rungs = list(whole["rungs"])
    lines = [
        f"{pack}: {layers} layers x {experts} experts, {found['tokens']:,} tokens, top-{found['top_k']}"
        + ("" if finished else "; layers that are done so far"),
        f"below the floor of {found['floor']:,} tokens: {whole['below_floor']:,} of {layers * experts:,} experts, "
        f"{whole['unreached']:,} unreached",
        "last rung needed: " + ", ".join(f"{name} {whole['rungs'][name]:,}" for name in rungs),
        "",
        f"{'tokens per expert':>24}" + "".join(f"{name:>9}" for name in _SPREAD) + f"{'unreached':>11}{'< floor':>9}"
        + "".join(f"{name:>10}" for name in rungs),
    ]  # fmt: skip
    rows = [("all", whole), *((f"layer {layer['layer']}", layer) for layer in found["layers"])]
    for name, row in rows:
        below = f"{row['below_floor']:>9,}" + "".join(f"{row['rungs'][rung]:>10,}" for rung in rungs)
        lines.append(_spread(name, row) + below)
    for kind in ("phases", "sources"):
        lines += [""] if found[kind] else []
        lines += [_spread(f"{row['name']:.24}", row) + f"  {row['tokens']:,} tokens" for row in found[kind]]
    return "\n".join(lines)


_SPREAD = ("min", "p1", "p5", "p50", "p95", "max")


def _spread(name: str, row: Mapping[str, Any]) -> str:
    return f"{name:>24}" + "".join(f"{row[key]:>9,}" for key in _SPREAD) + f"{row['unreached']:>11,}"


def build_text(manifest: Mapping[str, Any], seconds: Mapping[str, float], out: Path, already: bool = False) -> str:
    """The one-screen summary. already: the pack was there and this run has touched nothing."""
    sizes, calibration, coverage = (
        manifest["sizes"],
        manifest["calibration"],
        manifest["calibration"]["coverage"],
    )
    recipe, error, rungs = manifest["recipe"], calibration["proxy_error"], calibration.get("rungs")
    lines = [
        f"pack          {out}  ({human(sizes['tensor_bytes'])} of tensors)",
        f"experts       {sizes['routed_experts']} x {sizes['expert_bytes']:,} B, EXL3 {recipe['codebook']} "
        f"K={recipe['bits']:g}, {sizes['bits_per_weight']:.3f} bits/weight with scales",
        f"traffic       {calibration['documents']} documents, {calibration['windows']} windows, "
        f"{calibration['tokens']:,} tokens",
        f"coverage      tokens per expert: min {coverage['min']}, 5 % {coverage['p5']}, median {coverage['p50']}, "
        f"max {coverage['max']}",
        f"              {coverage['unreached']} unreached, {coverage['mostly_prior']} mostly prior, "
        f"{coverage['identity']} without Hessian, {coverage['damped']} damped further",
        *(rung_lines(rungs) if rungs else []),
        f"proxy error   gate {error['gate']:.5f}, up {error['up']:.5f}, down {error['down']:.5f} (means)",
        *(plan_lines(manifest["plan"]) if manifest.get("plan") else []),
        *(unseen_lines(manifest["plan"].get("unseen")) if manifest.get("plan") else []),
        *fidelity_lines(manifest.get("fidelity")),
    ]
    if already:
        lines.append("already built; nothing was touched")
    if seconds:
        spent = ", ".join(f"{stage} {s:.1f} s" for stage, s in seconds.items())
        lines.append(f"time          {sum(seconds.values()):.1f} s: {spent}")
    return "\n".join(lines)


def needs_text(summary: Mapping[str, Any]) -> str:
    card = f"card          {human(summary['card'])} needed, {human(summary['card_free'])} free"
    return "\n".join(
        [
            f"would write   {human(summary['tensor_bytes'])} of tensors to {summary['out']}",
            f"traffic       {summary['documents']} documents, {summary['windows']} windows, "
            f"{summary['tokens']:,} tokens",
            f"disk          {human(summary['disk'])} needed, {human(summary['disk_free'])} free",
            f"memory        {human(summary['memory'])} needed, {human(summary['memory_free'])} available",
            *([card] if summary["card"] else []),
            f"state         {summary['state']}",
        ]
    )


def inspection_text(found: Mapping[str, Any]) -> str:
    """Census, pack size and fit."""
    dense = found["layers"] - found["moe_layers"]
    layers = f"{found['layers']} layers ({dense} dense)" if dense else f"{found['layers']} layers"
    lines = [
        f"{found['model']}: {found['architecture']}, {layers} x {found['experts']} experts "
        f"(top-{found['experts_per_token']}), {found['tensors']} tensors in {found['shards']} shards",
        "",
        f"{'part':22} {'bytes':>20}  by dtype",
    ]
    for part, dtypes in found["census"].items():
        detail = ", ".join(f"{dtype} {human(count)}" for dtype, count in sorted(dtypes.items()))
        lines.append(f"{part:22} {sum(dtypes.values()):>20,}  {detail}")
    lines.append(f"{'total':22} {found['source_bytes']:>20,}")
    pack = found["pack"]
    lines += [
        "",
        f"K={pack['bits']:g} {pack['codebook']} pack: {pack['expert_bytes']:,} B per expert, "
        f"{pack['routed_bytes']:,} B for {pack['routed_experts']:,} experts, "
        f"{pack['tensor_bytes']:,} B of tensors in all",
    ]
    if found["fit"]:
        lines.append("")
        for place in found["fit"]["places"]:
            lines.append(
                f"{place['name']:6} budget {place['budget']:>18,} B, fixed {place['fixed']:>18,} B, "
                f"room for {place['experts']:,} experts"
            )
        lines.append(found["fit"]["verdict"])
    if found["values"]:
        lines.append(f"values: {found['values']['tensors']} tensors read, all finite")
    return "\n".join(lines)
