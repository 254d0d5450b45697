"""Real engines on this machine: two nodes, one is lost in the middle, and the run must come to the same end.

    python scripts/engine_campaign.py --engine slurm --recipe llama-3.2-1b --strategy ddp --event down
    python scripts/engine_campaign.py --engine slurm ray --recipe qwen2.5-3b olmo-3-7b      # each under its own strategy
    python scripts/engine_campaign.py --table          # what docs/engines.json holds, into docs/engines.md

Each cell starts the shipped job file, or the shipped launcher, with a tiny model on two nodes of one process. Then

    down      slurm: node 2 loses power.   ray: the worker of node 2 is killed.
    preempt   slurm: a more urgent job takes both nodes.
    term      slurm: SIGTERM, as before the end of the time limit.
    cut       hosts: node 2 is cut off from the network (two network namespaces; needs root and iproute2)

and the engine, or for `hosts` the same command again, brings the run to its end. A cell passes when it was started again
as often as the event says, the loss of every step is that of one unbroken process (1e-4, fp32), and the weights are those
of an unbroken run on two processes, to the last bit. Needs Debian's `slurm-wlm` and `munge` for slurm, Ray for ray.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import launching
import local_slurm
import psutil
import smoke
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
TABLE, DOCS = ROOT / "docs" / "engines.json", ROOT / "docs" / "engines.md"
MARKS = ("<!-- engine table -->\n", "\n<!-- end of engine table -->")
KILL_AFTER = smoke.SAVE_EVERY  # the first checkpoint


@dataclass
class Cell:
    """What became of one run. `error` is None where everything holds."""

    engine: str
    recipe: str
    strategy: str
    event: str
    starts: int = 0
    resumed_from: int = 0  # step of the checkpoint that the last start found
    loss_deviation: float | None = None  # largest of all steps, relative to one process
    weights_equal: bool | None = None  # to an unbroken run, to the last bit
    seconds: float = 0.0
    error: str | None = None


def launch_line(bench: smoke.Bench, strategy: str, run: Path) -> list[str]:
    """The line that a person would type, with the tiny model; FSDP through fsdp_on_cpu.py."""
    wrapper = ["scripts/fsdp_on_cpu.py"] if strategy == "fsdp" else []
    recipe = os.path.relpath(bench.folder / "train.py", ROOT)
    line = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    return [*line, *wrapper, recipe, "--use_cpu", "true", *bench.arguments(run, 2)]


def starts(run: Path) -> list[dict]:
    """The starts that node.py counted."""
    file = run / "starts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [entry for entry in map(json.loads, lines) if "checkpoint" in entry]


def has_checkpoint(run: Path) -> bool:
    return (run / f"checkpoint-{KILL_AFTER}" / "complete.json").is_file()


def environment(bench: smoke.Bench) -> dict[str, str]:
    return {
        "HF_HOME": str(bench.work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONFAULTHANDLER": "1",  # a rank that is aborted says where it was
        "OMP_NUM_THREADS": "1",  # torchrun's choice for two processes on one machine; sums depend on it in the last bit
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(local_slurm.free_ports(2)[0]),  # node.py listens on the next one
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


# ------------------------------------------------------------------------------------------------------- engines


def by_slurm(cluster: local_slurm.Cluster, bench: smoke.Bench, strategy: str, event: str, run: Path) -> None:
    """slurm.sbatch on the two nodes of `cluster`; returns when the job is completed."""
    cluster.variables |= environment(bench)
    log = run.parent / f"{run.name}.log"
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=10", "--partition=main", f"--output={log}"]
    job = cluster.call("sbatch", *options, "scripts/engines/slurm.sbatch", *launch_line(bench, strategy, run)).strip()

    def under_way():
        if cluster.state(job).split()[0] in ("FAILED", "COMPLETED", "TIMEOUT"):
            raise launching.LaunchError(f"the job ended before its first checkpoint; log: {log}")
        # Slurm takes seconds to preempt, in which a tiny run ends; and the job saves when it is told.
        return launching.metrics(run) if event == "preempt" else has_checkpoint(run)

    cluster.wait(under_way, 400, f"checkpoint; log: {log}", every=0.05)
    if event == "down":
        cluster.take_down("n2")
        cluster.wait(lambda: "down" in cluster.call("sinfo", "-h", "-n", "n2", "-o", "%T"), 200, "node that is down")
        cluster.start_node("n2")
    elif event == "term":
        cluster.call("scancel", "--signal=TERM", job)
    elif event == "preempt":
        line = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=srun sleep 1"]
        cluster.call("sbatch", *line)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    cluster.wait(
        lambda: cluster.state(job).startswith(("PENDING 1", "RUNNING 1", *ended)),
        300,
        f"requeue of the job; log: {log}",
    )
    if cluster.state(job) == "PENDING 1":  # Slurm would begin two minutes later
        time.sleep(2)  # within a second or so its nodes still refuse the job's new credential for the old one
        cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.wait(lambda: cluster.state(job).split()[0] in ended, 500, f"end of the job; log: {log}")
    if (state := cluster.state(job)) != "COMPLETED 1":
        raise launching.LaunchError(f"the job ended as {state}, expected COMPLETED 1; log: {log}")


def by_ray(bench: smoke.Bench, strategy: str, event: str, run: Path) -> str:
    """ray_launch.py on a Ray cluster of two nodes; returns what it printed."""
    from ray.cluster_utils import Cluster

    log = run.parent / f"{run.name}.log"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        variables = os.environ | environment(bench) | {"RAY_ADDRESS": cluster.address}
        command = [sys.executable, "scripts/engines/ray_launch.py", "--nodes", "2", "--restarts", "2"]
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, *launch_line(bench, strategy, run)], cwd=ROOT, env=variables, stdout=output, stderr=output
            )
        if event == "down":
            wait_for(lambda: has_checkpoint(run), process, 150, log)
            kill_node_program(run, rank=1)
        if code := process.wait(150):
            raise launching.LaunchError(f"ray_launch.py ended with exit code {code}; log: {log}")
    finally:
        cluster.shutdown()
    return log.read_text(encoding="utf-8")


def kill_node_program(run: Path, rank: int) -> None:
    """Kill the Ray worker, and all under it, whose node.py has `rank` in the job of this run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(run) not in words or not any(word.endswith("engines/node.py") for word in words):
                continue
            if process.environ().get("NODE_RANK") == str(rank):
                for each in [process.parent(), process, *process.children(recursive=True)]:
                    each.kill()
                return
    raise launching.LaunchError(f"there is no node.py with NODE_RANK {rank} for {run}")


def wait_for(condition, process: subprocess.Popen, seconds: float, log: Path) -> None:
    begun = time.monotonic()
    while not condition():
        if process.poll() is not None or time.monotonic() - begun > seconds:
            raise launching.LaunchError(f"it ended, or took over {seconds:.0f} s; log: {log}")
        time.sleep(0.05)


def by_hosts(bench: smoke.Bench, strategy: str, event: str, run: Path) -> float:
    """node.py in two network namespaces; the cable is cut after the first checkpoint, and the command given again.

    Returns the seconds from the cut to the end of both nodes.
    """
    name, waited = f"c{os.getpid()}", 0.0
    spaces, all_started = [f"{name}a", f"{name}b"], []

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def both() -> list[subprocess.Popen]:
        started = []
        for rank, space in enumerate(spaces):
            place = {
                "NUM_NODES": "2",
                "NODE_RANK": str(rank),
                "MASTER_ADDR": "10.123.0.1",
                "MASTER_PORT": "29500",
                "MEET_SECONDS": "60",
            }
            place |= {"GLOO_SOCKET_IFNAME": f"{name}{rank}", "GRACE_SECONDS": "30"}
            variables = os.environ | environment(bench) | place
            command = ["ip", "netns", "exec", space, sys.executable, "scripts/engines/node.py"]
            command += [*launch_line(bench, strategy, run), "--ddp_timeout", "15"]
            with open(run.parent / f"{run.name}-{rank}.log", "a", encoding="utf-8") as output:
                started.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output))
        all_started.extend(started)
        return started

    try:
        for space in spaces:
            ip("netns", "add", space)
        ip(
            "link",
            "add",
            f"{name}0",
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            f"{name}1",
            "netns",
            spaces[1],
        )
        for rank, space in enumerate(spaces):
            ip("-n", space, "address", "add", f"10.123.0.{rank + 1}/24", "dev", f"{name}{rank}")
            ip("-n", space, "link", "set", f"{name}{rank}", "up")
            ip("-n", space, "link", "set", "lo", "up")
        nodes = both()
        wait_for(lambda: has_checkpoint(run), nodes[0], 120, run.parent / f"{run.name}-0.log")
        ip("-n", spaces[1], "link", "set", f"{name}1", "down")
        begun = time.monotonic()
        codes = [node.wait(150) for node in nodes]
        waited = time.monotonic() - begun
        if codes != [75, 75]:
            raise launching.LaunchError(f"after the cut the nodes ended with {codes}, expected 75; logs: {run.parent}")
        ip("-n", spaces[1], "link", "set", f"{name}1", "up")
        codes = [node.wait(150) for node in both()]
        if codes != [0, 0]:
            raise launching.LaunchError(f"the second start ended with {codes}, expected 0; logs: {run.parent}")
    finally:
        for node in all_started:
            if node.poll() is None:
                for process in psutil.Process(node.pid).children(recursive=True):
                    process.kill()
                node.kill()
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)
    return waited


# ------------------------------------------------------------------------------------------------------- judgement


def judge(cell: Cell, bench: smoke.Bench, run: Path, unbroken: Path | None) -> None:
    """Fill the cell from the run folder. unbroken: final/ of a run that nothing happened to."""
    counted = starts(run)
    cell.starts, cell.resumed_from = len(counted), counted[-1]["checkpoint"]
    pairs = zip(launching.losses(run), bench.reference, strict=True)
    cell.loss_deviation = max(abs(loss / expected - 1) for loss, expected in pairs)
    if unbroken is not None:
        cell.weights_equal = same_weights(run / "final", unbroken)
    outcome = json.loads((run / "run.json").read_text(encoding="utf-8"))["outcome"]
    wrong = []
    if outcome != "done":
        wrong.append(f"outcome {outcome}")
    if cell.loss_deviation > smoke.TOLERANCE[bench.precision]:
        wrong.append(f"loss off by {cell.loss_deviation:.1e}")
    if cell.weights_equal is False:
        wrong.append("other weights than the unbroken run")
    least = 1 if cell.event == "preempt" else KILL_AFTER
    if cell.event != "none" and (cell.starts != 2 or cell.resumed_from < least):
        wrong.append(f"{cell.starts} starts, the last from step {cell.resumed_from}")
    cell.error = "; ".join(wrong) or None


def same_weights(folder: Path, other: Path) -> bool:
    """Whether the safetensors of two folders hold the same tensors, to the last bit."""
    tensors = [{}, {}]
    for found, place in zip(tensors, (folder, other), strict=True):
        for file in sorted(place.glob("*.safetensors")):
            found |= load_file(file)
    first, second = tensors
    return bool(first) and first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def run_cell(engine: str, bench: smoke.Bench, strategy: str, event: str, cluster=None, unbroken=None) -> Cell:
    """One run on an engine, with what happens to it."""
    cell = Cell(engine, bench.folder.name, strategy, event)
    run, begun = bench.work / f"{engine}-{strategy}-{event}", time.monotonic()
    shutil.rmtree(run, ignore_errors=True)  # of another test with this bench
    try:
        if engine == "slurm":
            by_slurm(cluster, bench, strategy, event, run)
        elif engine == "ray":
            by_ray(bench, strategy, event, run)
        else:
            by_hosts(bench, strategy, event, run)
        judge(cell, bench, run, unbroken)
    except (launching.LaunchError, TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
        cell.error = str(error)[-300:]
    cell.seconds = round(time.monotonic() - begun, 1)
    return cell


def table(cells: list[dict]) -> str:
    """The cells as Markdown."""
    heads = ("engine", "recipe", "strategy", "event", "starts", "resumed from step", "loss", "same weights", "")
    rows = [heads, ("---",) * len(heads)]
    for cell in cells:
        loss = f"{cell['loss_deviation']:.0e}" if cell["loss_deviation"] is not None else ""
        row = [
            cell["engine"],
            cell["recipe"],
            cell["strategy"],
            cell["event"],
            cell["starts"],
            cell["resumed_from"],
            loss,
        ]
        rows.append([*row, {True: "yes", False: "no", None: ""}[cell["weights_equal"]], cell["error"] or "OK"])
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def read_table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {"machine": "", "cells": []}


def keep(cell: Cell) -> None:
    """Write the cell into docs/engines.json, in place of an earlier one of the same run."""
    kept, key = read_table(), (cell.engine, cell.recipe, cell.strategy, cell.event)
    others = [old for old in kept["cells"] if tuple(old.values())[:4] != key]
    kept["cells"] = sorted([*others, asdict(cell)], key=lambda old: tuple(old.values())[:4])
    kept["machine"] = f"{os.cpu_count()} CPU cores, no GPU; {time.strftime('%Y-%m-%d')}; torch {torch.__version__}"
    TABLE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    write_docs(kept)


def docs_table(kept: dict) -> str:
    return (
        f"{table(kept['cells'])}\n\n`loss`: largest deviation of a step from one unbroken process. {kept['machine']}."
    )


def write_docs(kept: dict) -> None:
    """Put the table into docs/engines.md, between its marks."""
    before, rest = DOCS.read_text(encoding="utf-8").split(MARKS[0])
    DOCS.write_text(before + MARKS[0] + docs_table(kept) + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


def main() -> int:
    description, _, text = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", choices=("slurm", "ray", "hosts"), default=["slurm"])
    parser.add_argument("--recipe", nargs="+", default=["llama-3.2-1b"])
    parser.add_argument("--strategy", nargs="+", choices=launching.STRATEGIES[1:], help="default: the recipe's own")
    parser.add_argument("--event", default="down", choices=("down", "preempt", "term", "cut"))
    parser.add_argument("--table", action="store_true", help="print the kept results, and run nothing")
    args = parser.parse_args()
    if args.table:
        write_docs(read_table())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cells = [cell for recipe in args.recipe for cell in run_recipe(recipe, args.strategy, args.engine, args.event)]
    print(table(cells))
    return int(any(cell["error"] for cell in cells))


def run_recipe(recipe: str, strategies: list[str] | None, engines: list[str], event: str) -> list[dict]:
    """The cells of one recipe, under those of the strategies that fit it; kept one by one. They share the plain runs."""
    cells, folder = [], ROOT / "recipes" / recipe
    strategies = strategies or [launching.own_strategy(folder)]
    with tempfile.TemporaryDirectory(prefix="engines-") as work:
        bench = smoke.Bench(folder, Path(work) / "bench")
        for strategy in [name for name in strategies if name in smoke.fitting(folder)]:
            unbroken = bench.work / f"unbroken-{strategy}"
            result = bench.launch(strategy, unbroken, 2, bench.work / f"unbroken-{strategy}.log")
            if result.rc:
                raise launching.LaunchError(f"the unbroken run fails: {smoke.reason(result.output)}")
            for engine in engines:
                with contextlib.ExitStack() as stack:
                    cluster = local_slurm.Cluster(Path(work) / f"slurm-{strategy}") if engine == "slurm" else None
                    if cluster:
                        stack.callback(cluster.stop)
                    cell = run_cell(engine, bench, strategy, event, cluster, unbroken / "final")
                    if cell.error:
                        logs = [*bench.work.glob(f"{engine}-*.log"), *bench.work.glob(f"{engine}-*/starts.jsonl")]
                        for log in [*logs, *Path(work).glob("slurm-*/slurmctld.log")]:
                            print(log.read_text(encoding="utf-8", errors="replace")[-6000:])
                keep(cell)
                cells.append(asdict(cell))
                print(table(cells[-1:]).splitlines()[-1], flush=True)
    return cells


if __name__ == "__main__":
    sys.exit(main())
