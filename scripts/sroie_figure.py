"""Draw and write down what scripts/sroie_study.py measured.

    python scripts/sroie_figure.py docs/sroie_study.json docs/sroie_study.svg docs/sroie_study.md

The figure is field F1 over the number of training receipts, with 95 % intervals, published results and the ceiling that
the labels set. The Markdown file holds every candidate, the final runs, adapters, flags, and what did not run.
"""

import argparse
import json
from pathlib import Path

# Field F1 with exact values, text alone: table 5 of doi 10.7717/peerj-cs.2536.
PUBLISHED = {"BERT-large, text": 0.920, "UniLMv2-large, text": 0.949}


def draw(study: dict, path: Path) -> None:
    """Write the figure (the format is the file's ending)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sroie"  # the same file for the same numbers
    from matplotlib import pyplot

    points = study["curve"]
    sizes, scores = [p["receipts"] for p in points], [p["test"]["micro_f1"] for p in points]
    below = [p["test"]["micro_f1"] - p["test"]["micro_f1_interval"][0] for p in points]
    above = [p["test"]["micro_f1_interval"][1] - p["test"]["micro_f1"] for p in points]
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    axes.errorbar(sizes, scores, [below, above], fmt="o-", capsize=3, label="this recipe, plain setting")
    if "final" in study:
        axes.plot(sizes[-1:], [result(study)], "D", label="this recipe, chosen on a split of train")
    for (name, score), style in zip(PUBLISHED.items(), ("--", "-."), strict=True):
        axes.axhline(score, linestyle=style, linewidth=1, color="grey", label=f"{name} ({score:.3f})")
    ceiling = study["label_ceiling"]["test"]["f1"]
    axes.axhline(
        ceiling, linestyle=":", color="black", linewidth=1, label=f"labels that stand in the text ({ceiling:.3f})"
    )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="training receipts", ylabel="field F1 on the test receipts, normalised")
    axes.legend(loc="lower right", fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def result(study: dict) -> float:
    """F1 on the test receipts of the way that was chosen on the split of train."""
    final, way = study["final"], study["chosen"]["way"]
    if way in ("average", "vote"):
        return final[way]["test"]["micro_f1"]
    return sum(row["test"]["micro_f1"] for row in final["seeds"]) / len(final["seeds"])


def cells(scores: dict) -> str:
    """Table cells: F1 of each field, F1 with its interval, exact F1."""
    low, high = scores["micro_f1_interval"]
    fields = " | ".join(f"{field['normalised']:.3f}" for field in scores["fields"].values())
    return f"{fields} | {scores['micro_f1']:.3f} ({low:.3f} to {high:.3f}) | {scores['micro_f1_exact']:.3f}"


def final_tables(final: dict, head: str) -> list[str]:
    """Lines: the scores of each seed, their average and their vote on the test receipts, and the flags of predict.py."""
    lines = [f"| run | receipts | {head}", f"|---|---|{'---|' * 6}"]
    found = [(f"seed {row['seed']}", row) for row in final["seeds"]]
    found += [("average of the seeds", final["average"])] if final.get("average") else []
    kinds = {"test": "", "without_near_duplicates": ", without near duplicates", "constrained": ", held to the schema"}
    for name, row in [*found, ("vote of the seeds", final["vote"])]:
        for kind, suffix in kinds.items():
            if kind in row:
                lines.append(f"| {name}{suffix} | {row[kind]['documents']} | {cells(row[kind])} |")
    lines += ["", "Flags of `predict.py` on the answers to the test receipts:", ""]
    lines += ["| run | values | wrong | flagged | flagged and wrong | of the flagged, wrong | of the wrong, flagged |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, row in found:
        flags = row["flags"]
        both = flags["flagged_and_wrong"]
        shares = [f"{both / flags[key]:.0%}" if flags[key] else "-" for key in ("flagged", "wrong")]
        lines.append(f"| {name} | {' | '.join(map(str, flags.values()))} | {' | '.join(shares)} |")
    return lines


def tables(study: dict) -> str:
    """The Markdown text."""
    train, test = study["label_ceiling"]["train"], study["label_ceiling"]["test"]
    rows, hardware = study["rows"], study["hardware"]
    hardware = f"{len(hardware)} x {hardware[0]}" if isinstance(hardware, list) else hardware
    lines = ["# SROIE receipts: what was tried", ""]
    lines += [
        f"SmolLM2-135M-Instruct, `recipes/qwen3-8b-invoice`, by `scripts/sroie_study.py`. {hardware}; {study['date']}; "
        + ", ".join(f"{name} {version}" for name, version in study["versions"].items())
        + ". Field F1, values normalised, with 95 % bootstrap intervals over receipts.",
        "",
        f"**Ceiling of the labels.** {sum(test['absent'].values())} of {test['labels']} test labels do not stand in the "
        f"text ({', '.join(f'{name} {count}' for name, count in test['absent'].items())}): a reader that copies without "
        f"an error has F1 {test['f1']:.3f}. In train it is {sum(train['absent'].values())} of {train['labels']}.",
    ]
    head = "company | date | address | total | field F1 | exact |"
    if "candidates" in study:
        chosen = study.get("chosen")
        lines += ["", "## Candidates, on a split of train", ""]
        lines += [
            f"Trained on {rows['train'] - rows['validation']} training receipts, scored on the other "
            f"{rows['validation']}. No test receipt was used. Differences below about 0.01 are within the noise of so few "
            "receipts and of the seed.",
            "",
            f"| candidate | what it changes | seed | rows | steps | {head}",
            f"|---|---|---|---|---|{'---|' * 6}",
        ]
        for row in sorted(study["candidates"], key=lambda row: -row["validation"]["micro_f1"]):
            lines.append(
                f"| {row['candidate']} | {row['changes']} | {row['seed']} | {row['rows']} | {row['steps']} | "
                f"{cells(row['validation'])} |"
            )
        if chosen:
            ways = ", ".join(f"{way} {score:.3f}" for way, score in chosen["ways"].items())
            lines += [
                "",
                f"Chosen: **{chosen['candidate']}**. Three seeds of it on the same split: {ways}; so on the test receipts "
                f"the result is the {chosen['way']}.",
            ]
    if "final" in study:
        lines += ["", "## On the test receipts, each model scored once", ""]
        lines += [f"Trained on all {rows['train']} training receipts.", ""]
        lines += final_tables(study["final"], head)
    if "repeat" in study:
        again = study["repeat"]["chosen"]
        lines += [
            "",
            "## The same a second time",
            "",
            f"The three seeds were trained a second time on the split of train. By then the first place had gone to "
            f"**{again['candidate']}** (on the split: {', '.join(f'{k} {v:.3f}' for k, v in again['ways'].items())}): "
            "seeds, and what is not deterministic on a GPU, move F1 by as much as the candidates do.",
            "",
            *final_tables(study["repeat"]["final"], head),
        ]
    if study.get("curve"):
        lines += ["", "## How many documents are enough", "", f"| receipts | epochs | steps | {head}"]
        lines += [f"|---|---|---|{'---|' * 6}"]
        for row in study["curve"]:
            lines.append(f"| {row['receipts']} | {row['epochs']} | {row['steps']} | {cells(row['test'])} |")
    if study.get("adapters"):
        lines += ["", "## All weights, LoRA and QLoRA", "", f"| what is trained | peak GiB | seconds a step | {head}"]
        lines += [f"|---|---|---|{'---|' * 6}"]
        whole = [row for row in study.get("curve", []) if row["receipts"] == rows["train"]]
        trained = {"full": whole[0]} if whole else {}
        for name, row in (trained | study["adapters"]).items():
            alone = study.get("timing", {}).get(name, {})
            lines.append(
                f"| {name} | {alone.get('peak_memory_gib', '-')} | {alone.get('step_seconds', '-')} | {cells(row['test'])} |"
            )
        lines += [
            "",
            "Memory and time of a step were measured alone on the GPU, batch 16, without activation checkpointing.",
        ]
    if study["not_run"]:
        lines += ["", "## Not run", ""]
        lines += [f"- {row['cell']}: {' '.join(row['reason'].split())[-300:]}" for row in study["not_run"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="sroie_study.json")
    parser.add_argument("figure", type=Path, help="the figure to write, .svg or .png")
    parser.add_argument("tables", type=Path, help="the Markdown file to write")
    arguments = parser.parse_args()
    study = json.loads(arguments.study.read_text(encoding="utf-8"))
    arguments.tables.write_text(tables(study), encoding="utf-8")
    if study.get("curve"):
        draw(study, arguments.figure)


if __name__ == "__main__":
    main()
