"""Writes a job file for one launch line: Kubernetes (JobSet or Indexed Job), SkyPilot, Databricks AI Runtime.

    python scripts/engines/render.py jobset --nodes 2 --gpus 8 --image registry/cookbook:1 accelerate launch \
        --config_file accelerate_configs/fsdp.yaml recipes/gpt-oss-120b/train.py --output_dir /runs/gpt-oss-120b > job.yaml

The line is the one of a single machine; nodes and GPUs are typed here, once. It is checked against the recipe and its
launch file first, and the output folder must lie where the job file mounts storage that outlives a node. The templates
lie beside this program. For a Slurm cluster there is slurm.sbatch, for Ray ray_launch.py.
"""

import argparse
import ast
import json
import re
import shlex
import sys
from pathlib import Path
from string import Template

import yaml
from node import Line, RefusedError, option, read_line

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
MLFLOW = "mlflow==3.18.0"
# File, the folder where storage that outlives a node is mounted, and what the accelerator is called.
ENGINES = {
    "jobset": ("kubernetes/jobset.yaml", "/runs/", ""),
    "indexed_job": ("kubernetes/indexed_job.yaml", "/runs/", ""),
    "sky": ("sky.yaml", "/runs/", "H100"),
    "air": ("air.yaml", "/Volumes/", "GPU_8xH100"),
}


def strategies(recipe: Path) -> tuple[str, ...]:
    """The launch files that a recipe fits, as its train.py tells the guard."""
    for call in ast.walk(ast.parse((recipe / "train.py").read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "guard.check_launch":
            return tuple(ast.literal_eval(call.args[2]))
    raise RefusedError(f"{recipe}/train.py does not call guard.check_launch.")


def check(line: Line, engine: str, nodes: int, gpus: int, accelerator: str) -> None:
    """Raises RefusedError where the job could not run: strategy, counts, folder, kind of accelerator."""
    fits = strategies(line.recipe)
    if line.launch_file.stem not in fits:
        names = ", ".join(f"{name}.yaml" for name in fits)
        raise RefusedError(f"{line.recipe} does not fit {line.launch_file.name}. It fits accelerate_configs/: {names}.")
    if nodes < 1 or gpus < 1:
        raise RefusedError(f"--nodes {nodes} and --gpus {gpus} must be 1 or more.")
    if line.fixed is not None and (nodes, gpus) != (1, line.fixed):
        raise RefusedError(f"{line.launch_file} is for {line.fixed} GPU of one node; --nodes and --gpus ask for more.")
    if line.cpu:
        raise RefusedError("take `--use_cpu true` out of the launch line: the job file asks for GPUs.")
    place = ENGINES[engine][1]
    if not (option(line.words, "output_dir") or "").startswith(place):
        raise RefusedError(
            f"give --output_dir in the launch line, under {place}: a folder that outlives a node and that all nodes share."
        )
    if engine == "air" and not accelerator.startswith(f"GPU_{gpus}x"):
        raise RefusedError(
            f"--accelerator {accelerator} and --gpus {gpus}: a node of that kind has another number of GPUs."
        )


def requirements(line: Line) -> list[str]:
    """The pins of requirements.txt, and MLflow where the line reports to it."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [pin for pin in lines if pin and not pin.startswith("#")]
    return [*pins, MLFLOW] if "mlflow" in (option(line.words, "report_to") or "") else pins


def render(engine: str, line: Line, **values) -> str:
    """The job file's text. values: name, nodes, gpus, accelerator, image, claim, grace, restarts, timeout, version."""
    check(line, engine, values["nodes"], values["gpus"], values["accelerator"])
    hopper = re.match(r"[HB]\d00\b", values["accelerator"])  # FlashAttention 4 is for these
    files = ["requirements.txt", *(["requirements-hopper.txt"] if hopper else [])]
    values |= {
        "command": shlex.join(line.words),
        "words": json.dumps(line.words),  # JSON is YAML
        "termination": values["grace"] + 60,  # for the preflight and the end of the launcher
        "total": values["nodes"] * values["gpus"],
        "dependencies": json.dumps(requirements(line)),
        "files": " ".join(f"-r {name}" for name in files),
    }
    text = Template((HERE / ENGINES[engine][0]).read_text(encoding="utf-8")).substitute(values)
    list(yaml.safe_load_all(text))
    return text


def main() -> int:
    description, _, text = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="render.py ENGINE [options] accelerate launch ... train.py ...",
        description=description,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
    parser.add_argument("--name", help="name of the job; the recipe's when absent")
    parser.add_argument("--accelerator", help="sky: H100; air: GPU_8xH100, when absent")
    parser.add_argument("--image", default="cookbook:latest", help="Kubernetes: the pushed image of the Dockerfile")
    parser.add_argument("--claim", default="runs", help="Kubernetes: the volume claim; sky: the bucket")
    parser.add_argument("--grace", type=int, default=300, help="seconds for a save after SIGTERM")
    parser.add_argument("--restarts", type=int, default=5, help="how often the engine may start the job again")
    parser.add_argument("--timeout", type=int, default=1440, help="air: minutes of one attempt")
    parser.add_argument("--version", default="6", help="air: version of the environment")
    begin = sys.argv.index("accelerate") if "accelerate" in sys.argv else len(sys.argv)
    args, words = vars(parser.parse_args(sys.argv[1:begin])), sys.argv[begin:]
    engine = args.pop("engine")
    try:
        line = read_line(words)
        args["accelerator"] = args["accelerator"] or ENGINES[engine][2]
        # Names of Kubernetes and of MLflow experiments: letters, digits and hyphens; a dot is refused.
        args["name"] = re.sub(r"[^a-z0-9-]+", "-", (args["name"] or line.recipe.name).lower()).strip("-")
        print(render(engine, line, **args), end="")
    except RefusedError as error:
        print(f"\nerror: {error}\n", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
