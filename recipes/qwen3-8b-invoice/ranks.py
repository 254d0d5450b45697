"""What the ranks of a run say to each other and leave behind: problems, the run record, errors. Version 1.

The same file, to the byte, lies in every recipe folder; `scripts/sync_guard.py FOLDER` brings a copy up to date.

Ranks talk over the process group where there is one, before that over the key-value store of torchrun. A problem on any
rank stops all of them: they exchange what they found, and rank 0 prints one paragraph.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

SECRET = r"hf_\w{8,}|(?<=://)[^@/\s\"]+(?=@)"  # tokens, and what stands before the @ of an address
MARK = "complete.json"  # a checkpoint without it is not whole
RUN: dict = {}  # what this process knows of its run: folder, lock, record, strategy


def environment(name: str, default: int) -> int:
    """An integer of the launcher's environment; RANK decides whether there is a launcher at all."""
    return int(os.environ[name]) if "RANK" in os.environ and name in os.environ else default


def is_main() -> bool:
    return environment("RANK", 0) == 0


def say(text: str) -> None:
    if is_main():
        print(text, flush=True)


def launcher_store(seconds: float) -> dist.Store | None:
    """The key-value store of torchrun's agent, which outlives any rank; None without such a launcher."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
    return dist.PrefixStore(f"guard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def exchange(stage: str, value, patient: bool = False) -> list:
    """Every rank's `value`, in rank order: over the process group where there is one, else over the launcher's store.

    patient: wait a day instead of ten minutes, past any collective timeout (one rank downloads, the others wait).
    """
    world, rank = environment("WORLD_SIZE", 1), environment("RANK", 0)
    if dist.is_initialized() and dist.get_world_size() == world and not patient:
        values = [None] * world
        dist.all_gather_object(values, value)
        return values
    store = launcher_store(24 * 3600 if patient else 600) if world > 1 else None
    if store is None:
        return [value]
    store.set(f"{stage}/{rank}", json.dumps(value))
    values = []
    for other in range(world):
        try:
            values.append(json.loads(store.get(f"{stage}/{other}")))
        except dist.DistError:
            raise TimeoutError(
                f"rank {other} did not answer at the stage `{stage}`: its process ended, or its machine cannot be reached. "
                "Look at the log of that machine; on several machines, at the firewall and at NCCL_SOCKET_IFNAME."
            ) from None
    return values


def agree(stage: str, problem: str | None, patient: bool = False) -> None:
    """All ranks stop where one has a problem; rank 0 prints the first one as one paragraph."""
    found = {rank: text for rank, text in enumerate(exchange(stage, problem, patient)) if text}
    if not found:
        return
    first, world = next(iter(found.values())), environment("WORLD_SIZE", 1)
    if is_main():
        record(outcome="failed", error=first)
        where = "" if len(found) == world else f" (rank {', '.join(map(str, found))} of {world})"
        print(f"\nerror: {first}{where}\n", file=sys.stderr, flush=True)
    if stage not in ("lock", "download"):  # those two may pass by themselves
        refuse(first)
    exchange(f"{stage}/printed", None, patient)  # the launcher stops the others as soon as one leaves
    os._exit(1)


def refuse(text: str) -> None:
    """Leave word for the program that started this launcher (scripts/engines): another start would end the same way."""
    if file := os.environ.get("GUARD_REFUSAL_FILE"):
        Path(file).write_text(text, encoding="utf-8")


def record(**changes) -> None:
    """Update run.json by a rename, so that no reader sees half of it: rank 0, or the rank that failed."""
    if "record" not in RUN or not (is_main() or changes.get("outcome") == "failed"):
        return
    file = RUN["folder"] / "run.json"
    mine = not is_main() or RUN.get("recorded") == file  # not what an earlier start of the run has left
    there = json.loads(file.read_text(encoding="utf-8")) if mine and file.is_file() else {}
    if not is_main():
        RUN["record"] = there
    elif there.get("outcome") == "failed" and "outcome" not in changes:
        return  # another rank has failed since
    RUN["record"].update(changes, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    partial = file.with_name(f"run.json.partial-{environment('RANK', 0)}")
    text = json.dumps(RUN["record"], indent=1, default=str, sort_keys=True)
    partial.write_text(re.sub(SECRET, "***", text), encoding="utf-8")
    os.replace(partial, file)
    RUN["recorded"] = file


def on_exception(kind, error, trace) -> None:
    """Mark the run as failed and print the error of the first rank that fails; the others fail because of it.

    A mistake in the input, found by this recipe's own files, is one paragraph; anything else keeps its traceback.
    """
    try:
        store = launcher_store(10)
        first = store is None or store.add("failed", 1) == 1
    except RuntimeError:  # gone with its machine
        first = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher stops the others as soon as one leaves
    if not first:
        close_files(error)  # the first one may need their room
        return
    full = disk_full(error)
    for _ in range(40):  # 20 s: a rank that is still saving takes the room that was just made, until it fails, too
        try:
            record(outcome="failed", error=full or f"{kind.__name__}: {error}"[:2000])
            break
        except OSError:
            close_files(error)
            time.sleep(0.5)
            disk_full(error)
    last = traceback.extract_tb(trace)[-1].filename
    rank = "" if environment("WORLD_SIZE", 1) == 1 else f" (rank {environment('RANK', 0)})"
    if full:
        print(f"\nerror: {full}{rank}\n", file=sys.stderr, flush=True)
        refuse(full)
    elif issubclass(kind, ValueError | OSError) and Path(last).resolve().parent == Path(__file__).resolve().parent:
        print(f"\nerror: {' '.join(str(error).split())}{rank}\n", file=sys.stderr, flush=True)
        if not issubclass(kind, TimeoutError):  # a machine that did not answer may be back at the next start
            refuse(str(error))
    else:
        print(f"\nerror: the run stopped at this point{rank}:", file=sys.stderr)
        traceback.print_exception(kind, error, trace)
        sys.stderr.flush()


def close_files(error: BaseException | None) -> None:
    """Close what is open where `error` comes from, and what that came from: a removed file takes room until then."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def disk_full(error: BaseException) -> str | None:
    """What to say where `error` comes from a full disk under the run folder; libraries hide the system's reason."""
    folder = RUN.get("folder")
    if folder is None or not folder.is_dir():
        return None
    if not re.search("No space left|[Qq]uota exceeded", str(error)) and shutil.disk_usage(folder).free > 16 * 2**20:
        return None
    cut_off = [path for path in folder.glob("checkpoint-*") if not (path / MARK).exists()]
    for path in cut_off:  # of no use to anybody, and the record below needs room
        shutil.rmtree(path, ignore_errors=True)
    whole = ", ".join(sorted(path.name for path in folder.glob("checkpoint-*"))) or "no checkpoint"
    return (
        f"the disk of output_dir {folder} is full ({type(error).__name__}). Whole there: {whole}. Free some space and give "
        "the same command: it continues from the newest whole checkpoint."
    )
