"""Exports each recipe's tiny model from a checkpoint of each strategy, and compares it with the run's own result.

    python scripts/export_matrix.py WORK                          # all of them, about half an hour on two cores
    python scripts/export_matrix.py WORK --recipe llama-3.2-1b --strategy fsdp

A run of three steps, two processes, through the shipped launch line; then `export.py run/checkpoint-3` with its proof in
a fresh process (export_proof.py). final/ is the model that the trainer saved after the same step, so each exported
tensor must equal final/'s: to the last bit where training kept its weights in fp32. Adapters are exported as they are and
merged; merged ones must give the logits of base and adapter. Writes docs/export.json, a line a cell; a cell that is
there already, with the same versions, is not run again.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import launching
import smoke
import strategy_table
import torch
from export_files import ExportError, read_headers, read_tensor
from export_run import export_run

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "export.json"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model or adapter folder, in fp32."""
    return {name: read_tensor(stored, name).float() for name, stored in read_headers(folder).items()}


def difference(one: Path, other: Path) -> float:
    """Largest difference of a weight between two folders. Raises ExportError where their tensors are not the same."""
    a, b = tensors(one), tensors(other)
    if a.keys() != b.keys():
        raise ExportError(f"{one} and {other} differ in the tensors {sorted(a.keys() ^ b.keys())[:5]}")
    return max((a[name] - b[name]).abs().max().item() for name in a)


def cell(bench: smoke.Bench, strategy: str, work: Path) -> dict:
    """Train, export, compare. {"stored", "difference", "proof", "merged", "seconds", "error"}."""
    processes = 1 if strategy == "single" else 2
    run, log = work / strategy, work / f"{strategy}.log"
    found = {"difference": None, "proof": None, "merged": None, "error": None}
    started = time.monotonic()
    try:
        result = bench.launch(strategy, run, processes, log)
        if result.rc:
            raise ExportError(f"training fails: {smoke.reason(result.output)}")
        checkpoint, final = run / f"checkpoint-{smoke.STEPS}", run / "final"
        found["proof"] = export_run(checkpoint, work / f"{strategy}-exported")["proof"]
        found["difference"] = difference(work / f"{strategy}-exported", final)
        if (final / "adapter_config.json").is_file():
            found["merged"] = export_run(checkpoint, work / f"{strategy}-merged", merge=True)["proof"]
    except (ExportError, launching.LaunchError) as error:
        found["error"] = str(error)
    found["seconds"] = round(time.monotonic() - started, 1)
    for folder in work.glob(f"{strategy}*"):
        if folder.is_dir():
            shutil.rmtree(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--recipe", action="append", help="default: all")
    parser.add_argument("--strategy", action="append", choices=launching.STRATEGIES, help="default: all that it fits")
    arguments = parser.parse_args()
    smoke.STEPS = smoke.SAVE_EVERY = 3
    here = strategy_table.surroundings()
    told = json.loads(FILE.read_text()) if FILE.is_file() else {}
    cells = told.get("cells", {}) if {key: told.get(key) for key in here} == here else {}
    for recipe in sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py")):
        if arguments.recipe and recipe.name not in arguments.recipe:
            continue
        for config in sorted(recipe.glob("*.yaml")):
            bench = None
            fitting = smoke.fitting(recipe)
            if config.stem != "config":  # a variant once, under ddp where it fits
                fitting = ("ddp" if "ddp" in fitting else launching.own_strategy(recipe, config.stem),)
            for strategy in arguments.strategy or fitting:
                name = f"{recipe.name} {config.stem} {strategy}"
                if strategy not in fitting or name in cells:
                    continue
                work = arguments.work / f"{recipe.name}-{config.stem}"
                if bench is None:
                    shutil.rmtree(work, ignore_errors=True)
                    bench = smoke.Bench(recipe, work, config.stem, "fp32")
                cells[name] = cell(bench, strategy, work)
                told |= {"date": time.strftime("%Y-%m-%d"), **here, "cells": cells}
                FILE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
                print(f"{'FAIL' if cells[name]['error'] else 'OK  '} {name}: {cells[name]}", flush=True)
    return int(any(found["error"] for found in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
