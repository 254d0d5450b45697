"""What fits where: each recipe on 1, 2, 4 and 8 GPUs of common sizes, for docs/memory.md; from memory.py.

    python scripts/memory_chooser.py              # writes docs/memory_chooser.json; then scripts/result_tables.py
    python scripts/memory_chooser.py olmo-3-7b    # works out one recipe anew; a minute or two each

A cell is the first strategy that fits, in the order of memory.STRATEGIES, and the largest micro batch under it. The
recipe's config.yaml is tried first, as shipped and then with one row a GPU; where it fits under no strategy, the recipe's
other configurations.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import memory
import smoke
from bars import track

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "memory_chooser.json"
# GB as sold -> MiB as nvidia-smi prints them: L4, A100 40 GB, L40S, H100, H200.
GPUS = {24: 23034, 40: 40960, 48: 46068, 80: 81559, 141: 143771}
WORLDS = (1, 2, 4, 8)
HOST_PER_GPU = 128 * 2**30  # bytes of host memory for each GPU
# Share of a GPU that a sharded run must leave free: on two GPUs the five such predictions held against measured runs were
# 4 to 24 % below what the allocator had reserved (memory.py's docstring), for buffers and fragments that are not traced.
SHARDED_MARGIN = 0.10
CONFIGS = ("config", "lora", "qlora")  # in this order, where the recipe has them


def cell(recipe: str, world: int, gpu_bytes: int) -> dict | None:
    """The first configuration and strategy that fits, with its largest micro batch; None where nothing does."""
    folder = ROOT / "recipes" / recipe
    tried = ("single", "zero3_offload") if world == 1 else [name for name in memory.STRATEGIES if name != "single"]
    for name in CONFIGS:
        if not (folder / f"{name}.yaml").is_file():
            continue
        config, settings = memory.of_recipe(recipe, name, world, world)
        fits = smoke.fitting(folder, name)
        for strategy in (strategy for strategy in tried if strategy in fits):
            one = dataclasses.replace(settings, strategy=strategy)
            usable = gpu_bytes if strategy in ("single", "ddp") else gpu_bytes * (1 - SHARDED_MARGIN)
            largest = memory.largest_batch(config, one, usable, HOST_PER_GPU * world)
            if largest:
                return {"config": name, "strategy": strategy, "micro_batch": largest}
    return None


def choose(recipe: str) -> list[dict]:
    """All cells of a recipe: {"world", "gpu_gb", "config", "strategy", "micro_batch"}."""
    cells = []
    for world in WORLDS:
        for gb, mib in GPUS.items():
            cells.append({"world": world, "gpu_gb": gb} | (cell(recipe, world, mib * 2**20) or {"config": None}))
    return cells


def chooser_table(report: dict) -> str:
    """The table: recipes by GPUs down, memory of a GPU across."""
    lines = [f"| recipe | GPUs | {' | '.join(f'{gb} GB' for gb in GPUS)} |", f"|---|---|{'---|' * len(GPUS)}"]
    for recipe, cells in report["recipes"].items():
        for world in WORLDS:
            words = []
            for found in (one for one in cells if one["world"] == world):
                if found["config"] is None:
                    words.append("-")
                    continue
                name = "" if found["config"] == "config" else f"`{found['config']}` "
                words.append(f"{name}{found['strategy']}, {found['micro_batch']}")
            lines.append(f"| {recipe} | {world} | {' | '.join(words)} |")
    note = (
        "The first strategy that fits, in the order "
        + ", ".join(memory.STRATEGIES)
        + ", and the largest micro batch of rows of `max_length` under it; in front, the configuration where it is not "
        f"config.yaml. Predicted, with bf16 weight files and {HOST_PER_GPU // 2**30} GiB of host memory a GPU. Sharded "
        "predictions (all but single and ddp) are checked to the byte for weights, gradients and optimizer on CPU; whole "
        "steps ran 4 to 24 % below the memory reserved on 2 GPUs, 2.6 to 5.5 GiB. So they leave "
        f"{SHARDED_MARGIN:.0%} of the GPU free; below 80 GB that is less than some of these misses: start there "
        "with a smaller micro batch."
    )
    return "\n".join([*lines, "", note])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[[], *memory.recipes()], metavar="RECIPE", help="default: all")
    wanted = parser.parse_args().recipes or memory.recipes()
    known = json.loads(FILE.read_text(encoding="utf-8"))["recipes"] if FILE.is_file() else {}
    for recipe in track(wanted, "recipes"):
        known[recipe] = choose(recipe)
        report = {"recipes": {recipe: known[recipe] for recipe in memory.recipes() if recipe in known}}
        FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(recipe, "done", flush=True)
    print(chooser_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
