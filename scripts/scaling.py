"""The recipes on 8 to 512 GPUs, on paper: bytes, seconds and efficiency of each strategy, by communication.py.

    python scripts/scaling.py                    # the tables
    python scripts/scaling.py docs/scaling.md    # writes them into the file, between its markers
    python scripts/scaling.py --json             # every number: bytes and seconds of each collective

A prediction, never run on more than two GPUs. docs/scaling.md says what is assumed and how far off it was.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from communication import HBM, MEASURED, NETWORK, NODE, NVLINK, TWO, Work, host_seconds, predict

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8, 16, 32, 64, 128, 256, 512)
BEGIN, END = "<!-- scaling tables -->\n", "<!-- end of scaling tables -->\n"
# Share of flops.CEILING that one GPU's arithmetic reaches, recomputation counted; None: the best in docs/benchmark.json.
# Qwen3-8B, full weights, checkpointing: 7,693 tokens/s on one H200 (probe without recipe code).
SHARES = {"llama-3.2-1b": "llama", "qwen3-8b-invoice": 0.60, "gpt-oss-20b": "gpt-oss-20b-lora"}
SHARES["gpt-oss-120b"] = SHARES["gpt-oss-20b"]  # never measured whole
OTHERS = {"full": 0.60, "lora": "qwen-lora"}  # of recipes that were not measured: the dense models that were


def zero3_buckets(sizes: list[int], capacity: int) -> int:
    """Buckets that DeepSpeed's stage 3 fills with gradients of these sizes, last one first; a larger one goes alone."""
    buckets, filled = 1, 0
    for size in reversed(sizes):
        if filled and filled + size > capacity:
            buckets, filled = buckets + 1, 0
        filled += size
    return buckets


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def work_of(recipe: str) -> tuple[Work, list[str], dict]:
    """Work of a recipe's config.yaml, its strategies (its own first), and {strategy: GiB of weights, gradients and
    optimizer on each of 8 GPUs}."""
    import benchmark
    import flops
    import memory
    import smoke

    config, settings = memory.of_recipe(recipe, "config", NODE, NODE)
    every = memory.parameters(config, settings)
    named = smoke.fitting(ROOT / "recipes" / recipe)
    own = re.search(r"accelerate_configs/(\w+)\.yaml", (ROOT / "recipes" / recipe / "config.yaml").read_text("utf-8"))[
        1
    ]
    experts = sum(p.size for p in every if "experts" in p.name and len(p.shape) == 3)
    named = [s for s in (own, "ddp", "zero2", "fsdp", "zero3") if s in named] + ["hsdp"] + ["ep"] * bool(experts)
    trained, passes = "lora" if settings.lora_r else "full", 2 + settings.checkpointing
    count = flops.flops_per_token(config, settings.length, trained)
    forward = 2 * sum(flops.matmul_parameters(config).values()) + flops.attention_flops(config, settings.length)
    share = SHARES.get(recipe, OTHERS[trained])
    if isinstance(share, str):
        results = json.loads((ROOT / "docs" / "benchmark.json").read_text("utf-8"))["results"]
        found = [one for one in results if one["key"]["target"] == share and "share_of_ceiling" in one]
        found = [one for one in found if not benchmark.opt_in(one["settings"])]  # what is shipped
        share = max(
            one["share_of_ceiling"] for one in found if one["settings"].get("activation_checkpointing") is False
        )
    tokens = settings.micro_batch * settings.length
    work = Work(
        layers=config.num_hidden_layers,
        parameters=sum(p.size for p in every),
        trained=sum(p.size for p in every if p.trained),
        tokens=tokens,
        compute=tokens * (count + forward * settings.checkpointing) / (share * flops.CEILING),
        micro_steps=settings.accumulation,
        gradient=4,  # fp32 masters, or PEFT's fp32 adapter
        reduces=zero3_buckets([p.size for p in every if p.trained], config.hidden_size**2),
        experts=experts,
        routed=2 * 2 * config.num_hidden_layers * config.num_experts_per_tok * config.hidden_size if experts else 0,
        passes=passes,
        expert_read=2 * experts * passes / HBM,
    )
    states = {}
    for strategy in dict.fromkeys(named):
        one = dataclasses.replace(settings, strategy="fsdp" if strategy in ("hsdp", "ep") else strategy)
        states[strategy] = sum(memory.sharded(config, one).values()) / 2**30
    return work, list(states), states


def markdown(reports: dict) -> str:
    """The tables of docs/scaling.md from {recipe: (work, strategies, states, predictions)}."""
    checks = [
        "| run | strategy | predicted | lower bound | measured | not explained, ms a step |",
        "|---|---|---|---|---|---|",
    ]
    for name, strategy, work, gpus, measured in MEASURED:
        found = predict(strategy, work, gpus)
        low, high = found["efficiency"]["low"], found["efficiency"]["high"]
        bound = predict(strategy, work, gpus, host_seconds(strategy))["efficiency"]["low"]
        rest = work.micro_steps * work.compute * (1 / measured - 1 / low) * 1000
        checks.append(f"| {name} | {strategy} | {low:.1%} to {high:.1%} | {bound:.1%} | {measured:.1%} | {rest:.0f} |")
    efficiency = [f"| recipe | strategy | states | {' | '.join(map(str, SIZES))} |", "|---|---|---" + "|---" * 7 + "|"]
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    traffic = [f"| recipe | strategy | GPUs | arithmetic, ms | {', GB, ms | '.join(kinds)}, GB, ms | tokens/s/GPU |"]
    traffic.append("|---" * 9 + "|")
    for recipe, (_, strategies, states, predictions) in reports.items():
        for strategy in strategies:
            rows = [one for one in predictions if one["strategy"] == strategy]
            cells = [f"{one['efficiency']['low']:.0%} to {one['efficiency']['high']:.0%}" for one in rows]
            cells = [cell.replace("%", "") for cell in cells]
            efficiency.append(f"| {recipe} | {strategy} | {states[strategy]:.1f} | {' | '.join(cells)} |")
            for one in (one for one in rows if one["gpus"] in (8, 64, 512)):
                parts = [one["collectives"].get(kind, {"bytes": 0, "seconds": 0}) for kind in kinds]
                cells = [
                    f"{short(p['bytes'] / 1e9)}, {short(p['seconds'] * 1000)}" if p["bytes"] else "-" for p in parts
                ]
                rate = " to ".join(f"{value:,.0f}" for value in one["tokens_per_second"].values())
                start = f"| {recipe} | {strategy} | {one['gpus']} | {one['compute_seconds'] * 1000:.0f}"
                traffic.append(f"{start} | {' | '.join(cells)} | {rate} |")
    host = ", ".join(f"{strategy} {host_seconds(strategy) * 1000:.1f}" for strategy in TWO)
    return f"""## Held against measurements

One GPU is 100 %. `predicted`: arithmetic and communication alone, from nothing
overlapped to all overlapped. `lower bound`: with the host's share.

{chr(10).join(checks)}

The host's share, ms for each layer of a micro-step: {host}. It is fitted to
the first four lines, so their lower bound is what was measured; the last line tests it. Bandwidth that a GPU receives:
{NVLINK / 1e9:.0f} GB/s within a node of {NODE}, {NETWORK / 1e9:.0f} GB/s between nodes.

## Efficiency, % of one GPU, lower to upper bound

`states`: GiB of weights, gradients and optimizer on each of 8 GPUs, without activations; `scripts/memory.py` says what
fits. The recipe's own launch file comes first.

{chr(10).join(efficiency)}

## Bytes and seconds of a step

For each GPU: GB received and milliseconds of each kind of collective; tokens/s/GPU from lower to upper bound.

{chr(10).join(traffic)}
"""


def report() -> dict:
    """{recipe: (work, strategies, states, predictions)} for every folder under recipes/ that has a config.yaml."""
    reports = {}
    for recipe in sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml")):
        work, strategies, states = work_of(recipe)
        found = [predict(s, work, gpus, host_seconds(s)) for s in strategies for gpus in SIZES]
        reports[recipe] = (work, strategies, states, found)
    return reports


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="write the tables into this file")
    parser.add_argument("--json", action="store_true", help="every number instead of the tables")
    arguments = parser.parse_args(argv)
    reports = report()
    text = markdown(reports)
    if arguments.json:
        kept = {
            r: {"work": dataclasses.asdict(w), "states_gib": s, "predictions": p} for r, (w, _, s, p) in reports.items()
        }
        text = json.dumps(kept, indent=1) + "\n"
    if not arguments.file:
        print(text, end="")
        return
    old = arguments.file.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        sys.exit(
            f"scaling.py: {arguments.file} has no lines {BEGIN.strip()} and {END.strip()}, between which the tables go. "
            "Give docs/scaling.md, or put both lines into the file."
        )
    before, after = old.split(BEGIN)[0], old.split(END)[1]
    arguments.file.write_text(before + BEGIN + text + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
