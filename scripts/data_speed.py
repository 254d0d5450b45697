"""Measure inspection and preparation at several numbers of rows; writes docs/data_speed.json.

    python scripts/data_speed.py models/tiny-llama --rows 1000 100000 1000000

For each number, made-up chats of very uneven length go through prepare_data.py (nothing cached) and inspect_data.py
(tokens cached by then), each a process of its own. A few rows go before, so rates do not count the start of a program.
Peak memory is what the process holds for itself (RssAnon in /proc/self/status, program and libraries included); pages
of mapped files are the system's to take back.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import launching
from bars import track

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "recipes" / "llama-3.2-1b"


def write_rows(path: Path, count: int) -> None:
    """Chats of one question and one answer; the words are random."""
    draw = random.Random(0)
    known = [a + b for a in launching.WORDS for b in launching.WORDS] + list(launching.WORDS)

    def text(words: int) -> str:
        return " ".join(draw.choices(known, k=words))

    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            question = f"{number} {text(draw.randint(5, 40))}"
            messages = [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": text(draw.choice((1, 8, 20, 80)))}]
            file.write(json.dumps({"id": number, "messages": messages}) + "\n")


def run_one(program: str, words: list[str], warm: list[str]) -> None:
    """In a process of its own: once on a few rows for what happens once, then timed; prints seconds and peak memory."""
    main = importlib.import_module(program).main
    if main(warm):
        sys.exit(1)
    peak, done = [0.0], threading.Event()

    def watch():
        while not done.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak[0] = max(peak[0], *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

    watcher, started = threading.Thread(target=watch), time.monotonic()
    watcher.start()
    failed = main(words)
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    print("\n" + json.dumps({"seconds": round(seconds, 1), "private_gib": round(peak[0] / 2**20, 2)}))
    sys.exit(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config and tokenizer")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument(
        "--work", type=Path, help="folder for rows and caches, removed afterwards; about 8 GB a million"
    )
    parser.add_argument("--output", type=Path, default=SCRIPTS.parent / "docs" / "data_speed.json")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.output.read_text())["results"] if arguments.output.is_file() else []
    results = {result["rows"]: result for result in earlier}
    for count in track(arguments.rows, "sizes"):
        work = Path(tempfile.mkdtemp(dir=arguments.work))
        try:
            write_rows(work / "rows.jsonl", count)
            write_rows(work / "few.jsonl", 40)
            variables = os.environ | {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
            result = {"rows": count}
            for name, program in (("preparation", "prepare_data"), ("inspection", "inspect_data")):
                lists = []
                for rows in ("rows", "few"):
                    own = [str(work / f"prepared-{rows}")] if name == "preparation" else ["--show", "0"]
                    data = ["--model_name_or_path", str(arguments.model), "--dataset_name", str(work / f"{rows}.jsonl")]
                    lists.append([str(RECIPE), *own, *data])
                command = [sys.executable, __file__, "--one", program, json.dumps(lists)]
                done = subprocess.run(command, env=variables, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"data_speed.py: {program} failed: {done.stderr[-2000:]}")
                measured = json.loads(done.stdout.splitlines()[-1])
                result[name] = measured | {"rows_per_second": round(count / measured["seconds"])}
            results[count] = result
            print(json.dumps(result), flush=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        names = ("torch", "transformers", "trl", "datasets")
        document = {
            "recipe": RECIPE.name,
            "vocabulary": len(json.loads((arguments.model / "tokenizer.json").read_text())["model"]["vocab"]),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "load": [round(load, 1) for load in os.getloadavg()],
            "date": time.strftime("%Y-%m-%d"),
            "versions": {name: importlib.metadata.version(name) for name in names},
            "results": [results[key] for key in sorted(results)],
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], *json.loads(sys.argv[3]))
    main()
