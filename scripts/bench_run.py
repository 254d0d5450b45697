"""Runs a training program as it is, with measured rows and a clock; one arm of benchmark.py.

    BENCH_OPTIONS='{"rows": "rows.parquet", "result": "arm.json", ...}' \\
        accelerate launch --config_file accelerate_configs/single.yaml scripts/bench_run.py train.py ...

train.py is a recipe's, or TRL's own scripts/sft.py. What is exchanged, and nothing else: the rows (token ids from a
file, in place of `inputs.load_rows`), the weights (random, made on the device, unless `weights` is "file"), and the end
(after the timed steps the process leaves, without saving). `Clock` takes the times; its docstring says how.
"""

import importlib.metadata
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path

PROFILED = 1  # steps: reading the events of one takes seconds
STARTED = float(os.environ.get("BENCH_STARTED", time.time()))  # when benchmark.py started this arm


class Marks:
    """Seconds from the start of the arm to each point of its start-up, without the time spent waiting for the GPU."""

    def __init__(self):
        self.waited, self.load, self.at = 0.0, 0.0, {}

    def set(self, name: str) -> None:
        self.at.setdefault(name, time.time() - STARTED - self.waited)

    def split(self) -> dict[str, float]:
        """import, arguments, load, prepare (rows, packing, adapter, optimizer), first_step (compiles); in seconds."""
        at = self.at
        return {
            "import": at["imported"],
            "arguments": at["building"] - at["imported"],
            "load": self.load,
            "prepare": at["training"] - at["building"] - self.load,
            "first_step": at["stepped"] - at["training"],
            "total": at["stepped"],
        }


MARKS = Marks()


def versions() -> dict[str, str]:
    """Of the packages that decide the speed, those that this arm runs with."""
    names = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "flash-attn-4", "liger-kernel")
    found = {}
    for name in (*names, "bitsandbytes", "torchao", "unsloth", "xformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def profile_summary(profiler, path: Path, cuda: bool) -> dict:
    """Per step: kernels, host syncs and the GPU's busy time, with the kernels that take most; tables go to `path`.

    A host sync is a read of a value from the device (`item`), or the runtime's own wait. Times in milliseconds.
    """
    averages = profiler.key_averages()
    orders = {"GPU": "self_cuda_time_total", "host": "self_cpu_time_total"} if cuda else {"host": "self_cpu_time_total"}
    path.write_text("\n".join(averages.table(sort_by=order, row_limit=45) for order in orders.values()))
    kernels = [e for e in averages if str(e.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    calls = {event.key: event for event in averages if not str(event.device_type).endswith("CUDA")}
    syncs = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    launches = [event.count for name, event in calls.items() if "LaunchKernel" in name]
    return {
        "steps": PROFILED,
        "gpu_busy_ms": round(sum(e.self_device_time_total for e in kernels) / 1000 / PROFILED, 2),
        "kernels": sum(launches) / PROFILED,
        "host_syncs": {
            name: [calls[name].count / PROFILED, round(calls[name].self_cpu_time_total / 1000 / PROFILED, 2)]
            for name in syncs
            if name in calls
        },
        "top_kernels_ms": [
            [event.key[:90], round(event.self_device_time_total / 1000 / PROFILED, 2), event.count / PROFILED]
            for event in kernels[:25]
        ],
    }


def make_clock(options: dict, trainer):
    """A TrainerCallback that times the steps of `trainer` and ends the process after them.

    CUDA events at the end of each step, read once after the last one, so nothing waits for the GPU but what the
    trainer itself does. Tokens are counted on the device, from each batch: `tokens` are those that are no padding,
    `trained` those with a label, without each document's first. The step time includes the data loader. A profile is
    of PROFILED steps after the timed ones.
    """
    import torch
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available() and not trainer.args.use_cpu
    pad, counted, losses, ends = trainer.processing_class.pad_token_id, [], {}, []
    positions = []  # of each step, padding included
    training_step = trainer.training_step

    def count_and_step(model, inputs, *args, **kwargs):
        labels = inputs["labels"][..., 1:]
        counted[-1].append(torch.stack([(inputs["input_ids"] != pad).sum(), (labels != -100).sum()]))
        positions[-1] += inputs["input_ids"].numel()
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = count_and_step

    def now():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    class Clock(TrainerCallback):
        profiler = result = None

        def on_train_begin(self, args, state, control, **_):
            MARKS.set("training")

        def on_step_begin(self, args, state, control, **_):
            counted.append([])
            positions.append(0)
            if not ends:
                ends.append(now())

        def on_step_end(self, args, state, control, **_):
            ends.append(now())
            done = len(ends) - 1
            if done == 1:
                if cuda:
                    torch.cuda.synchronize()
                MARKS.set("stepped")
                self.begin = time.monotonic()
            if cuda and done == 2:
                torch.cuda.reset_peak_memory_stats()
            late = time.monotonic() - self.begin > options["seconds"]
            if self.profiler:
                if done == self.last:
                    self.profiler.stop()
                    self.result["profile"] = profile_summary(self.profiler, Path(options["profile"]), cuda)
                    self.finish()
            elif done >= options["warmup"] + options["steps"] or (late and done > options["warmup"]):
                self.result = self.measured()
                if not options.get("profile"):
                    self.finish()
                self.write()  # the figures are kept, whatever the profiler does
                self.last, self.profiler = done + PROFILED, torch.profiler.profile()
                self.profiler.start()

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in (logs or {}):
                losses[state.global_step] = logs["loss"]

        def measured(self) -> dict:
            if cuda:
                torch.cuda.synchronize()
                seconds = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(ends)]
            else:
                seconds = [b - a for a, b in itertools.pairwise(ends)]
            tokens = [torch.stack(parts).sum(0).tolist() for parts in counted]
            timed = slice(options["warmup"], None)
            spent, seen = seconds[timed], tokens[timed]
            rates = [n / s for (n, _), s in zip(seen, spent, strict=True)]
            # The median step with the mean tokens of a step: padding makes tokens uneven, hiccups make seconds so.
            middle = statistics.median(s / n for (n, _), s in zip(seen, spent, strict=True))
            share = sum(t for _, t in seen) / sum(n for n, _ in seen)
            quantiles = statistics.quantiles(rates, n=10) if len(rates) > 1 else rates * 9
            result = {
                "steps": len(spent),
                "step_seconds": statistics.median(spent),
                "tokens_per_step": sum(n for n, _ in seen) / len(seen),
                "padding_share": 1 - sum(n for n, _ in seen) / sum(positions[timed]),
                "timed_steps": [
                    [places, n, round(s, 4)] for places, (n, _), s in zip(positions[timed], seen, spent, strict=True)
                ],
                "tokens_per_second": 1 / middle,
                "tokens_per_second_p10_p90": [quantiles[0], quantiles[8]],
                "trained_tokens_per_second": share / middle,
                "startup": MARKS.split(),
                "loss": losses,
                "first_steps_seconds": seconds[: options["warmup"]],
                "attention": trainer.model.config._attn_implementation,
                "micro_batch": [trainer.args.train_batch_size, trainer.args.gradient_accumulation_steps],
                "trained_dtypes": sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
                "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
                "versions": versions(),
                "device": torch.cuda.get_device_name() if cuda else "CPU",
            }
            if cuda:
                free, total = torch.cuda.mem_get_info()
                result["peak_gib"] = {
                    "allocated": torch.cuda.max_memory_allocated() / 2**30,
                    "reserved": torch.cuda.max_memory_reserved() / 2**30,
                    "driver": (total - free) / 2**30,
                }
                import torch._dynamo.utils as dynamo

                result["graphs"] = dict(dynamo.counters["stats"])  # recompiles would show here
            return result

        def write(self):
            Path(options["result"]).write_text(json.dumps(self.result))

        def finish(self):
            self.write()
            sys.stdout.flush()
            os._exit(0)  # nothing is saved: a benchmark's weights are of no use

    return Clock()


def exchange_weights(options: dict) -> None:
    """`from_pretrained` makes random weights on the device from the folder's config: seconds instead of reading files."""
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    original = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, folder, *args, **kwargs):
        begin = time.time()
        if options["weights"] == "file":
            model = original(cls, folder, *args, **kwargs)
        else:
            taken = {k: kwargs[k] for k in ("dtype", "attn_implementation", "experts_implementation") if kwargs.get(k)}
            config = cls.config_class.from_pretrained(folder)
            torch.manual_seed(0)
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = cls._from_config(config, **taken)
            model.generation_config = GenerationConfig.from_pretrained(folder)
            model.name_or_path = model.config._name_or_path = str(folder)
        MARKS.load += time.time() - begin
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def exchange_trainer(options: dict) -> None:
    """Every SFTTrainer gets the clock."""
    import trl

    init = trl.SFTTrainer.__init__

    def init_with_clock(self, *args, **kwargs):
        MARKS.set("building")
        init(self, *args, **kwargs)
        self.add_callback(make_clock(options, self))

    trl.SFTTrainer.__init__ = init_with_clock


def exchange_rows(options: dict, folder: Path) -> None:
    """The recipe's `load_rows` gives the rows of the benchmark. For figures labelled so, bf16 weights may be trained."""
    import datasets

    import inputs

    inputs.load_rows = lambda *_, **__: (datasets.Dataset.from_parquet(options["rows"]), None)
    if options.get("bf16_weights"):
        import guard  # before the recipe's other files take the function from it

        guard.strategy_problem = lambda trainer: None


def wait_for_device(options: dict) -> None:
    """Imports may run while the arm before still trains; the device is taken when it is free."""
    gate, begin = options.get("gate"), time.time()
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    MARKS.waited = time.time() - begin


def import_all() -> None:
    """What the arm needs anyway, before the device: this may run while the arm before it still trains."""
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
    from trl import SFTTrainer  # noqa: F401 TRL's names are imported on use

    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed  # noqa: F401
    if "flash_attention_4" in sys.argv:
        import flash_attn.cute  # noqa: F401
    if "--use_liger_kernel" in sys.argv:
        import liger_kernel.transformers  # noqa: F401


def main() -> None:
    options = json.loads(os.environ["BENCH_OPTIONS"])
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    import_all()
    MARKS.set("imported")
    wait_for_device(options)
    exchange_weights(options)
    exchange_trainer(options)
    if (script.parent / "inputs.py").is_file():
        exchange_rows(options, script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
