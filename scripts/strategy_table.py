"""The table of strategies, from docs/strategy_matrix.json, which `scripts/test.sh --matrix` measures.

result_tables.py writes it into a page.
"""

import importlib.metadata
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path

import psutil
from launching import STRATEGIES

FILE = Path(__file__).resolve().parent.parent / "docs" / "strategy_matrix.json"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "datasets", "bitsandbytes")
KEY = ("recipe", "config", "strategy", "precision")


def surroundings() -> dict:
    """Versions and hardware that a measurement depends on."""
    memory = round(psutil.virtual_memory().total / 2**30)
    return {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory} GiB of memory, no GPU",
    }


def write(cells: list, file: Path = FILE) -> None:
    """Put measured cells (smoke.Cell) into the table's file; cells of other versions or hardware leave it."""
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    here = surroundings()
    kept = told.get("cells", []) if {key: told.get(key) for key in here} == here else []
    by_key = {tuple(cell[name] for name in KEY): cell for cell in kept}
    for cell in map(asdict, cells):
        cell["error"] = cell["error"] and cell["error"].partition("; log: ")[0]  # logs are gone when it is read
        by_key[tuple(cell[name] for name in KEY)] = cell
    told = {"date": time.strftime("%Y-%m-%d"), **here, "cells": [by_key[key] for key in sorted(by_key)]}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def markdown(told: dict) -> str:
    """The table, and a line that says on what and when it was measured."""
    cells = {tuple(cell[name] for name in KEY): cell for cell in told["cells"]}
    lines = [f"| recipe | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    for recipe, config in sorted({key[:2] for key in cells}, key=lambda key: (key[0], key[1] != "config", key[1])):
        row = [recipe if config == "config" else f"{recipe} `--config {config}`"]
        for strategy in STRATEGIES:
            pair = [cells.get((recipe, config, strategy, precision)) for precision in ("fp32", "shipped")]
            row.append(" / ".join(_entry(cell) for cell in pair) if any(pair) else "")
        lines.append(f"| {' | '.join(row)} |")
    failed = sum(cell["error"] is not None for cell in told["cells"])
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    note = (
        "Largest relative difference of a step's loss to one process with the same global batch, in fp32 / in the "
        f"recipe's own precision. {len(told['cells'])} cells, {failed} failed; in each the run was killed, continued, "
        f"and reloaded from final/ in a fresh process. Tiny models, {told['hardware']}; {told['date']}; {versions}."
    )
    return "\n".join([*lines, "", note])


def _entry(cell: dict | None) -> str:
    if cell is None:
        return "-"
    return "failed" if cell["error"] else f"{cell['loss_deviation']:.0e}"
