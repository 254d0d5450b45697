"""Writes the README's tables of GPU runs, receipts and memory from the files in docs/.

    python scripts/result_tables.py README.md      # replaces what stands between each pair of marks there
    python scripts/result_tables.py                # prints the tables

The files are those that gpu_check.py, sroie.py and load_memory.py write: docs/gpu_check.json (a list of its reports),
docs/sroie_gpu.json, docs/sroie_cpu.json and docs/load_memory.json; and those of memory_chooser.py (predicted) and of
measure_memory.py with memory.py (measured and predicted): docs/memory_chooser.json and docs/memory.json. A mark is a line
such as <!-- gpu table -->, its end <!-- end of gpu table -->. The table of strategies has its own program,
strategy_table.py.
"""

import argparse
import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def read(name: str) -> dict:
    """A measured file of docs/."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def surroundings(report: dict) -> str:
    """On what, with what and when a report was measured."""
    hardware = report.get("gpus") or report.get("hardware") or report.get("machine")
    if isinstance(hardware, list):
        hardware = f"{len(hardware)} x {hardware[0]}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{hardware}; {report['date']}; {versions}"


def gpu_table() -> str:
    """Every cell that was run on GPUs; of one that was run twice, the last that passed. Failures are listed below."""
    best, failed, reports = {}, [], read("gpu_check.json")["reports"]
    for report in reports:
        for cell in report["cells"]:
            if "error" in cell:
                failed.append(f"{cell['name']} under {cell['strategy']}: {cell['error']}")
            else:
                best[cell["name"], cell["strategy"]] = cell | {"layers": report["layers"]}
    lines = [
        "| recipe | launch file | depth | seconds a step | peak GiB, GPU 0 | loss, step 1 and 5 |",
        "|---|---|---|---|---|---|",
    ]
    for (name, strategy), cell in best.items():
        cut = next((depth for size, depth in cell["layers"].items() if depth and f"gpt-oss-{size}" in name), None)
        losses = " to ".join(f"{loss:.2f}" for loss in cell["loss"])
        depth = f"{cut} layers" if cut else "whole"
        lines.append(
            f"| {name} | {strategy} | {depth} | {cell['step_seconds']} | {cell['peak_memory_gib']} | {losses} |"
        )
    lines += [
        "",
        f"Random weights of the real architectures, five steps, shipped config and launch file. {surroundings(reports[0])}.",
    ]
    if failed:
        lines += ["", "Failed first, and passed when repeated: " + "; ".join(failed) + "."]
    return "\n".join(lines)


def score_rows(label: str, scores: dict) -> str:
    """One row of the receipt table."""
    fields = scores["fields"].values()
    low, high = scores["micro_f1_interval"]
    cells = " | ".join(f"{field['normalised']:.3f}" for field in fields)
    return (
        f"| {label} | {scores['documents']} | {scores['unparseable']} | {cells} | "
        f"{scores['micro_f1']:.3f} ({low:.3f} to {high:.3f}) | {scores['micro_f1_exact']:.3f} |"
    )


def sroie_table() -> str:
    """SmolLM2-135M on SROIE receipts: base and tuned, on one GPU with all receipts and on two CPU processes with few."""
    gpu, cpu = read("sroie_gpu.json"), read("sroie_cpu.json")
    names = " | ".join(gpu["base"]["fields"])
    lines = [
        f"| run | receipts | unparseable | {names} | field F1, normalised | exact |",
        f"|---|---|---|{'---|' * 4}---|---|",
    ]
    lines.append(score_rows("GPU: base", gpu["base"]))
    for tuned in gpu["tuned"].values():
        lines.append(score_rows(f"GPU: tuned, {tuned['steps']} steps", tuned))
        lines.append(
            score_rows("the same, near duplicates of training receipts left out", tuned["without_near_duplicates"])
        )
    lines.append(score_rows("CPU: base", cpu["base"]))
    for strategy, tuned in cpu["tuned"].items():
        first, last = tuned["loss"][0], sum(tuned["loss"][-5:]) / 5
        label = (
            f"CPU, {strategy}: tuned, {tuned['steps']} steps, loss {first:.2f} to {last:.2f} (mean of the last five)"
        )
        lines.append(score_rows(label, tuned))
    return "\n".join([*lines, "", f"GPU: {surroundings(gpu)}.", f"CPU: {surroundings(cpu)}."])


def memory_table() -> str:
    """Private host memory of each of two ranks after loading gpt-oss."""
    report = read("load_memory.json")
    lines = ["| launch file | stored as | rank 0, MiB | rank 1, MiB |", "|---|---|---|---|"]
    for cell in report["cells"]:
        ranks = " | ".join(f"{size / 2**20:.0f}" for size in cell["private_bytes"])
        lines.append(f"| {cell['strategy']} | {cell['stored']} | {ranks} |")
    size = report["bf16_bytes"] / 2**20
    return "\n".join([*lines, "", f"A random gpt-oss of {size:.0f} MiB in bf16. {surroundings(report)}."])


def chooser_table() -> str:
    """What fits where."""
    import memory_chooser  # here, as memory below: they bring torch, which takes seconds

    return memory_chooser.chooser_table(read("memory_chooser.json"))


def predicted_table() -> str:
    """Predicted against measured peaks of a training step."""
    import memory

    report = read("memory.json")
    return f"{memory.memory_peak_table(report)} {surroundings(report)}."


TABLES = {
    "gpu": gpu_table,
    "sroie": sroie_table,
    "memory": memory_table,
    "chooser": chooser_table,
    "predicted": predicted_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a Markdown file with the marks")
    file = parser.parse_args().file
    if file is None:
        print("\n\n".join(make() for make in TABLES.values()))
        return
    text = file.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            sys.exit(f"error: {file} needs the lines {begin} and {end} once each.")
        text = f"{text.split(begin)[0]}{begin}\n{make()}\n{end}{text.split(end)[1]}"
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
