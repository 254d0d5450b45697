"""Writes the tables of README.md, docs/ and the recipes' README from the measured files in docs/.

    python scripts/result_tables.py README.md docs/*.md recipes/*/README.md   # replaces what stands between the marks
    python scripts/result_tables.py                                           # prints the names of the tables

A mark is a line such as <!-- gpu table -->, its end <!-- end of gpu table -->; a page may hold any of them. `measured` and
`fits` are about the recipe in whose README they stand. The files are those of gpu_check.py, several_gpus.py, startup.py,
sroie.py, load_memory.py, memory_chooser.py (predicted), measure_memory.py with memory.py (measured and predicted), benchmark.py,
fault_campaign.py, export_matrix.py, export_real.py and of `scripts/test.sh --matrix` (strategy_table.py). The tables of
docs/engines.md and docs/scaling.md have programs of their own.
"""

import argparse
import re
import sys
from pathlib import Path

import status_table
import strategy_table
from launching import STRATEGIES
from status_table import read


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
                gpus = 1 if cell["strategy"] == "single" else len(report["gpus"])
                found = {"gpus": gpus, "layers": report.get("layers", {})}
                best[cell["name"], cell["strategy"]] = cell | found
    lines = [
        "| recipe | launch file | GPUs | depth | seconds a step | peak GiB, GPU 0 | loss, step 1 and 5 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, strategy), cell in best.items():
        older = (depth for size, depth in cell["layers"].items() if depth and f"gpt-oss-{size}" in name)
        cut = cell["depth"] if "depth" in cell else next(older, None)
        losses = " to ".join(f"{loss:.2f}" for loss in cell["loss"])
        depth = f"{cut} layers" if cut else "whole"
        lines.append(
            f"| {name} | {strategy} | {cell['gpus']} | {depth} | {cell.get('step_seconds', '-')} | "
            f"{cell['peak_memory_gib']} | {losses} |"
        )
    lines += [
        "",
        "Random weights of the real architectures, five steps, shipped config and launch file. "
        + "; ".join(dict.fromkeys(map(surroundings, reports)))
        + ".",
    ]
    if any("step_seconds" not in cell for cell in best.values()):
        lines += ["", "No step time: two launches shared the GPU."]
    if failed:
        lines += ["", "Failed first, and passed when repeated: " + "; ".join(failed) + "."]
    return "\n".join(lines)


def several_table() -> str:
    """Kill, resume, reload and export on GPUs, beside one process; speed beside one GPU."""
    import several_gpus

    report = read("several_gpus.json")
    return f"{several_gpus.table(report)}\n{surroundings(report)}."


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


def benchmark_table() -> str:
    """Tokens a second of each target and arm."""
    import benchmark

    return benchmark.table([line for line in read("benchmark.json")["results"] if not line["key"]["rehearse"]])


def fault_table() -> str:
    """Kills, damage and full disks: how many were tried and survived."""
    import fault_campaign

    return fault_campaign.markdown(read("faults.json"))


def export_table() -> str:
    """Each recipe's checkpoints, exported and compared with its result; then exports in real dimensions."""
    report, groups = read("export.json"), {}
    for name, cell in report["cells"].items():
        recipe, config, strategy = name.split()
        groups.setdefault((recipe, config), []).append((strategy, cell))
    lines = ["| recipe | checkpoints of | failed | weights off by | lost by merging |", "|---|---|---|---|---|"]
    for (recipe, config), cells in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] != "config")):
        passed = [cell for _, cell in cells if not cell["error"]]
        off = max((cell["difference"] for cell in passed), default=float("nan"))
        lost = [cell["merged"]["lost"] for cell in passed if cell["merged"]]
        label = status_table.labelled(recipe, config)
        order = [name for name in STRATEGIES if name in dict(cells)]
        lines.append(
            f"| {label} | {', '.join(order)} | {len(cells) - len(passed)} | {off:.0e} | "
            f"{f'{max(lost):.0e}' if lost else '-'} |"
        )
    lines += [
        "",
        "Tiny models, two processes. Weights: the export of the last checkpoint against final/; ZeRO rounds final/",
    ]
    lines[-1] += " of a bf16 adapter. Lost: share of what training changed that rounding the merged weights took away. "
    lines[-1] += f"{surroundings(report)}."
    if real := report.get("real_size"):
        lines += [
            "",
            "| real size | GB written | export, s | GiB | with proof, s | GiB | on |",
            "|---|---|---|---|---|---|---|",
        ]
    for one in real or []:
        plain, proven = one["merge without proof"], one["merge"]
        lines.append(
            f"| {one['recipe']} `{one['config']}`, merged | {one['bytes'] / 1e9:.1f} | {plain['seconds']:.0f} | "
            f"{plain['peak_rss_gib']:.1f} | {proven['seconds']:.0f} | {proven['peak_rss_gib']:.1f} | {one['hardware']}, "
            f"{one['date']} |"
        )
    return "\n".join(lines)


def data_table() -> str:
    """Rows a second and memory of preparation and inspection, from a thousand rows to a million."""
    report = read("data_speed.json")
    lines = ["| rows | prepared, rows/s | GiB | inspected, rows/s | GiB |", "|---|---|---|---|---|"]
    for row in report["results"]:
        both = [row[name] for name in ("preparation", "inspection")]
        cells = " | ".join(f"{part['rows_per_second']:,} | {part['private_gib']}" for part in both)
        lines.append(f"| {row['rows']:,} | {cells} |")
    return "\n".join([*lines, "", f"{surroundings(report)}; load average {report['load'][0]} at the end."])


def startup_table() -> str:
    """Seconds to the first step, in parts."""
    import startup

    return startup.table(read("startup.json"))


TABLES = {
    "data": data_table,
    "startup": startup_table,
    "gpu": gpu_table,
    "several": several_table,
    "sroie": sroie_table,
    "memory": memory_table,
    "chooser": chooser_table,
    "predicted": predicted_table,
    "benchmark": benchmark_table,
    "fault": fault_table,
    "export": export_table,
    "strategy": lambda: strategy_table.markdown(read("strategy_matrix.json")),
    "recipe": status_table.recipe_table,
    "status": status_table.status_table,
    "technique": status_table.technique_table,
    "lever": status_table.lever_table,
    "result": status_table.result_table,
}
RECIPE_TABLES = {"measured": status_table.measured_table, "fits": status_table.fits_table}
MARKED = re.compile(r"<!-- ([\w-]+) table -->\n(.*?)<!-- end of \1 table -->", re.DOTALL)


def filled(page: Path) -> str:
    """The page's text with each of its tables made anew. ValueError for a mark without its end, or of no known table."""

    def fill(found: re.Match) -> str:
        name, recipe = found[1], page.resolve().parent.name
        made = RECIPE_TABLES[name](recipe) if name in RECIPE_TABLES else TABLES[name]()
        return f"<!-- {name} table -->\n{made}\n<!-- end of {name} table -->"

    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- ([\w-]+) table -->$", text, re.MULTILINE)
    if marks != [found[1] for found in MARKED.finditer(text)]:
        raise ValueError(
            f"{page}: a mark <!-- NAME table --> has no <!-- end of NAME table --> after it. Add the line."
        )
    if unknown := set(marks) - TABLES.keys() - RECIPE_TABLES.keys():
        known = ", ".join([*TABLES, *RECIPE_TABLES])
        raise ValueError(f"{page}: there is no table {', '.join(sorted(unknown))}. Known: {known}.")
    return MARKED.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files with marks")
    pages = parser.parse_args().pages
    if not pages:
        print("\n".join([*TABLES, *RECIPE_TABLES]))
    for page in pages:
        if re.search(r"<!-- (engine|scaling) tables? -->", page.read_text(encoding="utf-8")):
            continue
        try:
            text = filled(page)
        except ValueError as error:
            sys.exit(f"error: {error}")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
