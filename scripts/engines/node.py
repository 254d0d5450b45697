"""Starts one launch line on this node of a job; the same line on every node, whatever engine placed it there.

    python scripts/engines/node.py accelerate launch --config_file accelerate_configs/fsdp.yaml \
        recipes/gpt-oss-120b/train.py --output_dir /shared/run

The engine (Slurm, Kubernetes, Ray, SkyPilot, Databricks AI Runtime, or a person) says in the environment where it is:

    NUM_NODES, NODE_RANK      how many nodes, and which of them this is (1 and 0 when absent; SLURM_NODEID also serves)
    MASTER_ADDR, MASTER_PORT  address of node 0 as the others reach it, and a port; the next port is used as well
    PROCESSES_PER_NODE        fewer processes than there are visible GPUs (with `--use_cpu true`: 1 when absent)
    GRACE_SECONDS             what the engine gives between SIGTERM and SIGKILL; 300 when absent
    MEET_SECONDS              how long the nodes wait for each other; 600 when absent

Before the launch the nodes meet: a wrong address, a rank that stands twice, other versions or files, or an output folder
that is not shared stops all of them with one paragraph that names the node. Afterwards the outcome is read from run.json,
because `accelerate launch` always returns 1:

    exit code 0    done
    exit code 75   stopped, lost a node or was taken away: the same command continues from the newest whole checkpoint
    exit code 78   wrong in itself: another start would end the same way

Each start and each end is a line of RUN/starts.jsonl. After `--max_restarts` restarts in a row that brought no new
checkpoint the exit code is 78.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import yaml

DONE, RESTART, REFUSED = 0, 75, 78  # EX_TEMPFAIL and EX_CONFIG of sysexits.h
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "datasets", "bitsandbytes")
OURS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes")
LEFT_OUT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")  # engines set them, torchrun's count
# What a rank says when it is another one, or the network, that is gone; hardware that a new node would not have.
LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|gloo|NCCL|DistBackendError|DistNetworkError|DistStoreError|TimeoutError"
    r"|[Tt]imed? ?out|did not answer|\bECC\b|unspecified launch failure|NVLink|CUDA error: (unknown|hardware)",
)


class RefusedError(Exception):
    """What is wrong in itself, in one paragraph."""

    code = REFUSED


class UnmetError(RefusedError):
    """A node that did not come, which may be there at the next start."""

    code = RESTART


@dataclass
class Place:
    """Where this node stands in its job."""

    rank: int
    nodes: int
    address: str
    port: int
    grace: float  # seconds between SIGTERM and SIGKILL
    meet: float  # seconds that the nodes wait for each other


@dataclass
class Line:
    """A launch line: its words, and what they name."""

    words: list[str]
    launch_file: Path
    recipe: Path
    output_dir: Path
    cpu: bool
    fixed: int | None  # processes, where the launch file says so itself (single.yaml)


def read_place(variables=os.environ) -> Place:
    """The place that the engine gave. Raises RefusedError where its variables are missing or contradict each other."""
    try:
        nodes = int(variables.get("NUM_NODES") or 1)
        rank = int(variables.get("NODE_RANK") or variables.get("SLURM_NODEID") or 0)
        port = int(variables.get("MASTER_PORT") or 29500)
        grace, meet = float(variables.get("GRACE_SECONDS") or 300), float(variables.get("MEET_SECONDS") or 600)
    except ValueError as error:
        raise RefusedError(f"NUM_NODES, NODE_RANK and MASTER_PORT must be whole numbers: {error}.") from None
    if not 0 <= rank < nodes:
        raise RefusedError(f"{host()} has NODE_RANK {rank} of NUM_NODES {nodes}. Ranks go from 0 to {nodes - 1}.")
    address = variables.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else "")
    if not address:
        raise RefusedError("MASTER_ADDR is not set: with several nodes it is the address of the one with NODE_RANK 0.")
    return Place(rank, nodes, address, port, grace, meet)


def host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def option(words: list[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one where it stands twice."""
    value = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        key, equals, attached = word.partition("=")
        if key.replace("-", "_") == f"__{name}":
            value = attached if equals else following
    return value


def read_line(words: list[str]) -> Line:
    """What a launch line names. Raises RefusedError where it is none, or counts processes that the engine counts."""
    if words[:2] != ["accelerate", "launch"]:
        raise RefusedError("the launch line must begin with `accelerate launch`, as on one machine.")
    places = [place for place, word in enumerate(words) if Path(word).name == "train.py"]
    if not places:
        raise RefusedError(f"`{' '.join(words)}` starts no recipe: a path that ends with train.py is missing.")
    ours, given = words[2 : places[0]], words[places[0] + 1 :]
    recipe, file = Path(words[places[0]]).parent, Path(option(ours, "config_file") or "")
    for path in (recipe / "train.py", file):
        if not path.is_file():
            raise RefusedError(f"there is no file `{path}` on {host()} (working directory {Path.cwd()}).")
    if typed := [name for name in OURS if option(ours, name) is not None]:
        raise RefusedError(
            f"take --{typed[0]} out of the launch line: nodes and processes are counted once, by the engine. For fewer "
            "processes than GPUs set PROCESSES_PER_NODE."
        )
    config = recipe / f"{(option(given, 'config') or 'config').removesuffix('.yaml')}.yaml"
    if named := option(given, "config"):
        config = Path(named) if Path(named).is_file() else config
    if not config.is_file():
        raise RefusedError(f"--config: there is no file `{config}` on {host()}.")
    folder = option(given, "output_dir")
    if folder is None:  # a path in the config file is relative to that file
        folder = config.parent / yaml.safe_load(config.read_text(encoding="utf-8"))["output_dir"]
    fixed = yaml.safe_load(file.read_text(encoding="utf-8")).get("num_processes")
    cpu = (option(given, "use_cpu") or "").lower() == "true"
    return Line(words, file, recipe, Path(folder), cpu, fixed if isinstance(fixed, int) else None)


def count_processes(line: Line, place: Place, variables=os.environ) -> int:
    """Processes on this node. Raises RefusedError where there is nothing to run them on."""
    if line.fixed is not None:
        if place.nodes > 1:
            raise RefusedError(
                f"{line.launch_file} is for {line.fixed} process, and the job has {place.nodes} nodes. Take another of "
                "accelerate_configs/, for example ddp.yaml."
            )
        return line.fixed
    if asked := variables.get("PROCESSES_PER_NODE"):
        return int(asked)
    if line.cpu:
        return 1
    import torch

    if not (gpus := torch.cuda.device_count()):
        raise RefusedError(f"no GPU is visible on {host()}. To train on the CPU on purpose add `--use_cpu true`.")
    return gpus


def launch_words(line: Line, place: Place, processes: int) -> list[str]:
    """The line with the engine's numbers in it."""
    numbers = {
        "num_machines": place.nodes,
        "machine_rank": place.rank,
        "main_process_ip": place.address,
        "main_process_port": place.port,
        "num_processes": place.nodes * processes,
    }
    if place.nodes == 1:
        numbers = {"num_processes": processes, "main_process_port": place.port}
    flags = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags, *line.words[2:]]


# ------------------------------------------------------------------------------------------- the nodes meet


def facts(line: Line, processes: int) -> dict[str, str]:
    """What must be the same on every node: versions, the line, processes, and the files that it names, by content."""
    same = {"python": platform.python_version(), "launch line": " ".join(line.words), "processes": str(processes)}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            same[name] = importlib.metadata.version(name)
    files = [path for kind in ("*.py", "*.yaml", "*.json", "*.jinja") for path in line.recipe.glob(kind)]
    settings = yaml.safe_load(line.launch_file.read_text(encoding="utf-8"))
    files += [line.launch_file, Path((settings.get("deepspeed_config") or {}).get("deepspeed_config_file", ""))]
    for path in files:
        if path.is_file():
            same[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return same


def unlike(first: dict, other: dict) -> str:
    """How `other` differs from `first`: at most four things, each with both values."""
    keys = [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
    told = [f"{key} is {other.get(key, 'absent')} instead of {first.get(key, 'absent')}" for key in sorted(keys)[:4]]
    return "; ".join(told) + (f"; and {len(keys) - 4} more" if len(keys) > 4 else "")


def open_store(place: Place):
    """A key-value store on node 0, on the port after MASTER_PORT; the other nodes wait for it.

    Raises RefusedError where node 0 cannot open it, and UnmetError where it cannot be reached.
    """
    from torch.distributed import DistError, TCPStore

    port, begun = place.port + 1, time.monotonic()
    while True:
        try:
            resolved = socket.getaddrinfo(place.address, port, type=socket.SOCK_STREAM)[0][4][0]
            if place.rank:  # TCPStore itself would print a trace each time
                socket.create_connection((resolved, port), timeout=5).close()
            break
        except OSError as error:  # a name, too, may be known only when its node is there
            if time.monotonic() - begun > place.meet:
                raise UnmetError(
                    f"{host()} (NODE_RANK {place.rank}) cannot reach MASTER_ADDR {place.address}, port {port}, after "
                    f"{place.meet:.0f} s ({error}). The address is wrong, node 0 did not start, or a firewall or another "
                    "network interface is between them."
                ) from None
        time.sleep(0.5)
    if place.rank == 0:
        with socket.socket(socket.AF_INET6 if ":" in resolved else socket.AF_INET) as own:
            try:
                own.bind((resolved, 0))
            except OSError:
                raise RefusedError(
                    f"{host()} has NODE_RANK 0, but MASTER_ADDR {place.address} ({resolved}) is no address of it: the rank "
                    "or the address belongs to another node."
                ) from None
    try:
        return TCPStore(resolved, port, None, place.rank == 0, timedelta(seconds=place.meet))
    except DistError as error:
        if place.rank:
            raise UnmetError(f"{host()} lost node 0 ({place.address}) while the nodes met: {error}") from None
        raise RefusedError(
            f"port {port} of {host()} (MASTER_PORT + 1) is in use: by another job, or by a second node with NODE_RANK 0 on "
            f"this machine. Set another MASTER_PORT. ({str(error)[:120]})"
        ) from None


def meet(place: Place, line: Line, same: dict[str, str], problem: str | None) -> list[str]:
    """All nodes come together once; returns their host names in rank order.

    problem: what node 0 found by itself. Raises RefusedError on every node where there is one, or where a node stands
    twice, differs, or has another output folder; UnmetError where one is missing.
    """
    if place.nodes == 1:
        if problem:
            raise RefusedError(problem)
        return [host()]
    from torch.distributed import DistError

    store, met = open_store(place), []
    try:
        number = store.add("nodes", 1)
        if number > place.nodes:
            raise RefusedError(
                f"{host()} is node number {number} of NUM_NODES {place.nodes}: two jobs share MASTER_PORT."
            )
        store.set(f"node {number}", json.dumps([place.rank, host(), same]))
        if place.rank == 0:
            store.set("node 0 found", problem or "")
        for other in range(1, place.nodes + 1):
            met.append(json.loads(store.get(f"node {other}")))
        met.sort(key=lambda node: node[:2])
        found = store.get("node 0 found").decode() or twice_problem(place, met) or unlike_problem(met)
        found = found or shared_folder_problem(store, place, line.output_dir, met)
        if store.add("left", 1) == place.nodes:
            store.set("all left", "")
        if place.rank == 0:  # the store lives here
            store.wait(["all left"], timedelta(seconds=place.meet))
    except DistError as error:
        here = ", ".join(f"{name} with NODE_RANK {rank}" for rank, name, _ in met)
        raise UnmetError(
            f"after {place.meet:.0f} s {len(met)} of {place.nodes} nodes have come: {here}. Look at the log of the others. "
            f"({str(error)[:120]})"
        ) from None
    if found:
        raise RefusedError(found)
    return [name for _, name, _ in met]


def twice_problem(place: Place, met: list) -> str | None:
    """Whether two nodes carry the same rank."""
    ranks = [rank for rank, _, _ in met]
    missing = [str(rank) for rank in range(place.nodes) if rank not in ranks]
    if not missing:
        return None
    names = ", ".join(f"{name} (NODE_RANK {rank})" for rank, name, _ in met if ranks.count(rank) > 1)
    return f"{names} carry the same rank, and no node has NODE_RANK {', '.join(missing)}. Read it on each node itself."


def unlike_problem(met: list) -> str | None:
    """Which nodes differ from node 0, and in what."""
    different = [f"{name}: {unlike(met[0][2], other)}" for _, name, other in met if other != met[0][2]]
    return f"not the same as on {met[0][1]}: {'. '.join(different)}." if different else None


def shared_folder_problem(store, place: Place, folder: Path, met: list) -> str | None:
    """Whether all nodes see the output folder of node 0: checkpoints cut over local disks cannot be put together."""
    if place.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".shared-{secrets.token_hex(8)}"  # a new name: no network file system has cached it as absent
        mark.touch()
        store.set("token", str(mark.absolute()))
    written, begun = Path(store.get("token").decode()), time.monotonic()
    while not (seen := (folder / written.name).exists()) and time.monotonic() - begun < min(10, place.meet / 3):
        time.sleep(0.2)
    store.set(f"seen {place.rank}", "yes" if seen else str(folder.absolute()))
    found = [store.get(f"seen {rank}").decode() for rank in range(place.nodes)]
    if place.rank == 0:
        mark.unlink()
    blind = [f"{met[rank][1]} ({path})" for rank, path in enumerate(found) if path != "yes"]
    if not blind:
        return None
    return (
        f"output_dir is not shared: what {met[0][1]} writes into {written.parent} is not seen by {', '.join(blind)}. Give "
        "an --output_dir on a file system that all nodes share."
    )


# ------------------------------------------------------------------------------------------- the outcome


def read_record(folder: Path) -> dict:
    """run.json, or {} where there is none."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint that carries its mark, or 0."""
    marks = [path.parent.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*/complete.json")]
    return max((int(step) for step in marks if step.isdigit()), default=0)


def is_lost(record: dict) -> bool:
    """Whether a run.json of outcome `failed` tells of a node or a network that went away, not of a mistake."""
    return bool(LOST.search(str(record.get("error"))))


def judge(folder: Path, starts_before: int, refusal: str, code: int) -> tuple[int, str]:
    """The exit code for the engine and its reason, from run.json and what the guard left.

    starts_before: how many starts run.json counted before this launch. refusal: what the guard refused, or "".
    code: the launcher's exit code, of which nothing but 0 means anything.
    """
    record = read_record(folder)
    outcome, opened = record.get("outcome"), len(record.get("started", [])) > starts_before
    if outcome == "done" and (opened or code == 0):
        return DONE, "done"
    if refusal:
        return REFUSED, refusal
    if not opened and code == 2:
        return REFUSED, "accelerate does not know a flag of the launch line"
    if not opened:
        return RESTART, "stopped before the run was opened"
    if outcome == "failed" and not is_lost(record):
        return REFUSED, str(record.get("error"))
    if outcome == "failed":
        return RESTART, f"a rank or the network was lost: {record.get('error')}"
    return RESTART, "preempted, checkpoint written" if outcome == "preempted" else "its processes died"


def stalled_problem(folder: Path, allowed: int) -> str | None:
    """Whether the run was restarted `allowed` times in a row and brought no new checkpoint."""
    file, step, restarts = folder / "starts.jsonl", newest_checkpoint(folder), 0
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for entry in map(json.loads, reversed(lines)):
        if entry.get("exit_code") in (DONE, REFUSED) or entry.get("checkpoint", step) != step:
            break
        restarts += "checkpoint" in entry
    if restarts <= allowed:
        return None
    return (
        f"{folder} was restarted {allowed} times in a row and no new checkpoint came (newest: step {step}; last error: "
        f"{read_record(folder).get('error', 'none recorded')}). Look at the logs before you start it again."
    )


def note(folder: Path, **entry) -> None:
    """Add a line to RUN/starts.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as text:
        text.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **entry}) + "\n")


def wait_for_lock(folder: Path, seconds: float) -> None:
    """Wait until no process of an earlier start holds the run: one that was told to stop may still be saving."""
    begun = time.monotonic()
    while (folder / ".lock").is_file() and time.monotonic() - begun < seconds:
        with open(folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(1)
            except OSError:  # a file system without locks
                return


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when this program is killed, so that no launcher trains on, holding the run's lock."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def run(line: Line, place: Place, processes: int) -> tuple[int, str]:
    """Start the launch line, hand a SIGTERM on to it once, wait for it, and judge what became of the run."""
    record = read_record(line.output_dir)
    if 2 * record.get("save_seconds", 0) > place.grace:
        print(
            f"warning: a save took {record['save_seconds']} s, and {place.grace:.0f} s after a SIGTERM everything is "
            f"killed. Set GRACE_SECONDS, and the engine's own time, to {4 * record['save_seconds']:.0f} or more.",
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix="node-") as work:
        refusal = Path(work) / "refusal"
        variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        variables |= {"GUARD_REFUSAL_FILE": str(refusal), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(0.9 * place.grace))}
        launcher = subprocess.Popen(
            launch_words(line, place, processes), env=variables, preexec_fn=die_with_parent, start_new_session=True
        )

        def hand_on(*_):
            for number in (signal.SIGTERM, signal.SIGINT):  # torchrun waits for its ranks, until a third signal comes
                signal.signal(number, signal.SIG_IGN)
            launcher.send_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, hand_on)
        signal.signal(signal.SIGINT, hand_on)
        code = launcher.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begun, before = time.monotonic(), len(record.get("started", []))
        said = refusal.read_text(encoding="utf-8") if refusal.is_file() else ""
        while place.rank and not said and time.monotonic() - begun < 10:
            if read_record(line.output_dir).get("outcome") != "running":
                break
            time.sleep(0.5)  # rank 0, on another node, may still be writing it
        return judge(line.output_dir, before, said, code)


def main() -> int:
    description, _, text = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_restarts", type=int, default=5, help="restarts in a row without a new checkpoint")
    parser.add_argument("line", nargs=argparse.REMAINDER, help="accelerate launch ... train.py ...")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(RESTART))  # until something runs that could be saved
    folder = None
    try:
        place = read_place()
        line = read_line([word for word in args.line if word != "--"])
        processes, problem = count_processes(line, place), None
        if place.rank == 0:
            folder, problem = line.output_dir, stalled_problem(line.output_dir, args.max_restarts)
            wait_for_lock(folder, place.grace)
            note(folder, host=host(), nodes=place.nodes, checkpoint=newest_checkpoint(folder))
        hosts = meet(place, line, facts(line, processes), problem)
        print(f"node {place.rank} of {place.nodes} ({', '.join(hosts)}), {processes} process(es) a node", flush=True)
        code, reason = run(line, place, processes)
        ending = {DONE: "done", RESTART: "to be restarted", REFUSED: "not to be restarted"}[code]
        print(f"node {place.rank} of {place.nodes} ({host()}): {ending}: {reason}", flush=True)
    except RefusedError as error:
        print(f"\nerror: {error}\n", file=sys.stderr, flush=True)
        code, reason = error.code, str(error)
    if folder is not None:
        note(folder, exit_code=code, reason=reason[:500])
    return code


if __name__ == "__main__":
    sys.exit(main())
