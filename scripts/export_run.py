"""A run or a checkpoint as one loadable folder: weights, config, tokenizer, stock template, generation config, card.

export.py is the command. Weights are read tensor by tensor (export_shards.py) and written shard by shard.
"""

import dataclasses
import gc
import json
import math
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from export_files import (
    BASE_RECORD,
    COMPANIONS,
    DOWNLOAD,
    SHARD_BYTES,
    ExportError,
    find_model,
    finish_folder,
    partial_folder,
    read_config,
    write_json,
    write_shards,
)
from export_mxfp4 import EXPERTS, SECTION, check_mxfp4, quantize_mxfp4
from export_shards import Entry, SafetensorsReader, adapter_names, open_weights, whole_problem
from safetensors.torch import save_file

LICENCES = ("LICEN[CS]E*", "*POLICY*", "NOTICE*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROOF_LINE = "proof: "  # stands before the JSON that export_proof.py prints


# ---------------------------------------------------------------- what is exported


def find_source(source: str | Path) -> tuple[Path, Path | None]:
    """The folder whose weights are exported, and the run folder that it belongs to, or None.

    A run that is done gives its final/, any other run its newest whole checkpoint. Raises ExportError when there is
    none, and for a checkpoint that is not whole.
    """
    folder = Path(source).expanduser().resolve()
    if not folder.is_dir():
        raise ExportError(
            f"{source} is no folder. Give a run folder (with run.json), a checkpoint-N, or a model folder."
        )
    if (folder / "run.json").is_file():
        final = folder / "final"
        if read_record(folder).get("outcome") == "done" and is_model(final):
            return final, folder
        found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
        problems = {}
        for path in sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
            problems[path.name] = whole_problem(path)
            if not problems[path.name]:
                return path, folder
        told = "; ".join(f"{name}: {problem}" for name, problem in problems.items()) or "it holds no checkpoint-N"
        raise ExportError(f"{folder} has neither a final/ nor a whole checkpoint ({told}). Start the run again.")
    run = folder.parent if (folder.parent / "run.json").is_file() else None
    if (folder / "trainer_state.json").is_file() or folder.name.startswith("checkpoint-"):
        if problem := whole_problem(folder):
            raise ExportError(f"{folder} is not whole: {problem}. Give another checkpoint, or the run folder itself.")
        return folder, run
    if not is_model(folder):
        raise ExportError(
            f"{folder} is neither a run folder (no run.json) nor a checkpoint (no complete.json) nor a model (no "
            "config.json and no adapter_config.json). Give one of these."
        )
    return folder, run


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def read_record(run: Path) -> dict:
    """run.json. Raises ExportError when it is no JSON."""
    try:
        return json.loads((run / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(
            f"{run / 'run.json'} is not JSON ({error}). Give a checkpoint-N with --base instead."
        ) from error


@dataclass
class Job:
    """One export: where the weights are, what they were trained from, and what is asked for."""

    source: str
    base: str | None = None
    merge: bool = False
    mxfp4: bool = False
    dtype: str | None = None
    proof: bool = True

    def __post_init__(self):
        self.weights, self.run = find_source(self.source)
        self.record = read_record(self.run) if self.run else {}
        self.arguments = self.record.get("arguments", {})
        config = read_config(self.weights) if (self.weights / "config.json").is_file() else {}
        self.reader = open_weights(self.weights, config)
        self.is_adapter = any("lora_" in name for name in self.reader.tensors)
        if not self.is_adapter and (self.weights / "adapter_config.json").is_file():
            raise ExportError(
                f"{self.weights} has an adapter_config.json, but its weights hold no LoRA tensor. Only LoRA is exported."
            )
        if self.merge and not self.is_adapter:
            raise ExportError(f"--merge was given, but {self.weights} holds no adapter. Leave --merge out.")
        if self.mxfp4 and self.is_adapter and not self.merge:
            raise ExportError(f"{self.weights} holds an adapter, which has no MXFP4 form. Add --merge.")
        if self.mxfp4 and self.dtype:
            raise ExportError("--dtype was given with --mxfp4, whose other weights are bfloat16. Leave --dtype out.")
        if self.dtype and self.is_adapter and not self.merge:
            raise ExportError(
                f"--dtype was given for the adapter {self.weights}, which is kept as trained. Leave it out."
            )

    @property
    def final(self) -> Path | None:
        """The run's final/, where the run is done."""
        done = self.run and self.record.get("outcome") == "done" and is_model(self.run / "final")
        return self.run / "final" if done else None

    @property
    def mode(self) -> str:
        return ("merged" if self.merge else "adapter") if self.is_adapter else "full"

    @cached_property
    def base_name(self) -> str | None:
        """The base as training or --base named it."""
        named = self.base or self.arguments.get("model_name_or_path")
        if not named and (self.weights / "adapter_config.json").is_file():
            text = (self.weights / "adapter_config.json").read_text(encoding="utf-8")
            named = json.loads(text).get("base_model_name_or_path")
        return named

    @cached_property
    def found_base(self) -> tuple[Path, dict] | None:
        """The base model's folder and what `find_model` says of its name. Raises ExportError when it is not there."""
        if not self.base_name:
            if self.is_adapter:
                raise ExportError(f"{self.weights} does not say which model it adapts. Name it with --base.")
            return None
        revision = None
        if not Path(self.base_name).expanduser().is_dir() and not self.base:
            revision = self.arguments.get("model_revision")
        download = DOWNLOAD if self.proof or self.merge else ("config.json", *COMPANIONS)
        try:
            return find_model(self.base_name, revision=revision, download=download)
        except ExportError as error:
            raise ExportError(
                f"the model that was trained from is needed for config, tokenizer and template: {error} "
                "If it lies elsewhere now, name it with --base."
            ) from error

    @property
    def base_folder(self) -> Path | None:
        return self.found_base[0] if self.found_base else None

    @cached_property
    def published(self) -> tuple[str | None, str | None]:
        """The base's published id and revision, or (None, None) for a folder that has none."""
        if not self.found_base:
            return None, None
        folder, record = self.found_base
        if (folder / BASE_RECORD).is_file():
            record = json.loads((folder / BASE_RECORD).read_text(encoding="utf-8"))
        name = record["base_model_name_or_path"]
        if name.startswith((".", "~", "/")) or Path(name).exists():
            return None, None
        return name, record["base_model_revision"]

    def config(self) -> dict:
        """config.json of the result: what was trained, without traces of how it was loaded and trained.

        Raises ExportError when there is none.
        """
        folders = [self.base_folder] if self.is_adapter else [self.weights, self.final, self.base_folder]
        folder = next((path for path in folders if path and (path / "config.json").is_file()), None)
        if folder is None:
            raise ExportError(f"{self.weights} has no config.json, and its base is unknown. Name it with --base.")
        config = read_config(folder)
        if "text_config" in config:  # of a model that reads images, too, the language model was trained
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

            text = AutoConfig.from_pretrained(folder).get_text_config()
            config = text.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]}
        for key in ("quantization_config", "torch_dtype", "_name_or_path"):
            config.pop(key, None)
        # FSDP1's wrapper gives the class its name (transformers #40207).
        config["architectures"] = [name.removeprefix("FSDP") for name in config.get("architectures") or []]
        if self.base_folder and (base := read_config(self.base_folder)).get("use_cache") is not None:
            config["use_cache"] = base["use_cache"]  # training switches it off
        return config

    def lora_config(self):
        """peft's LoraConfig: as saved beside the weights or in final/, else built from run.json as TRL does.

        FSDP checkpoints hold no adapter_config.json.
        """
        from peft import PeftConfig

        for folder in (self.weights, self.final):
            if folder and (folder / "adapter_config.json").is_file():
                config = PeftConfig.from_pretrained(str(folder))
                break
        else:
            from trl import ModelConfig, get_peft_config

            known = {field.name for field in dataclasses.fields(ModelConfig)}
            given = {key: value for key, value in self.arguments.items() if key in known}
            if not given.get("use_peft"):
                raise ExportError(
                    f"{self.weights} holds an adapter without adapter_config.json, and there is no run.json beside it "
                    "that says how it was made. Export from inside the run folder."
                )
            config = get_peft_config(ModelConfig(**given))
        config.inference_mode = True
        name, revision = self.published
        config.base_model_name_or_path = name or self.base_name
        config.revision = revision
        return config

    def adapter(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors, under the names that peft saves them by."""
        return {name: self.reader.read(name).contiguous() for name in self.reader.tensors}


# ---------------------------------------------------------------- the model that the weights must fit


def empty_model(config_folder: Path) -> torch.nn.Module:
    """The model that a folder's config.json describes, without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def plan_full(reader, model: torch.nn.Module, place: Path) -> dict[str, Entry]:
    """The tensors to write: every one that the model has, a tied one once. Raises ExportError for what does not fit."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = model.all_tied_weights_keys
    for name, first in tied.items():
        if (
            name in reader.tensors
            and first in reader.tensors
            and not torch.equal(reader.read(name), reader.read(first))
        ):
            raise ExportError(
                f"{place}: {name} and {first} differ, but config.json says that they are one tensor "
                "(tie_word_embeddings). Train again from a base whose config.json fits its weights."
            )
    once = {name: shape for name, shape in wanted.items() if name not in tied}
    found = {name: entry for name, entry in reader.tensors.items() if name not in tied}
    for name in sorted(once.keys() | found.keys()):
        if name not in found or name not in once:
            raise ExportError(
                f"{place}: the tensor {name} is {'missing' if name in once else 'not part of the model'} "
                f"({len(found)} tensors found, {len(once)} expected from config.json). Is --base the right model?"
            )
        if found[name].shape != once[name]:
            raise ExportError(
                f"{place}: {name} has the shape {list(found[name].shape)}, expected {list(once[name])} from config.json. "
                "Is --base the right model?"
            )
    return {name: found[name] for name in once}


class MergedReader:
    """The base's weights with the adapter added, tensor by tensor; peft computes what is added.

    LoRA on modules and on fused parameters (`target_parameters`). Sums are made in fp32. Raises ExportError for an
    adapter that does not fit, and for the kinds whose merge needs more than one tensor.
    """

    def __init__(self, job: Job, model: torch.nn.Module):
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer

        config, adapter = job.lora_config(), job.adapter()
        odd = [key for key in ("use_dora", "modules_to_save", "trainable_token_indices") if getattr(config, key, None)]
        if odd or config.bias != "none":
            raise ExportError(
                f"the adapter uses {', '.join(odd) or 'bias'}, whose merge is not done tensor by tensor. With memory for "
                "the whole model: peft's AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()."
            )
        self.base = SafetensorsReader(job.base_folder, read_config(job.base_folder))
        self.tensors = dict(self.base.tensors)
        model.name_or_path = config.base_model_name_or_path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that transformers 5.24 has renamed
            model = get_peft_model(model, config)
        names = adapter_names(name for name in model.state_dict() if "lora_" in name)
        if names.keys() != adapter.keys():
            differing = sorted(names.keys() ^ adapter.keys())
            raise ExportError(
                f"{job.weights}: the adapter's tensors do not fit {job.base_folder} ({len(differing)} differ, the first "
                f"is {differing[0]}). Is --base the right model?"
            )
        # peft's own loading would move them to the base's device, where they have no values.
        model.load_state_dict({names[name]: tensor for name, tensor in adapter.items()}, strict=False, assign=True)
        self.layers = {}
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer) and module.lora_A:
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                self.layers[f"{name}.{getattr(module, 'parameter_name', 'weight')}"] = module
        if lost := sorted(self.layers.keys() - self.tensors.keys()):
            raise ExportError(
                f"the adapter changes {lost[0]}, which the base does not store by itself (a tied head?). "
                "Keep the adapter unmerged."
            )

    def read(self, name: str) -> torch.Tensor:
        weight = self.base.read(name)
        if name not in self.layers:
            return weight
        layer, key = self.layers[name], name.rpartition(".")[2]
        holder, weight = layer.get_base_layer(), weight.float()
        empty = getattr(holder, key)
        setattr(holder, key, torch.nn.Parameter(weight, requires_grad=False))  # peft looks at its dtype and device
        with torch.no_grad():
            weight = weight + layer.get_delta_weight("default").float()
        setattr(holder, key, empty)
        return weight


# ---------------------------------------------------------------- writing


def write_full(folder: Path, reader, plan: dict[str, Entry], dtype: torch.dtype | None, shard_bytes: int) -> dict:
    """Write the tensors of `plan`; floats as `dtype`, or as they are. Returns {"shards", "tensors", "bytes"}."""

    def kind(name: str) -> torch.dtype:
        return dtype if dtype and plan[name].dtype.is_floating_point else plan[name].dtype

    sizes = {name: math.prod(entry.shape) * kind(name).itemsize for name, entry in plan.items()}
    shards = write_shards(folder, sizes, lambda name: reader.read(name).to(kind(name)), shard_bytes)
    return {"shards": shards, "tensors": len(sizes), "bytes": sum(sizes.values())}


def write_mxfp4(folder: Path, reader, plan: dict[str, Entry], shard_bytes: int) -> dict:
    """Write experts as MXFP4 and the rest as bf16. Returns write_full's counts and the experts' relative "error".

    Every expert tensor is dequantized again and compared before it is written. Raises ExportError when there is none.
    """
    sizes, ready, sums = {}, {}, [0.0, 0.0]
    for name, entry in plan.items():
        if name.endswith(EXPERTS):
            sizes[name + "_blocks"], sizes[name + "_scales"] = math.prod(entry.shape) // 2, math.prod(entry.shape) // 32
        else:
            sizes[name] = 2 * math.prod(entry.shape)
    if len(sizes) == len(plan):
        raise ExportError(
            f"--mxfp4 was given, but the model has no expert weights ({EXPERTS[0]}): only gpt-oss is published in MXFP4."
        )

    def make(name: str) -> torch.Tensor:
        if name in plan:
            return reader.read(name).to(torch.bfloat16)
        if name not in ready:
            weight = reader.read(target := name.removesuffix("_blocks"))
            ready[target + "_blocks"], ready[target + "_scales"] = quantize_mxfp4(weight)
            found = check_mxfp4(target, weight, ready[target + "_blocks"], ready[target + "_scales"])
            sums[:] = sums[0] + found[0], sums[1] + found[1]
        return ready.pop(name)

    shards = write_shards(folder, sizes, make, shard_bytes)
    error = math.sqrt(sums[0] / sums[1]) if sums[1] else 0.0
    return {"shards": shards, "tensors": len(sizes), "bytes": sum(sizes.values()), "error": error}


def write_companions(job: Job, folder: Path) -> None:
    """Tokenizer with the stock template, generation config, licences, model card."""
    from transformers import AutoTokenizer

    homes = [path for path in (job.final, job.weights, job.base_folder) if path]
    home = next((path for path in homes if (path / "tokenizer_config.json").is_file()), None)
    if home is None:
        raise ExportError(f"there is no tokenizer in {', '.join(map(str, homes))}. Name the base model with --base.")
    tokenizer = AutoTokenizer.from_pretrained(home)
    if job.base_folder:  # checkpoints carry the template with the tags that only training needs
        tokenizer.chat_template = AutoTokenizer.from_pretrained(job.base_folder).chat_template
    tokenizer.save_pretrained(folder)
    if job.mode != "adapter":
        homes = homes if job.mode == "full" else homes[-1:]
        home = next((path for path in homes if (path / "generation_config.json").is_file()), None)
        if home:
            (folder / "generation_config.json").write_bytes((home / "generation_config.json").read_bytes())
    for pattern in LICENCES:
        for file in job.base_folder.glob(pattern) if job.base_folder else ():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "README.md").write_text(model_card(job), encoding="utf-8")


def model_card(job: Job) -> str:
    """README.md: what it is, from what, trained how; no path of this machine."""
    from huggingface_hub import ModelCard, ModelCardData

    given, metrics, (base, revision) = job.arguments, {}, job.published
    step = job.record.get("step")
    if job.weights.name.startswith("checkpoint-"):
        step = int(job.weights.name.removeprefix("checkpoint-"))
    if job.run and (job.run / "metrics.jsonl").is_file():
        for text in (job.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text) if text.endswith("}") else {}
            if step is None or line.get("step", 0) <= step:
                metrics |= {key: line[key] for key in ("loss", "eval_loss") if key in line}
    name = given.get("dataset_name") or ""
    dataset = None if not name or name.startswith((".", "~", "/")) or ", sha256" in name else name
    data = ModelCardData(
        base_model=base,
        datasets=[dataset] if dataset else None,
        library_name="peft" if job.mode == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", "sft", *(["lora"] if job.is_adapter else []), *(["mxfp4"] if job.mxfp4 else [])],
    )
    kind = {"full": "All weights were trained", "adapter": "A LoRA adapter", "merged": "A LoRA adapter, merged"}[
        job.mode
    ]
    rows = {
        "Base model": base or "a local folder",
        "Base revision": revision,
        "Data": Path(name).name if name and not dataset else dataset,
        "Steps": step,
        "Global batch": given.get("global_batch"),
        "Learning rate": given.get("learning_rate"),
        "Longest sequence": given.get("max_length"),
        "Strategy": given.get("strategy") and f"{given['strategy']}, {given.get('world_size')} process(es)",
        "Training loss": metrics.get("loss"),
        "Evaluation loss": metrics.get("eval_loss"),
        "Versions": ", ".join(f"{key} {value}" for key, value in job.record.get("versions", {}).items() if value),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value not in (None, ""))
    text = f"---\n{data.to_yaml()}\n---\n\n# Supervised fine-tuning of {base or 'a base model'}\n\n"
    text += f"{kind}. Chat template: the base model's own.\n\n| | |\n|---|---|\n{table}\n"
    return str(ModelCard(text))


def export_run(
    source: str | Path,
    dest: str | Path,
    base: str | None = None,
    merge: bool = False,
    mxfp4: bool = False,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    proof: bool = True,
) -> dict:
    """Write a run, checkpoint or model folder as one loadable folder DEST; see export.py.

    base: id or folder of the model that was trained from, in place of the one in run.json. dtype: "float32", "bfloat16"
    or "float16"; by default each tensor as it was stored. Returns {"folder", "mode", "shards", "tensors", "bytes",
    "seconds", "error" (with mxfp4), "proof"}. Raises ExportError; DEST is then not there.
    """
    started, dest = time.monotonic(), Path(dest).expanduser().resolve()
    job = Job(str(source), base, merge, mxfp4, dtype, proof)
    config = None if job.mode == "adapter" else job.config()
    partial = partial_folder(dest)
    if job.mode == "adapter":
        adapter = job.adapter()
        save_file(adapter, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        job.lora_config().save_pretrained(str(partial))
        done = {"shards": 1, "tensors": len(adapter), "bytes": sum(tensor.nbytes for tensor in adapter.values())}
    else:
        write_json(partial / "config.json", config)
        model = empty_model(partial)
        reader = MergedReader(job, model) if job.mode == "merged" else job.reader
        model = empty_model(partial) if job.mode == "merged" else model
        plan = plan_full(reader, model, job.base_folder if job.mode == "merged" else job.weights)
        weights = {}
        for entry in plan.values():
            weights[entry.dtype] = weights.get(entry.dtype, 0) + math.prod(entry.shape)
        kept = torch.bfloat16 if mxfp4 else DTYPES[dtype] if dtype else max(weights, key=weights.get)
        if proof:
            check_memory(sum(weights.values()), 4 if job.mode == "merged" else kept.itemsize)
        if mxfp4:
            done = write_mxfp4(partial, reader, plan, shard_bytes)
        else:
            done = write_full(partial, reader, plan, DTYPES[dtype] if dtype else None, shard_bytes)
        section = {"quantization_config": SECTION} if mxfp4 else {}
        write_json(partial / "config.json", config | {"dtype": str(kept).removeprefix("torch.")} | section)
        del reader, model
    write_companions(job, partial)
    for file in partial.iterdir():  # safetensors makes files that their owner alone can read
        file.chmod(file.stat().st_mode | (partial.stat().st_mode & 0o444))
    gc.collect()
    if proof:
        done["proof"] = prove(job, partial)
    finish_folder(partial, dest)
    return {"folder": dest, "mode": job.mode, **done, "seconds": time.monotonic() - started}


def check_memory(count: int, size: int) -> None:
    """Raises ExportError where the proof could not hold one model of `count` weights, `size` bytes each, in memory."""
    need, free = 1.2 * count * size, psutil.virtual_memory().available
    if need > free:
        raise ExportError(
            f"the proof loads the whole model, {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB of memory are free. Export "
            "with --no-proof here and prove it on a larger machine, or use a larger machine now."
        )


def prove(job: Job, folder: Path) -> dict:
    """Run export_proof.py on `folder` in a fresh process and return what it measured. Raises ExportError otherwise."""
    asked = json.dumps({"job": dataclasses.asdict(job), "folder": str(folder)})
    program = Path(__file__).with_name("export_proof.py")
    done = subprocess.run([sys.executable, str(program), asked], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(PROOF_LINE)]
    if done.returncode or not lines:
        told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise ExportError(
            f"{folder} was written but did not pass its proof: {told[-1].strip() if told else 'the process was killed'}"
        )
    return json.loads(lines[-1].removeprefix(PROOF_LINE))
