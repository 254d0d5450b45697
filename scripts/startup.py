"""Seconds from the launch line to the first training step, and what they go to; tiny models on the CPU.

    python scripts/startup.py                             # every recipe; writes docs/startup.json, prints its table
    python scripts/startup.py llama-3.2-1b --repeat 5     # one recipe; the file keeps the others' lines

Each launch is fresh, of one process under single.yaml, and of one process under zero2.yaml where the recipe fits it.
The parts: launcher (`accelerate launch`, up to the start of train.py's process), import (up to the guard's first look
at the launch line), open (arguments, model config, memory, the run folder), load (`from_pretrained`), rows (reading,
checking, tokenizing, the trainer), wrap (what accelerate or DeepSpeed puts around the model) and the first step. They
come from the run's own run.json; this program adds the launcher and the load. Medians; the launches of all recipes take
turns, so that a busy minute of the machine meets all alike.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bars import track

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "startup.json"
PARTS = ("launcher", "import", "open", "load", "rows", "wrap", "first step")
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "datasets", "bitsandbytes")


def time_the_load(script: str) -> None:
    """Run train.py as it is, with the seconds of `from_pretrained` written to the file named by STARTUP_LOAD."""
    import transformers

    original = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        begin = time.monotonic()
        model = original(cls, *args, **kwargs)
        Path(os.environ["STARTUP_LOAD"]).write_text(str(time.monotonic() - begin))
        return model

    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def measure(bench, strategy: str, work: Path) -> dict[str, float]:
    """The parts of one launch, in seconds. Raises LaunchError where it fails."""
    import launching

    run, load = work / "run", work / "load"
    words = [*bench.arguments(run, 1), "--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]
    variables = {"HF_HOME": str(bench.work / "cache"), "STARTUP_LOAD": str(load)}
    options = {"log": work / "log", "processes": 1, "wrapper": Path(__file__), "environment": variables, "fresh": True}
    begun = time.time()
    result = launching.launch(bench.folder, strategy, *words, **options)
    if result.rc:
        raise launching.LaunchError(f"{bench.folder.name} under {strategy} fails: {result.output[-2000:]}")
    record = json.loads((run / "run.json").read_text())
    at = record["startup_seconds"]
    loaded = float(load.read_text())
    return {
        "launcher": record["started"][-1] - at["opened"] - begun,
        "import": at["imported"],
        "open": at["opened"] - at["imported"],
        "load": loaded,
        "rows": at["rows and model"] - at["opened"] - loaded,
        "wrap": at["training"] - at["rows and model"],
        "first step": at["first step"] - at["training"],
    }


def table(report: dict) -> str:
    """The kept measurements as Markdown."""
    lines = [f"| recipe | launch file | {' | '.join(PARTS)} | all |", "|---" * (len(PARTS) + 3) + "|"]
    for name, cell in sorted(report["cells"].items()):
        recipe, strategy = name.split()
        parts = " | ".join(f"{cell['median'][part]:.1f}" for part in PARTS)
        lines.append(f"| {recipe} | {strategy} | {parts} | {cell['all']:.1f} |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    note = f"Seconds, medians of {report['repeat']} fresh launches of one process; tiny models. {report['machine']}; "
    return "\n".join([*lines, "", f"{note}{report['date']}; {versions}."])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipes", nargs="*", help="names in recipes/; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="launches of each (%(default)s)")
    parser.add_argument("--output", type=Path, default=FILE, help="default: docs/startup.json")
    arguments = parser.parse_args()
    import smoke

    names = arguments.recipes or sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        benches = {name: smoke.Bench(ROOT / "recipes" / name, Path(folder, name)) for name in names}
        cells = [(name, "single") for name in names]
        cells += [(name, "zero2") for name in names if "zero2" in smoke.fitting(ROOT / "recipes" / name)]
        found = {cell: [] for cell in cells}
        turns = [(number, *cell) for number in range(arguments.repeat) for cell in cells]
        for number, name, strategy in track(turns, "launches"):
            work = Path(folder, f"{name}-{strategy}-{number}")
            work.mkdir()
            found[name, strategy].append(measure(benches[name], strategy, work))
    report = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {"cells": {}}
    for (name, strategy), measured in found.items():
        medians = {part: round(statistics.median(one[part] for one in measured), 2) for part in PARTS}
        total = round(statistics.median(sum(one.values()) for one in measured), 2)
        report["cells"][f"{name} {strategy}"] = {"median": medians, "all": total, "launches": measured}
        print(f"{name} {strategy}: {total:.1f} s, " + ", ".join(f"{part} {medians[part]:.1f}" for part in PARTS))
    report |= {
        "repeat": arguments.repeat,
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, load {os.getloadavg()[2]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(report))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).name == "train.py":
        time_the_load(sys.argv[1])
    else:
        sys.exit(main())
