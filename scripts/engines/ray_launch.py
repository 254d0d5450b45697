"""Starts one launch line on the nodes of a Ray cluster, through Ray Train; failures continue from the last checkpoint.

    python scripts/engines/ray_launch.py --nodes 2 --gpus 8 accelerate launch \
        --config_file accelerate_configs/fsdp.yaml recipes/gpt-oss-120b/train.py --output_dir /shared/run

On a cluster that runs (RAY_ADDRESS, or `ray job submit`), or else on this machine alone. The cookbook, its environment and
the output folder must lie at the same path on every node. One Ray worker a node starts node.py, which starts the line;
each logged step is reported to Ray. Needs `pip install -r requirements-ray.txt`.
When not: Ray places, watches and restarts the processes, and nothing more; without a Ray cluster the plain line is enough.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from node import DONE, REFUSED, RESTART, RefusedError, read_line


def new_lines(file: Path, since: float, told: int) -> list[dict]:
    """The steps in metrics.jsonl that were logged after `since` (seconds), without the first `told` of them."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["time"] > since][told:]


def free_ports() -> int:
    """A port of this machine that is free, as is the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def work(job: dict) -> dict:
    """What runs on each node: node.py with the launch line; its metrics go to Ray. Returns the outcome.

    Raises RuntimeError where another start continues the run: Ray then starts all nodes again.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    sys.path.insert(0, job["engines"])  # Ray sends this function alone
    from node import die_with_parent

    context = ray.train.get_context()
    rank, nodes = context.get_world_rank(), context.get_world_size()
    mine = [ray.util.get_node_ip_address(), free_ports(), time.time()] if rank == 0 else None
    address, port, since = broadcast_from_rank_zero(mine)
    place = {"NUM_NODES": nodes, "NODE_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    variables = os.environ | job["variables"] | {name: str(value) for name, value in place.items()}
    command = [sys.executable, f"{job['engines']}/node.py", "--max_restarts", str(job["restarts"]), *job["words"]]
    node = subprocess.Popen(command, cwd=job["root"], env=variables, preexec_fn=die_with_parent)
    told, code = 0, None
    while True:
        ended = node.poll() is not None  # asked first: what was logged before the end is then on disk
        for entry in new_lines(Path(job["metrics"]), since, told):
            ray.train.report(entry)  # every node reports every line: Ray waits for all of them
            told += 1
        if ended:
            break
        time.sleep(0.5)
    code = node.returncode
    if code not in (DONE, REFUSED):
        raise RuntimeError(
            f"node {rank} of {nodes} ended with exit code {code}: the run continues from its last checkpoint"
        )
    return {"exit_code": code}


def launch(words: list[str], nodes: int, gpus: int, restarts: int, variables: dict[str, str]) -> int:
    """Run the line on `nodes` Ray nodes with `gpus` GPUs each; returns the exit code of node.py."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchConfig, TorchTrainer

    class Progress(UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            entry = metrics[0]
            told = ", ".join(
                f"{key} {entry[key]:.4g}" for key in ("loss", "eval_loss", "learning_rate") if key in entry
            )
            print(f"step {entry['step']}: {told}", flush=True)

    line = read_line(words)
    folder = line.output_dir.resolve()
    job = {"words": words, "root": os.getcwd(), "metrics": str(folder / "metrics.jsonl"), "restarts": restarts}
    job["engines"] = str(Path(__file__).resolve().parent)
    job |= {"variables": variables}
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    trainer = TorchTrainer(
        work,
        train_loop_config=job,
        torch_config=TorchConfig(backend="gloo"),  # the ranks make their own groups; this one only joins the nodes
        scaling_config=ScalingConfig(
            num_workers=nodes,
            use_gpu=not line.cpu,
            resources_per_worker={"CPU": 1} if line.cpu else {"GPU": gpus},
            placement_strategy="STRICT_SPREAD" if nodes > 1 else "PACK",
        ),
        run_config=RunConfig(
            name=f"{line.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=restarts, controller_failure_limit=restarts),
            callbacks=[Progress()],
        ),
    )
    try:
        return trainer.fit().return_value["exit_code"]
    except ray.train.TrainingFailedError as error:
        print(f"\nerror: Ray gave up: {str(error)[:500]}\n", file=sys.stderr)
        return RESTART


def main() -> int:
    description, _, text = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
    parser.add_argument("--restarts", type=int, default=5, help="how often Ray may start the job again")
    parser.add_argument("line", nargs=argparse.REMAINDER, help="accelerate launch ... train.py ...")
    args = parser.parse_args()
    passed_on = {
        name: value for name, value in os.environ.items() if name.startswith(("HF_", "NCCL_", "GLOO_", "GRACE_"))
    }
    try:
        code = launch([word for word in args.line if word != "--"], args.nodes, args.gpus, args.restarts, passed_on)
    except ImportError as error:
        print(f"\nerror: {error}. Ray is optional: pip install -r requirements-ray.txt\n", file=sys.stderr)
        return REFUSED
    except RefusedError as error:
        print(f"\nerror: {error}\n", file=sys.stderr)
        return error.code
    print({DONE: "done", REFUSED: "failed; another start would end the same way"}.get(code, "not finished"), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
