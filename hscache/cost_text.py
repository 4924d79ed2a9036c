"""The tables of `hscache plan`, from its figures."""

from __future__ import annotations

from typing import Any

from hscache.report import format_bytes, format_number, format_seconds, format_table


def format_plan(figures: dict[str, Any]) -> str:
    """Return all tables, each with what was assumed."""
    return "\n\n".join(
        [
            _run(figures),
            _disk(figures["disk"], figures["corpus"]),
            _work(figures),
            _pipelines(figures),
            _parts(figures),
            _levers(figures),
            verdict(figures),
            *(["\n".join(figures["notes"])] if figures["notes"] else []),
        ]
    )


def _run(figures: dict[str, Any]) -> str:
    run, gpu, corpus, memory = (figures[n] for n in ("run", "gpu", "corpus", "memory"))
    parts = [f"dense bf16 {gpu['bf16'] / 1e12:,.4g} TFLOP/s"]
    parts += [f"{n} {gpu[n] / 1e12:,.5g}" for n in ("fp8", "fp4") if gpu[n]]
    if gpu["power_w"]:
        parts += [f"{gpu['bandwidth'] / 1e12:.2f} TB/s", f"{gpu['power_w']:,.0f} W"]
    parts.append(format_bytes(gpu["memory_bytes"]))
    pack = sum(memory[f"target_{n}_bytes"] for n in ("weights", "pack", "ahead"))
    train = memory["trainer_peak_bytes"]
    budget = f"token_budget {memory['token_budget']:,}"
    if memory["largest_token_budget"] < memory["token_budget"]:
        budget += f" does not fit: at most {memory['largest_token_budget']:,}"
    rows = [
        ["target", f"{run['target']}: {run['blocks_run']} of {run['blocks']} blocks run, "
         f"{len(run['layers'])} layers x {run['hidden_size']:,} kept"],
        ["drafter", f"{run['drafter_weights'] / 1e9:.3g} B weights, {run['passes']} passes, "
         f"{run['anchors_per_row']} x {run['block_size']} slots per {run['row_tokens']:,} tokens"],
        ["GPUs", f"{run['gpus']} x {gpu['name']}: {', '.join(parts)}"],
        ["", f"source: {gpu['source']}"],
        ["no peak", f"{gpu['sparse_bf16'] / 1e12:,.5g} TFLOP/s: the headline, half of the weights "
         "zero (2:4)"] if gpu["sparse_bf16"] else ["no peak", "unknown"],
        ["sustained", f"{gpu['flop_per_s'] / 1e12:,.4g} TFLOP/s ({gpu['how']})"],
        ["GPU memory", f"produce about {format_bytes(pack)} ({budget}), fit about "
         f"{format_bytes(train)}"],
        ["corpus", f"{corpus['tokens']:,} tokens, {corpus['documents']:,} documents, mean "
         f"{corpus['mean']:,.0f}, longest {corpus['longest']:,}"],
        ["lengths", corpus["lengths"]],
    ]  # fmt: skip
    return format_table(["plan", ""], rows)


def _disk(disk: dict[str, Any], corpus: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for codec, found in disk["codecs"].items():
        mark = " (this run)" if codec == disk["codec"] else ""
        fits = "yes" if found["total_bytes"] <= disk["free_bytes"] else "no"
        ratio = f"{found['ratio']:.3g}" + (" measured" if found["measured"] else "")
        rows.append(
            [f"{codec}{mark}", ratio, f"{found['token_bytes']:,.0f}",
             format_bytes(found["total_bytes"]), fits]
        )  # fmt: skip
    table = format_table(["codec", "ratio", "bytes/token", "cache", "fits"], rows)
    window = disk["window"]
    inodes = f"{disk['inodes']:,} inodes"
    if disk["free_inodes"] is not None:
        inodes += f" of {disk['free_inodes']:,} free"
    always = disk["fixed_bytes"] + corpus["held_out_shards"] * disk["worst_shard_bytes"]
    held = f"{corpus['held_out_shards']:,} of them held out"
    lines = [
        ["free", f"{format_bytes(disk['free_bytes'])}; plan and frozen parts take "
         f"{format_bytes(disk['fixed_bytes'])} of each cache"],
        ["shards", f"{corpus['shards']:,}, {held}; {inodes}"],
        ["window", f"fits {_window(window)}, s = {window['stride']:,} shards between two visits"
         if window["fits"] else f"does not fit: {_window(window)}"],
        ["least window", f"{window['least_shards']} shards + {disk['reserve_shards']} in flight of "
         f"at most {format_bytes(disk['worst_shard_bytes'])} + {format_bytes(always)} that stay = "
         f"{format_bytes(window['least_bytes'])}"],
    ]  # fmt: skip
    return table + "\n\n" + format_table(["disk", ""], lines)


def _window(window: dict[str, Any]) -> str:
    return f"{window['shards']:,} shards, {window['passes']} passes"


def _work(figures: dict[str, Any]) -> str:
    run, flops = figures["run"], figures["flops"]
    target = flops["target_token"]
    rows: list[list[Any]] = [
        ["target, forward", f"{_giga(target['total'])}", f"{_giga(target['products'])}",
         f"{_giga(target['attention'])}", f"scan {_giga(target['scan'])}"]
    ]  # fmt: skip
    for anchors, found in flops["drafter_token"].items():
        products = found["blocks"] + found["context"]
        rows.append(
            [f"drafter, a pass, {anchors} anchors", f"{_giga(found['total'])}",
             f"{products / 1e9:.1f}", f"{_giga(found['attention'])}",
             f"head {_giga(found['head'])}"]
        )  # fmt: skip
    work = format_table(["GFLOP a token", "total", "blocks", "attention", "and"], rows)
    limits: list[list[Any]] = []
    for limit in figures["limits"]:
        for name, title in (("online", "target in every pass"), ("cached", "target once")):
            limits.append(
                [f"{title}, {limit['anchors_per_row']} anchors",
                 _days(limit[f"{name}_dense_days"]), _days(limit[f"{name}_sustained_days"])]
            )  # fmt: skip
    headers = [f"no way to be faster on {run['gpus']} GPUs", "dense peak, 100 %", "sustained"]
    return work + "\n\n" + format_table(headers, limits)


def _pipelines(figures: dict[str, Any]) -> str:
    rates, rows = figures["rates"], list[list[Any]]()
    possible = [p for p in figures["pipelines"] if not _obstacle(p, figures)]
    best = min(possible, key=lambda p: p["seconds"], default=None)
    for p in figures["pipelines"]:
        turns = p["target_gpus"] == p["trainer_gpus"] == figures["run"]["gpus"]
        split = "all, in turns" if turns else f"{p['target_gpus']} + {p['trainer_gpus']}"
        mark = " <" if p is best else ""
        why = _obstacle(p, figures) or p["bottleneck"]
        rows.append([f"{p['name']}{mark}", p["anchors_per_row"], split, _days(p["days"]), why])
    headers = ["pipeline", "anchors", "GPUs: target + trainer", "days", "limit"]
    lines = ["< the fastest that is possible here"] if best else []
    lines += [
        f"{side}: {found['flop_per_s'] / 1e12:,.0f} TFLOP/s a GPU, {found['share']:.0%} of "
        f"sustained ({found['how']})"
        for side, found in (("target", rates["target"]), ("trainer", rates["trainer"]))
    ]
    if rates["disk_read"]:
        lines.append(
            f"disk: {_giga(rates['disk_write'])} GB/s written, {_giga(rates['disk_read'])} "
            "read, decoded (measured)"
        )
    else:
        lines.append("disk: taken for fast enough (nothing measured)")
    return format_table(headers, rows) + "\n" + "\n".join(lines)


def _parts(figures: dict[str, Any]) -> str:
    """Say what the days of each pipeline consist of, with the anchors that were asked for."""
    anchors = figures["run"]["anchors_per_row"]
    names = ("start", "steps", "looks", "checkpoints")
    rows = [
        [p["name"], *(format_seconds(p[f"{name}_s"]) for name in names)]
        for p in figures["pipelines"]
        if p["anchors_per_row"] == anchors
    ]
    table = format_table([f"parts, {anchors} anchors", *names], rows)
    unknown = figures["pauses"]["unknown"]
    return f"{table}\nnot measured, so not counted: {', '.join(unknown)}" if unknown else table


def verdict(figures: dict[str, Any]) -> str:
    """Say in words which pipeline to take, with the anchors that were asked for and with fewer."""
    lines = []
    possible = [p for p in figures["pipelines"] if not _obstacle(p, figures)]
    for anchors in figures["flops"]["drafter_token"]:
        choices = [p for p in possible if p["anchors_per_row"] == int(anchors)]
        if not choices:
            continue
        best = min(choices, key=lambda p: p["seconds"])
        split = f"{best['target_gpus']} of {figures['run']['gpus']} GPUs for the target"
        if best["target_gpus"] == best["trainer_gpus"] == figures["run"]["gpus"]:
            split = "all GPUs by turns"
        lines.append(
            f"best with {anchors} anchors: {best['name']}, {split}: {_days(best['days'])} days; "
            f"limit: {best['bottleneck']}"
        )
    tokens, slots = figures["run"]["filled_tokens"], figures["run"]["filled_anchors"]
    full = "full of tokens and anchors (real documents fill 92 to 96 %)"
    if min(tokens, slots) < 1:
        full = f"as full as the bench's: {tokens:.0%} of their tokens, {slots:.0%} of their anchors"
    lines.append(f"assumed: rows {full}, no time for meetings of ranks")
    return "\n".join(lines)


def _obstacle(pipeline: dict[str, Any], figures: dict[str, Any]) -> str | None:
    disk, one_gpu = figures["disk"], figures["run"]["gpus"] == 1
    fits = {"cached": disk["fits"], "window": disk["window"]["fits"]}
    if not fits.get(pipeline["name"], True):
        return "not possible: the disk is too small"
    if one_gpu and pipeline["name"] != "cached" and not figures["memory"]["both_fit_one_gpu"]:
        return "not possible: one GPU does not hold both models"
    return None


def _levers(figures: dict[str, Any]) -> str:
    rows = [
        [lever["name"], _days(lever["days"]), _days(lever["saved_days"]) if index else None,
         f"{lever['factor']:.2f}x" if index else None, f"{lever['compound']:.1f}x"]
        for index, lever in enumerate(figures["levers"])
    ]  # fmt: skip
    headers = ["one lever after the other", "days", "saves", "factor", "all so far"]
    return format_table(headers, rows)


def _giga(flop: float) -> str:
    return format_number(flop / 1e9)


def _days(days: float) -> str:
    return f"{days:.2f}" if 0.1 <= days < 99.995 else format_number(days)
