"""Check a launch line before it costs GPU time: everything after this program's name is the line as it will be run.

    python scripts/check.py --config_file accelerate_configs/fsdp.yaml --num_processes 8 recipes/gpt-oss-120b/train.py
    python scripts/check.py --gpu h100-80gb --gpus-per-node 8 --config_file accelerate_configs/zero3.yaml \\
        recipes/qwen3-8b-invoice/train.py --max_length 2048
    python scripts/check.py --machine      # what is installed here, for a bug report

Reads the launch file, the DeepSpeed file, the recipe's config and flags and the model's config; loads no weights and
starts no process. Own options stand before the recipe: --gpu NAME for another machine than this, --gpus-per-node,
--nodes, --host-ram GIB, --data [N|all] to inspect rows, --json. Exit code: 0 with no error, 1 with one, 2 for words
that cannot be read. Warnings do not change it.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict

import check_launch
from check_launch import Launch

SAMPLE = 200  # rows that are inspected where nobody says how many


def _words(argv: list[str]) -> list[str]:
    """`--data` may stand without a number; argparse would then take the recipe for it."""
    words = list(argv)
    for i, word in enumerate(words):
        if word.endswith(".py"):
            break
        if word == "--data" and not (i + 1 < len(words) and (words[i + 1] == "all" or words[i + 1].isdigit())):
            words[i] = f"--data={SAMPLE}"
    return words


def check(words: list[str]) -> tuple[Launch, object, str]:
    """Read and check the words of a launch line: (launch with its findings, plan or None, text about memory).

    Raises SystemExit, as argparse does, for words that accelerate's launcher cannot read.
    """
    import check_machine
    import check_memory
    import check_plan
    import check_rules

    launch, plan, memory = check_launch.read(words), None, ""
    check_rules.check(launch)
    if launch.training_args is not None and launch.model_args is not None:
        plan = check_plan.plan(launch)
        check_machine.check(launch)
        memory = check_memory.check(launch)
        _data(launch)
    launch.settle()
    return launch, plan, memory


def _data(launch: Launch) -> None:
    """scripts/inspect_data.py on a sample: with --data, or by itself where rows and model are local."""
    asked, model = launch.accelerate.data, launch.model_args.model_name_or_path
    rows = getattr(launch.script_args, "dataset_name", None) or ""
    if asked is None and not (os.path.exists(rows) and os.path.isdir(model)):
        return
    if not os.path.isdir(model) and not launch.model_source.startswith("config.json"):
        launch.add(
            "data",
            launch.where("model_name_or_path"),
            "--data",
            f"the rows need {model}'s tokenizer, which is not here.",
            "--model_name_or_path FOLDER",
        )
        return
    import inspect_data

    sample = None if asked == "all" else int(asked or SAMPLE)
    file = launch.where("dataset_name")
    try:
        report = inspect_data.inspect(launch.recipe, launch.recipe_words, sample)
    except Exception as error:  # what train.py would stop at, in its own words
        why = " ".join(str(error).split())
        launch.add("data", file, "dataset_name", why, "rows as recipes/NAME/README.md shows them, or --unfit_rows drop")
        return
    for check in report.checks:
        if check.ok is False:
            launch.add(
                "data", file, check.name, check.detail, f"python scripts/inspect_data.py {launch.recipe} shows rows"
            )


def show(launch: Launch, plan, memory: str, seconds: float) -> None:
    """Print it for people: findings, plan, memory, verdict."""
    errors = [finding for finding in launch.findings if finding.severity == "error"]
    warnings = [finding for finding in launch.findings if finding.severity == "warning"]
    place = f"{launch.nodes} machine(s) of {launch.gpus_per_node} x {launch.gpu or 'no GPU'}"
    spread = f"{launch.strategy} over {launch.world} process(es)"
    print(f"{launch.recipe or launch.script}: {spread}, {'CPU' if launch.cpu else place}")
    for note in launch.notes:
        print(f"note: {note}")
    for finding in [*errors, *warnings]:
        print(f"\n{finding.severity}: {finding.file}: {finding.key}\n  {finding.why}")
        if finding.write:
            print(f"  write: {finding.write}")
    if plan is not None:
        print("\n" + "\n".join(plan.lines()))
    if memory:
        print("\n" + memory)
    print(f"\n{len(errors)} error(s), {len(warnings)} warning(s), {seconds:.1f} s")


def machine(as_json: bool) -> int:
    """Print what is here, for a bug report."""
    import check_machine

    found = check_machine.facts()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    words = _words(sys.argv[1:] if argv is None else argv)
    before = words[: next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))]
    if not words or {"-h", "--help"} & set(before):
        print(__doc__)
        print("GPUs:", ", ".join(check_launch.GPUS))
        return 0 if words else 2
    if "--machine" in before:
        return machine("--json" in before)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the report
        launch, plan, memory = check(words)
    failed = any(finding.severity == "error" for finding in launch.findings)
    if launch.accelerate.json:
        report = launch.as_dict() | {"plan": asdict(plan) if plan else None, "memory": memory, "ok": not failed}
        print(json.dumps(report, indent=1, default=str))
    else:
        show(launch, plan, memory, time.monotonic() - started)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
