"""Tables about the recipes, for README.md and the recipes' own: what there is, what was run where, what came of it.

    python scripts/status_table.py             # what was run for real, and what never was
    python scripts/status_table.py --recipes   # the recipes and their launch lines

Both are made from the recipes' folders and the measured files in docs/; scripts/result_tables.py writes them between the
marks of a page. A recipe that is added appears by itself.
"""

import argparse
import ast
import json
import statistics
from collections import defaultdict
from pathlib import Path

import smoke
import yaml
from launching import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# The end of a cell's name in gpu_check.json -> the configuration it ran.
VARIANTS = {"LoRA": "lora", "QLoRA": "qlora", "expert LoRA": "expert_lora"}
TECHNIQUES = {
    "full": ("all weights", "16 bytes a parameter, and activations, fit over the GPUs"),
    "lora": ("LoRA", "one GPU, or many tuned versions of one base"),
    "expert_lora": ("LoRA on experts, too", "gpt-oss, where LoRA on attention alone learns too little"),
    "qlora": ("QLoRA", "the bf16 base does not fit the GPU"),
}


def read(name: str) -> dict:
    """A measured file of docs/."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def hardware(report: dict) -> str:
    """On what and when a report was measured."""
    gpus = report.get("gpus") or report.get("hardware")
    return f"{len(gpus)} x {gpus[0]}, {report['date']}" if isinstance(gpus, list) else f"{gpus}, {report['date']}"


def recipes() -> dict[str, Path]:
    """The folders of the recipes by name."""
    return {path.parent.name: path.parent for path in sorted((ROOT / "recipes").glob("*/train.py"))}


def configurations(recipe: Path) -> list[str]:
    """Names for `--config`; the default first."""
    names = [path.stem for path in recipe.glob("*.yaml")]
    return sorted(names, key=lambda name: (name != "config", name))


def launch_line(config: Path) -> str:
    """The launch line in the head of a recipe's configuration."""
    head = config.read_text(encoding="utf-8").splitlines()[:12]
    return next(line.removeprefix("#").strip() for line in head if line.startswith("#   accelerate launch "))


def recipe_table() -> str:
    """Every recipe: what it trains, by the first line of its train.py, its variants and its default launch line."""
    lines = ["| recipe | what it trains | variants | default launch line |", "|---|---|---|---|"]
    for name, folder in recipes().items():
        what = ast.get_docstring(ast.parse((folder / "train.py").read_text(encoding="utf-8"))).partition("\n\n")[0]
        variants = ", ".join(f"`{config}`" for config in configurations(folder)[1:])
        line = launch_line(folder / "config.yaml")
        what = " ".join(what.split()).removesuffix(".")
        lines.append(f"| [{name}](recipes/{name}/README.md) | {what} | {variants} | `{line}` |")
    return "\n".join(lines)


def gpu_cells() -> list[dict]:
    """The cells of gpu_check.json that passed, each with recipe, config, GPUs, hardware, and depth where it was cut."""
    cells = []
    for report in read("gpu_check.json")["reports"]:
        for cell in report["cells"]:
            name, *rest = cell["name"].split(", ")
            config = next((VARIANTS[word] for word in rest if word in VARIANTS), "config")
            older = (n for size, n in report.get("layers", {}).items() if n and name == f"gpt-oss-{size}")
            cut = cell["depth"] if "depth" in cell else next(older, None)
            gpus = 1 if cell["strategy"] == "single" else len(report["gpus"])
            if "error" not in cell:
                place = {"gpus": gpus, "hardware": f"{gpus} x {report['gpus'][0]}, {report['date']}"}
                cells.append(cell | place | {"recipe": name, "config": config, "cut": cut})
    return cells


def benchmarked() -> list[dict]:
    """The results of benchmark.json that ran a recipe of ours, each with recipe, config and strategy."""
    import benchmark

    found = []
    for line in read("benchmark.json")["results"]:
        target, arm = benchmark.TARGETS[line["key"]["target"]], line["key"]["arm"]
        if "error" in line or line["key"]["rehearse"] or arm in ("trl", *benchmark.PEERS):
            continue
        strategy = line["settings"].get("strategy", target.strategy)
        found.append(line | {"recipe": target.recipe, "config": target.config, "strategy": strategy})
    return found


def runs() -> dict[tuple[str, str, str], list[str]]:
    """(recipe, config, strategy) -> where it was run for real, smallest first."""
    where = defaultdict(set)
    for cell in read("strategy_matrix.json")["cells"]:
        if cell["error"] is None:
            where[cell["recipe"], cell["config"], cell["strategy"]].add((0, "CPU"))
    for cell in read("engines.json")["cells"]:
        if cell["error"] is None:
            where[cell["recipe"], "config", cell["strategy"]].add((0, "CPU"))
    for strategy in read("sroie_cpu.json")["tuned"]:
        where["qwen3-8b-invoice", "config", strategy].add((0, "CPU"))
    for strategy in read("sroie_gpu.json")["tuned"]:
        where["qwen3-8b-invoice", "config", strategy].add((1, "1 GPU"))
    for name in read("sroie_study.json")["adapters"]:
        where["qwen3-8b-invoice", name, "single"].add((1, "1 GPU"))
    for line in benchmarked():
        where[line["recipe"], line["config"], line["strategy"]].add((1, "1 GPU"))
    for cell in gpu_cells():
        number = cell["gpus"]
        where[cell["recipe"], cell["config"], cell["strategy"]].add((number, f"{number} GPU{'s' * (number > 1)}"))
    return {key: [name for _, name in sorted(found)] for key, found in where.items()}


def labelled(recipe: str, config: str) -> str:
    """A recipe with its configuration, as the tables name them."""
    return recipe if config == "config" else f"{recipe} `{config}`"


def by_arm(lines: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """(target, arm) -> results of benchmark.json on documents of real lengths and the whole model; repeats together."""
    import benchmark

    groups = benchmark.grouped([line for line in lines if "error" not in line and not line["key"]["rehearse"]])
    return {(target, arm): same for (target, rows, depth, arm), same in groups.items() if rows == "real" and not depth}


def status_table() -> str:
    """Every recipe and configuration under every strategy: where it was run for real, `never`, or blank: not supported."""
    found = runs()
    lines = [f"| recipe | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    for name, folder in recipes().items():
        for config in configurations(folder):
            label = labelled(name, config)
            cells = [
                ", ".join(found.get((name, config, strategy), []))
                or ("never" if strategy in smoke.fitting(folder, config) else "")
                for strategy in STRATEGIES
            ]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    gpus = sorted({name for report in read("gpu_check.json")["reports"] for name in report["gpus"]})
    cut = sorted({f"{cell['recipe']} with {cell['cut']} layers" for cell in gpu_cells() if cell["cut"]})
    note = (
        f"CPU: two processes (`single`: one), tiny model, launch file as shipped. GPU: {', '.join(gpus)}; the published "
        f"architecture with random weights ({', '.join(cut)}), or SmolLM2-135M on real receipts. Empty: not "
        "supported."
    )
    return "\n".join([*lines, "", note])


def technique(recipe: str, config: str) -> str:
    """What a recipe's configuration trains: a key of TECHNIQUES."""
    keys = yaml.safe_load((ROOT / "recipes" / recipe / f"{config}.yaml").read_text(encoding="utf-8"))
    if not keys.get("use_peft"):
        return "full"
    if keys.get("load_in_4bit"):
        return "qlora"
    return "expert_lora" if keys.get("lora_target_parameters") else "lora"


def technique_table() -> str:
    """What is trained, when to take it, what it scored on one task, and the memory that GPU runs of it took."""
    study = read("sroie_study.json")
    scores = {name: found["test"]["micro_f1"] for name, found in study["adapters"].items()}
    scores["full"] = study["curve"][-1]["test"]["micro_f1"]
    lines = [
        "| what is trained | take it when | field F1 on receipts | GiB on GPU 0, measured |",
        "|---|---|---|---|",
    ]
    cells = {(cell["recipe"], cell["config"], cell["strategy"], cell["cut"]): cell for cell in gpu_cells()}
    for kind, (name, when) in TECHNIQUES.items():
        measured = "; ".join(
            f"{cell['recipe']}{f' ({cut} layers)' if (cut := cell['cut']) else ''}, {cell['strategy']}, "
            f"{cell['gpus']} GPU{'s' * (cell['gpus'] > 1)}: {cell['peak_memory_gib']:.0f}"
            for cell in cells.values()
            if technique(cell["recipe"], cell["config"]) == kind
        )
        score = f"{scores[kind]:.3f}" if kind in scores else "not tried"
        lines.append(f"| {name} | {when} | {score} | {measured or 'not yet'} |")
    receipts = study["curve"][-1]
    note = (
        f"F1 (docs/sroie_study.md): SmolLM2-135M on {receipts['test']['documents']} held-out SROIE receipts, trained on "
        f"{receipts['receipts']}; "
        f"{hardware(study)}. Memory: shipped config and launch file, random weights of the published architecture."
    )
    return "\n".join([*lines, "", note])


WHAT = {"full": "all weights", "lora": "LoRA", "expert_lora": "LoRA with experts"}  # Target.trained in words


def setting_of(target, arm: str) -> str:
    """The name of what an arm of benchmark.py has more than the one before it, or more than `full`."""
    import benchmark

    name = list(target.levers)[-1] if arm == "full" else arm.removeprefix("add: ").removeprefix("full, ")
    return f"{name} (opt-in)" if benchmark.opt_in(benchmark.arms(target).get(arm, {})) else name


def lever_table() -> str:
    """What each setting was worth on one GPU, in the order in which benchmark.py adds them."""
    import benchmark

    lines = [
        "| recipe, what is trained | settings added | tokens/s before | after | factor | GiB after |",
        "|---|---|---|---|---|---|",
    ]
    measured = by_arm(read("benchmark.json")["results"])
    for name, target in benchmark.TARGETS.items():
        before, added = None, []
        for arm in dict.fromkeys(["trl", *benchmark.arms(target)]):
            opt_in = benchmark.opt_in(benchmark.arms(target).get(arm, {}))  # on top of `full`, each by itself
            if not (arm in ("trl", "full") or arm.startswith("add: ") or opt_in):
                continue
            if arm != "trl":
                added = [setting_of(target, arm)] if opt_in else [*added, setting_of(target, arm)]
            if not (repeats := measured.get((name, arm))):
                continue
            rate = statistics.median(line["tokens_per_second"] for line in repeats)
            memory = statistics.median(line["peak_gib"]["allocated"] for line in repeats)
            if before:
                lines.append(
                    f"| {target.recipe}, {WHAT[target.trained]} | {'; '.join(added)} | {before:,.0f} | {rate:,.0f} | "
                    f"{rate / before:.2f} | {memory:.0f} |"
                )
            before, added = before if opt_in else rate, []
    last = next(line for line in reversed(read("benchmark.json")["results"]) if "error" not in line)
    begin = "The first line of a recipe starts from TRL's own script, an opt-in one from all other settings."
    note = f"{begin} 1 x {last['device']}, {last['date']}."
    return "\n".join([*lines, "", note])


def result_table() -> str:
    """The main result of each measured file in one line, with hardware and date."""
    import benchmark

    gpu, matrix, faults, memory = (read(f"{n}.json") for n in ("sroie_gpu", "strategy_matrix", "faults", "memory"))
    cells = matrix["cells"]
    worst = max(cell["loss_deviation"] for cell in cells if cell["precision"] == "fp32" and not cell["error"])
    measured = [line for line in memory["settings"] if "measured" in line]
    errors = [abs(line["predicted"] / line["measured"]["step"] - 1) for line in measured]
    survived = sum(fault["survived"] for fault in faults["faults"])
    lines = ["| what | result | on | more |", "|---|---|---|---|"]
    tuned = next(iter(gpu["tuned"].values()))
    low, high = tuned["micro_f1_interval"]
    lines.append(
        f"| SmolLM2-135M on {tuned['documents']} held-out receipts (SROIE): field F1, base to tuned | "
        f"{gpu['base']['micro_f1']:.3f} to {tuned['micro_f1']:.3f} (95 %: {low:.3f} to {high:.3f}) in "
        f"{tuned['seconds']} s | {hardware(gpu)} | [results](docs/results.md#a-real-task) |"
    )
    failed = sum(cell["error"] is not None for cell in cells)
    lines.append(
        f"| the same loss under every strategy, killed, resumed, reloaded | {len(cells)} cells, {failed} failed; in fp32 "
        f"within {worst:.0e} | two CPU processes, {matrix['date']} | "
        "[results](docs/results.md#the-same-loss-under-every-strategy) |"
    )
    speeds = by_arm(line for line in benchmarked() if not benchmark.refused(line["settings"])).values()
    best = max(speeds, key=lambda same: statistics.median(line["mfu"] for line in same))
    rate, mfu = (statistics.median(line[key] for line in best) for key in ("tokens_per_second", "mfu"))
    lines.append(
        f"| fastest recipe: {best[0]['recipe']} | {rate:,.0f} tokens/s, MFU {mfu:.0%} | "
        f"1 x {best[0]['device']}, {best[0]['date']} | [results](docs/results.md#speed-on-one-gpu) |"
    )
    lines.append(
        f"| memory of a step on one GPU, predicted | {len(measured)} settings: mean error "
        f"{sum(errors) / len(errors):.1%}, worst {max(errors):.1%} | {hardware(memory)} | [memory](docs/memory.md) |"
    )
    lines.append(
        f"| runs killed, checkpoints damaged, disks filled | {survived} of {len(faults['faults'])} survived, to the last "
        f"bit | CPU, {faults['date']} | [faults](docs/faults.md) |"
    )
    return "\n".join(lines)


def fits_table(recipe: str) -> str:
    """The smallest launch that fits, by number and size of GPUs, for one recipe."""
    cells = read("memory_chooser.json")["recipes"].get(recipe)
    if not cells:
        return "Not predicted yet: `python scripts/memory_chooser.py`."
    sizes = sorted({cell["gpu_gb"] for cell in cells})
    lines = [f"| GPUs | {' | '.join(f'{size} GB' for size in sizes)} |", f"|---|{'---|' * len(sizes)}"]
    for world in sorted({cell["world"] for cell in cells}):
        words = []
        for cell in (cell for cell in cells if cell["world"] == world):
            config = {None: "-", "config": ""}.get(cell["config"], f"`{cell['config']}` ")
            words.append(f"{config}{cell['strategy']}, {cell['micro_batch']}" if cell["config"] else "-")
        lines.append(f"| {world} | {' | '.join(words)} |")
    note = (
        "The first launch file that fits, with the largest micro batch of rows of `max_length`; in front, the variant where "
        "it is not config.yaml. Predicted: [docs/memory.md](../../docs/memory.md) says how well."
    )
    return "\n".join([*lines, "", note])


def measured_table(recipe: str) -> str:
    """What was measured of one recipe: on CPU, on GPUs, its speed beside TRL's script, its scores beside the base's."""
    matrix = read("strategy_matrix.json")
    cells = [cell for cell in matrix["cells"] if cell["recipe"] == recipe]
    lines = ["| what | result | on |", "|---|---|---|"]
    if cells:
        failed = sum(cell["error"] is not None for cell in cells)
        worst = max((cell["loss_deviation"] or 0 for cell in cells if cell["precision"] == "fp32"), default=0)
        lines.append(
            f"| strategies: {', '.join(name for name in STRATEGIES if any(c['strategy'] == name for c in cells))} | "
            f"{len(cells)} cells, {failed} failed; losses within {worst:.0e} of one process | "
            f"two CPU processes, tiny model, {matrix['date']} |"
        )
    for cell in {(cell["config"], cell["strategy"]): cell for cell in gpu_cells() if cell["recipe"] == recipe}.values():
        depth = f"{cell['cut']} layers" if cell["cut"] else "whole"
        pace = f"{cell['step_seconds']} s a step, " if "step_seconds" in cell else ""
        lines.append(
            f"| {cell['config']}, {cell['strategy']}, {depth}, random weights | {pace}{cell['peak_memory_gib']} GiB on GPU "
            f"0 | {cell['hardware']} |"
        )
    import benchmark

    every, ours = by_arm(read("benchmark.json")["results"]), by_arm(benchmarked())
    for name, target in benchmark.TARGETS.items():
        found = {arm: same for (known, arm), same in ours.items() if known == name and target.recipe == recipe}
        if not found:
            continue
        allowed = {arm: same for arm, same in found.items() if not benchmark.refused(same[0]["settings"])}
        found = allowed or found  # where all are refused, the target's label says so
        speeds = {arm: statistics.median(line["tokens_per_second"] for line in same) for arm, same in found.items()}
        arm, rate = max(speeds.items(), key=lambda pair: pair[1])
        best = found[arm][0]
        mfu = best["mfu"] * rate / best["tokens_per_second"]
        of_trl = [line["tokens_per_second"] for line in every.get((name, "trl"), [])]
        beside = f" (TRL's script: {statistics.median(of_trl):,.0f})" if of_trl else ""
        levers = f"{setting_of(target, arm)} and what is before it"
        if arm.startswith("full"):
            levers = "; ".join(dict.fromkeys([*target.levers, setting_of(target, arm)]))
        lines.append(
            f"| {target.config}, speed, {target.label}: {levers} | {rate:,.0f} tokens/s{beside}, MFU {mfu:.0%} | "
            f"1 x {best['device']}, {best['date']} |"
        )
    if recipe == "qwen3-8b-invoice":
        for name in ("sroie_gpu.json", "sroie_cpu.json"):
            report = read(name)
            for label, scores in {"base": report["base"], **report["tuned"]}.items():
                label = label if label == "base" else f"tuned, {label}, {scores['steps']} steps"
                lines.append(
                    f"| SmolLM2-135M, {scores['documents']} receipts (SROIE): {label} | field F1 "
                    f"{scores['micro_f1']:.3f}, exact {scores['micro_f1_exact']:.3f} | {hardware(report)} |"
                )
    return "\n".join(lines) if len(lines) > 2 else "Nothing yet."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipes", action="store_true", help="print the recipes instead")
    print(recipe_table() if parser.parse_args().recipes else status_table())


if __name__ == "__main__":
    main()
