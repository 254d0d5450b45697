"""What helps on real receipts, chosen without the test receipts: SmolLM2-135M-Instruct, recipes/qwen3-8b-invoice, SROIE.

    python scripts/sroie_study.py MODEL DATA WORK
    python scripts/sroie_study.py MODEL DATA WORK --stages candidates curve
    python scripts/sroie_study.py MODEL DATA WORK --stages final timing   # the candidates are in WORK/sroie_study.json
    python scripts/sroie_study.py MODEL DATA WORK --rehearse              # seconds a cell, on the CPU

MODEL and DATA are those of sroie.py. The stages:

- candidates: every one of CANDIDATES is trained on 500 training receipts and scored on the other 126. Cells
  that stand in WORK/sroie_study.json are not measured again, here and in the next two.
- final: the best candidate with three seeds on the 500, and with three seeds on all training receipts. On the 126 it is
  decided whether one model, the mean of the three weights (their average model), or the vote of the three is the
  result. All are scored once on the test receipts, with and without near duplicates, freely and held to the schema;
  and what predict.py flags.
- curve: the plain setting on 50, 100, 200, 400 and all training receipts, nested, at least 120 steps each.
- adapters: the plain setting as LoRA and as QLoRA; "all receipts" of the curve is the same with all weights.
- timing: 40 steps of each of the three alone on the GPU, for the time of a step.

Cells run side by side, --workers of them on every visible GPU. A cell that fails, or that --minutes leaves no time for,
is written down and the rest goes on. WORK/sroie_study.json is written anew after every cell;
scripts/sroie_figure.py draws it.
"""

import argparse
import itertools
import json
import math
import os
import platform
import queue
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

import sroie_rows
import torch
from safetensors.torch import load_file, save_file

ROOT = sroie_rows.ROOT
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
from field_scores import read_reply, score_replies  # noqa: E402 sroie_rows puts the recipe on the path
from field_values import is_absent, same_value  # noqa: E402
from invoice import load_schema  # noqa: E402
from value_flags import field_paths, flag_values  # noqa: E402

SCHEMA = RECIPE / "schema_receipt.json"
COLUMNS = ["--text_column", "text", "--target_column", "entities"]
PLAIN = {"learning_rate": 3e-4, "epochs": 6, "batch": 16}  # sroie.py's setting, taken before anything was measured
# name: (what it changes, its setting, how its rows are made)
CANDIDATES = {
    "plain": ("nothing", {}, {}),
    "rate 5e-4": ("learning rate", {"learning_rate": 5e-4}, {}),
    "rate 1e-3": ("learning rate", {"learning_rate": 1e-3}, {}),
    "batch 8": ("batch, so twice the steps", {"batch": 8}, {}),
    "12 epochs": ("epochs, learning rate", {"epochs": 12, "learning_rate": 5e-4}, {}),
    "neftune": ("noise on the embeddings, NEFTune 5", {"neftune": 5}, {}),
    "clean": ("training rows whose labels all stand in the text", {}, {"clean": True}),
    "order": ("order of the fields: total, date, company, address", {}, {"order": True}),
    "worn": ("two copies of each row with lines lost and misread", {"epochs": 3}, {"copies": 2}),
    "swapped": ("two copies with other entities in text and answer", {"epochs": 3}, {"copies": 2, "entities": True}),
    "swapped, longer": (
        "the same, more and faster steps",
        {"epochs": 5, "learning_rate": 5e-4},
        {"copies": 2, "entities": True},
    ),
    "long": ("clean, batch 8, more epochs", {"batch": 8, "epochs": 10}, {"clean": True}),
    "long, neftune": ("long, and noise on the embeddings", {"batch": 8, "epochs": 10, "neftune": 5}, {"clean": True}),
    "swapped, clean": (
        "swapped and clean, more and faster steps",
        {"epochs": 5, "learning_rate": 5e-4},
        {"copies": 2, "entities": True, "clean": True},
    ),
}
ORDER = ["total", "date", "company", "address"]
SEEDS = (42, 43, 44)
SIZES = (50, 100, 200, 400)
LORA = ["--learning_rate", "1e-3"]  # about three times the rate of all weights, taken beforehand


class Study:
    """One campaign: its rows, its machine, and the report that grows with every cell."""

    def __init__(self, arguments: argparse.Namespace):
        self.model, self.work, self.rehearse = arguments.model.absolute(), arguments.work.absolute(), arguments.rehearse
        self.work.mkdir(parents=True, exist_ok=True)
        self.schema = load_schema(SCHEMA)
        data = arguments.data.absolute()
        self.train_rows, self.test_rows = (read_rows(data / f"{name}.jsonl") for name in ("train", "test"))
        if self.rehearse:
            self.train_rows, self.test_rows = self.train_rows[:24], self.test_rows[:4]
        self.near = {pair[0] for pair in json.loads((data / "near_duplicates.json").read_text())["pairs_test_train"]}
        held = 4 if self.rehearse else len(self.train_rows) - 500
        self.fit_rows, self.validation_rows = sroie_rows.split(self.train_rows, held)
        self.validation = self.write_rows("validation", self.validation_rows)
        self.test = self.write_rows("test", self.test_rows)
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.lock, self.gpus = threading.Lock(), queue.Queue()
        self.workers = arguments.workers * max(1, torch.cuda.device_count())
        for slot in range(self.workers):
            self.gpus.put(slot % max(1, torch.cuda.device_count()))
        self.file = self.work / "sroie_study.json"
        self.report = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.report |= {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            or f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {
                name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
            },
            "rows": {"train": len(self.train_rows), "validation": held, "test": len(self.test_rows)},
            "label_ceiling": {
                name: sroie_rows.label_ceiling(rows, self.schema)
                for name, rows in (("train", self.train_rows), ("test", self.test_rows))
            },
        }
        self.report.setdefault("not_run", [])

    def save(self) -> None:
        with self.lock:
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, self.file)

    def write_rows(self, name: str, rows: list[dict]) -> Path:
        path = self.work / f"{name.replace(' ', '_').replace(',', '')}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    # ---- one cell ----------------------------------------------------------------------------------------------------

    def run(self, words: list[str], log: str) -> float:
        """Run a program on one GPU; return its seconds. Raises RuntimeError with the end of its output."""
        path, start = self.work / f"{log}.log", time.monotonic()
        gpu = self.gpus.get()
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.work / "cache" / log)}
        variables |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
        if torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            variables["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible[0] else str(gpu)
        try:
            with open(path, "w", encoding="utf-8") as output:
                code = subprocess.run(words, cwd=ROOT, env=variables, stdout=output, stderr=output).returncode
        finally:
            self.gpus.put(gpu)
            shutil.rmtree(self.work / "cache" / log, ignore_errors=True)
        if code:
            raise RuntimeError(f"exit code {code}: {path.read_text(errors='replace').strip()[-600:]}")
        return time.monotonic() - start

    def train(self, name: str, rows: Path, setting: dict, seed: int = 42, schema: Path = SCHEMA, extra=()) -> dict:
        """Train by the recipe; {"folder", "seconds", "steps", "loss", "peak_memory_gib"}."""
        out = self.work / f"run-{rows.stem}-{name.replace(' ', '_').replace(',', '')}-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        batch = 2 if self.rehearse else setting["batch"]
        words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        words += ["--config_file", "accelerate_configs/single.yaml", str(RECIPE / "train.py"), *extra[:2]]
        words += ["--model_name_or_path", str(self.model), "--dataset_name", str(rows), "--schema_file", str(schema)]
        words += [*COLUMNS, "--output_dir", str(out), "--num_train_epochs", str(setting["epochs"])]
        words += ["--learning_rate", str(setting["learning_rate"]), "--per_device_train_batch_size", str(batch)]
        words += ["--gradient_accumulation_steps", "1", "--warmup_steps", "0.05", "--max_length", "2048"]
        words += ["--unfit_rows", "error", "--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", "5"]
        words += ["--activation_checkpointing", "false", "--seed", str(seed), *extra[2:]]
        words += ["--neftune_noise_alpha", str(setting["neftune"])] if "neftune" in setting else []
        words += ["--use_cpu", "true", "--max_steps", "2", "--logging_steps", "1"] if self.rehearse else []
        seconds = self.run(words, out.name)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        peaks = [line["peak_memory_gib"] for line in lines if "peak_memory_gib" in line]
        result = {"seconds": round(seconds), "steps": max(line["step"] for line in lines), "loss": losses[-1]}
        return result | {"peak_memory_gib": max(peaks, default=None), "folder": str(out), "metrics": lines}

    def score(self, model: str | Path, rows: Path, constrained: bool = False) -> dict:
        """{"report", "answers"} of the recipe's score.py on a file of rows, greedy."""
        name = f"score-{rows.stem}-{Path(model).parent.name if Path(model).name == 'final' else Path(model).name}"
        out, answers = self.work / f"{name}.json", self.work / f"{name}.answers.jsonl"
        words = [
            sys.executable,
            str(RECIPE / "score.py"),
            str(model),
            str(rows),
            "--schema_file",
            str(SCHEMA),
            *COLUMNS,
        ]
        words += ["--chat_template_kwargs", '{"enable_thinking": false}', "--max_new_tokens", "160"]
        words += ["--batch_size", "64", "--worst", "0", "--output", str(out), "--predictions", str(answers)]
        words += ["--constrained"] * constrained + (["--max_new_tokens", "8"] if self.rehearse else [])
        self.run(words, name)
        return {"report": json.loads(out.read_text()), "answers": read_rows(answers)}

    def test_scores(self, model: str | Path) -> dict:
        """Scores of a model on the test receipts: all, without near duplicates, held to the schema, and the flags."""
        scored = self.score(model, self.test, constrained=True)
        answers = scored["answers"]
        apart = [row for row in answers if row["document"] not in self.near]
        golds, replies, hits = ([row[key] for row in apart] for key in ("gold", "prediction", "limit_hit"))
        return {
            "test": kept(scored["report"]),
            "without_near_duplicates": kept(score_replies(golds, replies, self.schema, limit_hits=hits)),
            "constrained": kept(scored["report"]["constrained"]),
            "flags": flag_counts(answers, self.test_rows, self.schema),
            "answers": answers,
        }

    def each(self, cells: dict) -> dict:
        """Run {name: function} side by side; {name: result} of those that ended well. Failures are written down."""
        results = {}

        def one(name: str, function) -> None:
            try:
                if time.monotonic() > self.deadline:
                    raise TimeoutError("--minutes were over")
                started = time.monotonic()
                results[name] = function()
                print(f"{name}: {time.monotonic() - started:.0f} s, {summary(results[name])}", flush=True)
            except Exception as error:  # one cell must not take the others with it
                self.report["not_run"].append({"cell": name, "reason": f"{type(error).__name__}: {error}"[-700:]})
                print(f"{name}: not run: {error}", flush=True)
            self.save()

        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(lambda item: one(*item), cells.items()))
        return results

    # ---- the stages --------------------------------------------------------------------------------------------------

    def candidate(self, name: str, rows: list[dict], label: str, seed: int = 42) -> dict:
        """Train one candidate on `rows`; `label` names them in file names."""
        _, setting, making = CANDIDATES[name]
        made = sroie_rows.without_absent_labels(rows, self.schema) if making.get("clean") else rows
        if making.get("copies"):
            made = sroie_rows.augmented(made, making["copies"], making.get("entities", False), seed)
        schema = SCHEMA
        if making.get("order"):
            schema = self.work / "schema_order.json"
            other = json.loads(SCHEMA.read_text())
            other |= {"properties": {key: other["properties"][key] for key in ORDER}, "required": ORDER}
            schema.write_text(json.dumps(other))
        path = self.write_rows(f"{label}-{name}-{seed}", made)
        return {"rows": len(made)} | self.train(name, path, PLAIN | setting, seed, schema)

    def candidates(self) -> dict:
        """Cells: every candidate that the report does not have yet, on a split of train."""
        reported = {row["candidate"] for row in self.report.setdefault("candidates", []) if row["seed"] == SEEDS[0]}
        names = ("plain", "order", "swapped, clean") if self.rehearse else CANDIDATES
        return {f"{name}, seed {SEEDS[0]}": partial(self.fit, name, SEEDS[0]) for name in names if name not in reported}

    def fit(self, name: str, seed: int) -> dict:
        """Train one candidate on the fit rows and score it on the validation rows."""
        trained = self.candidate(name, self.fit_rows, "fit", seed)
        scored = self.score(Path(trained["folder"], "final"), self.validation)
        result = {"candidate": name, "seed": seed, "changes": CANDIDATES[name][0], **trained}
        result["validation"] = kept(scored["report"])
        row = {k: v for k, v in result.items() if k not in ("metrics", "folder")}
        if any((other["candidate"], other["seed"]) == (name, seed) for other in self.report["candidates"]):
            row["seed"] = f"{seed} again"  # trained anew for its weights; both numbers stand
        self.report["candidates"].append(row)
        return result | {"answers": scored["answers"]}

    def final(self) -> None:
        measured = [row for row in self.report["candidates"] if row["seed"] == SEEDS[0]]
        best = max(measured, key=lambda row: row["validation"]["micro_f1"])["candidate"]
        print(f"best on validation: {best}", flush=True)

        def on_all(seed: int) -> dict:
            trained = self.candidate(best, self.train_rows, "all", seed)
            return {"seed": seed, **trained} | self.test_scores(Path(trained["folder"], "final"))

        cells = {f"{best}, seed {seed}": partial(self.fit, best, seed) for seed in SEEDS}
        cells |= {f"final, seed {seed}": partial(on_all, seed) for seed in SEEDS}
        found = self.each(cells)
        same = [result for name, result in found.items() if not name.startswith("final")]
        last = [result for name, result in found.items() if name.startswith("final")]
        if not same or not last:
            raise SystemExit(
                f"error: every seed of {best} failed, so there is nothing to choose; {self.work} has logs."
            )
        mean = sum(result["validation"]["micro_f1"] for result in same) / len(same)
        folders, final_folders = ([Path(row["folder"], "final") for row in rows] for rows in (same, last))

        def averaged() -> dict:
            scored = self.score(average(folders, self.work / "average-fit"), self.validation)
            return {"validation": kept(scored["report"])}

        def final_averaged() -> dict:
            return self.test_scores(average(final_folders, self.work / "average-all"))

        voted = self.voted_scores([row["answers"] for row in same])
        found |= self.each({"average of the seeds": averaged, "final, average": final_averaged})
        ways = {"mean of the seeds": mean, "vote": voted["scores"]["micro_f1"]}
        if "average of the seeds" in found:
            ways["average"] = found["average of the seeds"]["validation"]["micro_f1"]
        self.report["chosen"] = {"candidate": best, "ways": ways, "way": max(ways, key=ways.get)}
        final_vote = self.voted_scores([row["answers"] for row in last])
        self.report["final"] = {
            "candidate": best,
            "seeds": [{k: v for k, v in row.items() if k not in ("metrics", "answers", "folder")} for row in last],
            "average": {k: v for k, v in found.get("final, average", {}).items() if k != "answers"} or None,
            "vote": {"test": final_vote["scores"], "without_near_duplicates": final_vote["apart"]},
        }
        self.save()

    def voted_scores(self, runs: list[list[dict]]) -> dict:
        """Scores of the value that most runs give for a field, the first run's where all differ."""
        by_document = [{answer["document"]: answer for answer in answers} for answers in runs]
        replies, golds = {}, {}
        for document, answer in by_document[0].items():
            values = [read_reply(run[document]["prediction"]).value for run in by_document if document in run]
            replies[document] = json.dumps(voted([value for value in values if value is not None], self.schema))
            golds[document] = answer["gold"]
        apart = [name for name in golds if name not in self.near]
        return {
            "scores": kept(score_replies(list(golds.values()), list(replies.values()), self.schema)),
            "apart": kept(score_replies([golds[n] for n in apart], [replies[n] for n in apart], self.schema)),
        }

    def curve(self) -> dict:
        """Cells: the plain setting on more and more training receipts."""
        points = self.report.setdefault("curve", [])
        drawn = random.Random(1).sample(self.train_rows, len(self.train_rows))  # nested: the 50 are among the 100
        sizes = (4, 8, len(drawn)) if self.rehearse else (*SIZES, len(drawn))

        def one(size: int) -> dict:
            setting = PLAIN | {"epochs": max(PLAIN["epochs"], math.ceil(120 * PLAIN["batch"] / size))}
            trained = self.train("curve", self.write_rows(f"first-{size}", drawn[:size]), setting)
            result = {"receipts": size, "epochs": setting["epochs"], **trained}
            result |= {"test": kept(self.score(Path(trained["folder"], "final"), self.test)["report"])}
            points.append({k: v for k, v in result.items() if k not in ("metrics", "folder")})
            points.sort(key=lambda point: point["receipts"])
            return result

        left = [size for size in sizes if size not in {point["receipts"] for point in points}]
        return {f"{size} receipts": partial(one, size) for size in reversed(left)}

    def adapters(self) -> dict:
        """Cells: the plain setting as LoRA and as QLoRA."""
        results = self.report.setdefault("adapters", {})
        path = self.write_rows("all-plain", self.train_rows)

        def one(name: str) -> dict:
            trained = self.train(name, path, PLAIN, extra=["--config", name, *LORA])
            trained |= {"test": kept(self.score(Path(trained["folder"], "final"), self.test)["report"])}
            results[name] = {k: v for k, v in trained.items() if k not in ("metrics", "folder")}
            return trained

        return {name: partial(one, name) for name in ("lora", "qlora") if name not in results}

    def timing(self) -> None:
        self.report["timing"] = results = {}
        path = self.write_rows("all-timing", self.train_rows)
        for name in ("full", "lora", "qlora"):  # one after the other, alone on the GPU
            config = [] if name == "full" else ["--config", name]
            extra = [*(config or ["--seed", "42"]), "--max_steps", "40", "--logging_steps", "1"]
            trained = self.train(f"timing-{name}", path, PLAIN, extra=extra)
            times = [line["time"] for line in trained["metrics"] if "loss" in line]
            gaps = sorted(after - before for before, after in itertools.pairwise(times[-31:]))
            results[name] = {"step_seconds": round(gaps[len(gaps) // 2], 4) if gaps else None}
            results[name] |= {"peak_memory_gib": trained["peak_memory_gib"], "seconds": trained["seconds"]}
            self.save()


def voted(values: list[dict], schema: dict) -> dict:
    """For each field of the schema the value that most answers give, the first answer's where all differ."""
    answer = {}
    for name, field in schema["properties"].items():
        given = [value[name] for value in values if not is_absent(value.get(name))]
        votes = [sum(same_value(one, other, field)[1] for other in given) for one in given]
        if given and 2 * len(given) > len(values):
            answer[name] = given[votes.index(max(votes))]
        else:
            answer[name] = None
    return answer


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kept(report: dict) -> dict:
    """What the study keeps of a report of score.py."""
    names = ("documents", "strict_json", "unparseable", "limit_hits", "schema_violations")
    names += ("micro_f1", "micro_f1_interval", "micro_f1_exact", "macro_f1")
    fields = {name: {"exact": row["f1_exact"], "normalised": row["f1"]} for name, row in report["fields"].items()}
    return {name: report[name] for name in names} | {"fields": fields}


def summary(result: dict) -> str:
    """One line on a result: its F1, where it has one."""
    scores = result.get("validation") or result.get("test")
    return f"field F1 {scores['micro_f1']:.4f}" if scores else json.dumps(result)[:200]


def average(folders: list[Path], out: Path) -> Path:
    """Write the mean of the weights of several models of one architecture, with the first one's other files."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folders[0], out)
    for file in out.glob("*.safetensors"):
        tensors = [load_file(folder / file.name) for folder in folders]
        mean = {
            name: torch.stack([weights[name].float() for weights in tensors]).mean(0).to(tensor.dtype)
            for name, tensor in tensors[0].items()
        }
        save_file(mean, file, metadata={"format": "pt"})
    return out


def flag_counts(answers: list[dict], rows: list[dict], schema: dict) -> dict:
    """Of the values that were answered: how many are wrong, how many predict.py flags, and how many of both.

    A value is wrong where it is not the same as the label after normalising, or where there is no label.
    """
    texts = {row["id"]: row["text"] for row in rows}
    counts = {"values": 0, "wrong": 0, "flagged": 0, "flagged_and_wrong": 0}
    for answer in answers:
        value, flags = flag_values(answer["prediction"], answer["limit_hit"], texts[answer["document"]], schema)
        golds = {path: gold for path, _, gold in field_paths(answer["gold"], schema)}
        for path, field, found in field_paths(value, schema) if value else []:
            if is_absent(found):
                continue
            gold = golds.get(path)
            wrong = is_absent(gold) or not same_value(gold, found, field)[1]
            counts["values"] += 1
            counts["wrong"] += wrong
            counts["flagged"] += path in flags
            counts["flagged_and_wrong"] += wrong and path in flags
    return counts


POOLED = ("candidates", "curve", "adapters")  # cells that wait for nothing, so they share the GPU
STAGES = (*POOLED, "final", "timing")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--workers", type=int, default=5, help="cells side by side on a GPU (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no cell after this time")
    parser.add_argument("--rehearse", action="store_true", help="two steps a cell and few receipts, on the CPU")
    arguments = parser.parse_args()
    study = Study(arguments)
    study.report["not_run"] = []
    cells = {}
    for stage in POOLED:
        cells |= getattr(study, stage)() if stage in arguments.stages else {}
    study.each(cells)
    if "final" in arguments.stages:
        if not study.report.get("candidates"):
            print(
                f"sroie_study.py: {study.file} holds no candidate. Run the stage `candidates` first.", file=sys.stderr
            )
            return 1
        study.final()
    if "timing" in arguments.stages:
        study.timing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
