"""A run or checkpoint exported is one folder that plain transformers or peft loads as the model that was trained.

The recipes themselves make the checkpoints, by their launch files, with tiny models; `final/` of the same step, written
by another path, is what an export is compared with.
"""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import export
import export_mxfp4
import export_proof
import export_run
import export_shards
import launching
import pytest
import smoke
import tiny_model
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2
RUNS = {  # recipe, configuration, strategy, precision
    "fsdp": ("llama-3.2-1b", "config", "fsdp", "fp32"),
    "zero2": ("llama-3.2-1b", "config", "zero2", "shipped"),
    "zero3": ("llama-3.2-1b", "config", "zero3", "fp32"),
    "lora-ddp": ("gpt-oss-20b", "expert_lora", "ddp", "fp32"),
    "lora-fsdp": ("gpt-oss-20b", "expert_lora", "fsdp", "fp32"),
}
COMPARE = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Mxfp4Config

@torch.no_grad()
def logits(folder, base, dtype):
    kind = json.load(open(f"{base or folder}/config.json")).get("quantization_config")
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if kind else {"dtype": dtype}
    model, told = AutoModelForCausalLM.from_pretrained(base or folder, output_loading_info=True, **options)
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    model = PeftModel.from_pretrained(model, folder) if base else model
    return model.eval()(input_ids=torch.arange(8, 40).view(2, 16)).logits.float()

for name, (one, one_base, other, other_base, dtype) in json.load(sys.stdin).items():
    a, b = logits(one, one_base, dtype), logits(other, other_base, dtype)
    print(json.dumps([name, (a - b).abs().max().item(), bool(torch.equal(a, b))]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: run folder} of RUNS, each of two steps with a checkpoint after each, launched on first use."""

    class Runs(dict):
        benches = {}  # noqa: RUF012

        def __missing__(self, name):
            recipe, config, strategy, precision = RUNS[name]
            if (recipe, precision) not in self.benches:
                work = tmp_path_factory.mktemp(recipe)
                self.benches[recipe, precision] = smoke.Bench(ROOT / "recipes" / recipe, work, config, precision)
            bench = self.benches[recipe, precision]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(smoke, "STEPS", STEPS)
                patched.setattr(smoke, "SAVE_EVERY", 1)
                result = bench.launch(strategy, bench.work / strategy, 2, bench.work / f"{strategy}.log")
            assert result.rc == 0, result.output[-3000:]
            self[name] = bench.work / strategy
            return self[name]

    return Runs()


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory):
    """Exports without proof, by their names; made on first use."""
    asked = {
        "fsdp": ("fsdp", f"checkpoint-{STEPS}", {"shard_bytes": 100_000}),
        "fsdp-early": ("fsdp", "checkpoint-1", {}),
        "zero2": ("zero2", f"checkpoint-{STEPS}", {"dtype": "bfloat16"}),
        "zero2-masters": ("zero2", f"checkpoint-{STEPS}", {}),
        "zero3": ("zero3", f"checkpoint-{STEPS}", {}),
        "run": ("zero3", ".", {}),
        "lora-ddp": ("lora-ddp", f"checkpoint-{STEPS}", {}),
        "lora-fsdp": ("lora-fsdp", f"checkpoint-{STEPS}", {}),
        "merged": ("lora-fsdp", f"checkpoint-{STEPS}", {"merge": True}),
    }
    folder = tmp_path_factory.mktemp("exports")

    class Exports(dict):
        def __missing__(self, name):
            run, place, options = asked[name]
            export_run.export_run(runs[run] / place, folder / name, proof=False, **options)
            self[name] = folder / name
            return self[name]

    return Exports()


@pytest.fixture
def plain(tmp_path):
    """A tiny Llama beside a copy that was trained, as whole weights."""
    base = tiny_model.write_tiny_model("llama", tmp_path / "base")
    trained = Path(shutil.copytree(base, tmp_path / "trained"))
    edit(trained, lambda tensors: {name: tensor + 0.01 for name, tensor in tensors.items()})
    return base, trained


def edit(folder, change):
    file = next(folder.glob("*.safetensors"))
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def stored(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def refusal(*arguments):
    with pytest.raises(SystemExit) as stopped:
        export.main([*map(str, arguments), "--no-proof"])
    assert "\n" not in stopped.value.code
    return stopped.value.code


def mark(checkpoint):
    """Write complete.json as the keeper does."""
    (checkpoint / "complete.json").unlink(missing_ok=True)
    files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
    (checkpoint / "complete.json").write_text(json.dumps({"files": files}))


def copy_of(run, tmp_path, **record):
    """A copy of a run folder, its record changed."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | record))
    return copy


# ---------------------------------------------------------------- what was trained is what is loaded


def test_fresh_process_gives_the_logits_of_final(runs, exports):
    def base(run):
        return json.loads((runs[run] / "run.json").read_text())["arguments"]["model_name_or_path"]

    pairs = {name: (name, name, None) for name in ("fsdp", "zero2", "zero3")}
    pairs |= {"run": ("run", "zero3", None), "lora-ddp": ("lora-ddp",) * 3, "lora-fsdp": ("lora-fsdp",) * 3}
    asked = {}
    for export_name, run, adapted in pairs.values():
        model = base(adapted) if adapted else None
        asked[export_name] = (exports[export_name], model, runs[run] / "final", model, "auto")
    asked["merged"] = (exports["merged"], None, runs["lora-fsdp"] / "final", base("lora-fsdp"), "float32")
    asked["base fsdp"] = (exports["fsdp"], None, base("fsdp"), None, "float32")
    asked["base merged"] = (exports["merged"], None, base("lora-fsdp"), None, "float32")
    asked["early"] = (exports["fsdp-early"], None, exports["fsdp"], None, "float32")
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], input=json.dumps(asked, default=str), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: (most, equal) for name, most, equal in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == asked.keys()
    for name in pairs:
        assert found[name][1], (name, found)
    assert found["merged"][0] < 1e-5, found
    for name in ("base fsdp", "base merged", "early"):
        assert found[name][0] > 1e-3, (name, found)


def test_zero_shards_are_read_as_deepspeed_reads_them(runs, exports, monkeypatch):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)  # a recipe sets it; DeepSpeed's reader unpickles
    for run, name in (("zero2", "zero2-masters"), ("zero3", "zero3")):
        expected = get_fp32_state_dict_from_zero_checkpoint(str(runs[run] / f"checkpoint-{STEPS}"))
        found = stored(exports[name])
        expected.pop("lm_head.weight")  # tied
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_folder_is_an_ordinary_model(runs, exports):
    for name, run in (("fsdp", "fsdp"), ("fsdp-early", "fsdp"), ("zero2", "zero2"), ("run", "zero3")):
        folder, final = exports[name], runs[run] / "final"
        config, trained = (json.loads((path / "config.json").read_text()) for path in (folder, final))
        assert config == trained | {"use_cache": True}  # training switches the cache off
        assert config["architectures"] == ["LlamaForCausalLM"]
        base = json.loads((runs[run] / "run.json").read_text())["arguments"]["model_name_or_path"]
        template = AutoTokenizer.from_pretrained(folder).chat_template
        assert template == AutoTokenizer.from_pretrained(base).chat_template and "generation %}" not in template
        assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6
        assert "lm_head.weight" not in stored(folder)
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
        card = (folder / "README.md").read_text()
        assert "| Steps |" in card and str(runs[run].parent) not in card
        assert not (folder / export.IN_PROGRESS).exists() and not list(folder.glob("*.bin"))


def test_weights_are_sharded_by_size(exports):
    files = sorted(exports["fsdp"].glob("model-*.safetensors"))
    index = json.loads((exports["fsdp"] / export.INDEX).read_text())
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        with safe_open(file, "pt") as handle:
            sizes = [handle.get_tensor(name).nbytes for name in handle.keys()]  # noqa: SIM118
        assert sum(sizes) <= 100_000 or len(sizes) == 1


def test_adapter_keeps_tensors_and_settings(runs, exports, tmp_path):
    for name in ("lora-ddp", "lora-fsdp"):
        folder, final = exports[name], runs[name] / "final"
        found, expected = stored(folder), stored(final)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
        assert not list(folder.glob("model*")) and not (folder / "config.json").exists()
    # A run that was stopped has no final/ to take adapter_config.json from, and FSDP checkpoints have none.
    stopped = copy_of(runs["lora-fsdp"], tmp_path, outcome="preempted")
    shutil.rmtree(stopped / "final")
    export_run.export_run(stopped, tmp_path / "out", proof=False)
    found, expected = (
        json.loads((path / "adapter_config.json").read_text())
        for path in (tmp_path / "out", runs["lora-fsdp"] / "final")
    )
    for key in ("target_modules", "target_parameters"):
        found[key], expected[key] = sorted(found[key]), sorted(expected[key])
    assert found == expected


def test_adapter_names_the_published_base(runs, tmp_path):
    stopped = copy_of(runs["lora-ddp"], tmp_path)
    base = Path(json.loads((stopped / "run.json").read_text())["arguments"]["model_name_or_path"])
    known = Path(shutil.copytree(base, tmp_path / "base"))
    record = {"base_model_name_or_path": "openai/gpt-oss-20b", "base_model_revision": "abc"}
    (known / "cookbook.json").write_text(json.dumps(record))
    export_run.export_run(stopped / "checkpoint-1", tmp_path / "out", base=str(known), proof=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("openai/gpt-oss-20b", "abc")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: openai/gpt-oss-20b" in card and "library_name: peft" in card and str(tmp_path) not in card


def test_proof_passes_and_is_told(runs, tmp_path, capsys):
    export.main([str(runs["lora-fsdp"] / f"checkpoint-{STEPS}"), str(tmp_path / "out"), "--merge", "--mxfp4"])
    told = capsys.readouterr().out
    assert "proven in a fresh process: largest difference" in told and "relative error" in told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4" and config["dtype"] == "bfloat16"


def test_proof_refuses_what_was_not_trained(plain, tmp_path):
    base, trained = plain
    job = export_run.Job(str(trained), str(base))
    export_run.export_run(trained, tmp_path / "out", base=str(base), proof=False)
    assert export_proof.prove(job, tmp_path / "out")["largest_difference"] == 0
    edit(tmp_path / "out", lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.01})
    with pytest.raises(export.ExportError, match="away from those of the trained model"):
        export_proof.prove(job, tmp_path / "out")
    with pytest.raises(export.ExportError, match="those of the base model: nothing that was trained"):
        export_proof.prove(export_run.Job(str(base), str(base)), base)


def test_failed_proof_leaves_no_dest(plain, tmp_path, monkeypatch):
    base, _ = plain
    done = subprocess.CompletedProcess([], 1, "", "its logits are those of the base model.\n")
    monkeypatch.setattr(export_run.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(export.ExportError, match="did not pass its proof: its logits are those of the base"):
        export_run.export_run(base, tmp_path / "out", base=str(base))
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial" / export.IN_PROGRESS).exists()


# ---------------------------------------------------------------- which weights


def test_run_gives_final_or_the_newest_whole_checkpoint(runs, tmp_path):
    run = copy_of(runs["fsdp"], tmp_path)
    assert export_run.find_source(run)[0].name == "final"
    (run / "run.json").write_text(json.dumps({"outcome": "running"}))
    assert export_run.find_source(run)[0].name == f"checkpoint-{STEPS}"
    part = next((run / f"checkpoint-{STEPS}").rglob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    assert export_run.find_source(run)[0].name == "checkpoint-1"
    assert f"{part.name} is {part.stat().st_size} bytes" in refusal(run / f"checkpoint-{STEPS}", tmp_path / "out")
    (run / "checkpoint-1" / "complete.json").unlink()
    message = refusal(run, tmp_path / "out")
    assert "checkpoint-1: it has no complete.json" in message and part.name in message


def test_wrong_places_and_options_are_refused(plain, tmp_path):
    _, trained = plain
    out = tmp_path / "out"
    assert "is no folder" in refusal(tmp_path / "nowhere", out)
    (tmp_path / "empty").mkdir()
    assert "neither a run folder" in refusal(tmp_path / "empty", out)
    assert "holds no adapter" in refusal(trained, out, "--merge")
    assert "no expert weights" in refusal(trained, out, "--mxfp4")
    assert "takes no --mxfp4" in refusal(trained, out, "--bf16", "--mxfp4")
    assert "is no folder" in refusal(trained, out, "--base", tmp_path / "nowhere")
    other = tiny_model.write_tiny_model("qwen3", tmp_path / "other", hidden=32)
    shutil.copy(other / "config.json", trained / "config.json")
    assert "Is --base the right model?" in refusal(trained, out)
    assert not out.exists()


def test_lost_and_untied_weights_are_refused(plain, tmp_path):
    _, trained = plain
    content = next(trained.glob("*.safetensors")).read_bytes()
    edit(trained, lambda tensors: tensors | {"model.norm.weight": torch.zeros(0)})
    assert "model.norm.weight is empty" in refusal(trained, tmp_path / "out")
    next(trained.glob("*.safetensors")).write_bytes(content)
    edit(trained, lambda tensors: {name: tensors[name] for name in tensors if name != "model.norm.weight"})
    assert "model.norm.weight is missing" in refusal(trained, tmp_path / "out")
    next(trained.glob("*.safetensors")).write_bytes(content)
    edit(trained, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert "lm_head.weight and model.embed_tokens.weight differ" in refusal(trained, tmp_path / "out2")


def test_traces_of_training_leave_the_config(plain, tmp_path):
    base, trained = plain
    config = json.loads((trained / "config.json").read_text())
    config |= {"architectures": ["FSDPLlamaForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (trained / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    export_run.export_run(trained, tmp_path / "out", base=str(base), dtype="bfloat16", proof=False)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in found
    assert found["use_cache"] is True and found["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}


# ---------------------------------------------------------------- no code from a checkpoint


class Attack:
    """A pickle of it makes a folder when it is loaded as pickles are."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_pickle_of_a_checkpoint_is_run(runs, tmp_path):
    ran = tmp_path / "ran"
    fsdp = Path(shutil.copytree(runs["fsdp"] / "checkpoint-1", tmp_path / "checkpoint-1"))
    (fsdp / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Attack(ran)))
    mark(fsdp)
    assert "posix.mkdir" in refusal(fsdp, tmp_path / "out")
    for number, name in ((2, "*_optim_states.pt"), (3, "*_model_states.pt")):
        zero = Path(shutil.copytree(runs["zero3"] / "checkpoint-1", tmp_path / f"checkpoint-{number}"))
        torch.save({"optimizer_state_dict": Attack(ran)}, sorted(zero.glob(f"global_step*/{name}"))[0])
        mark(zero)
        assert "could run code" in refusal(zero, tmp_path / "out")
    assert not ran.exists()


# ---------------------------------------------------------------- MXFP4


def test_weights_from_mxfp4_come_back_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=generator)
    blocks[0, 0] = 0  # a block of zeros
    blocks[0, 1] = 0x11  # and one of the smallest step alone
    scales = torch.randint(90, 140, (3, 64, 4), dtype=torch.uint8, generator=generator)
    weight = export_mxfp4.dequantize_mxfp4(blocks, scales)
    again = export_mxfp4.dequantize_mxfp4(*export_mxfp4.quantize_mxfp4(weight))
    assert torch.equal(again.view(torch.int16), weight.view(torch.int16))  # the sign of zero, too


def test_rounding_is_to_the_nearest_and_never_clips():
    weight = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 32)
    blocks, scales = export_mxfp4.quantize_mxfp4(weight)
    found = export_mxfp4.dequantize_mxfp4(blocks, scales).float()
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=2).transpose(1, 2)
    assert (weight.abs() <= 6 * unit).all()
    values = torch.tensor(export_mxfp4.FP4_VALUES).unique()
    nearest = (weight.div(unit).unsqueeze(-1) - values).abs().amin(-1)
    assert torch.equal((weight - found).div(unit).abs(), nearest)
    noise, power = export_mxfp4.check_mxfp4("w", weight, blocks, scales)
    assert 0.01 < math.sqrt(noise / power) < 0.2
    with pytest.raises(export.ExportError, match="further off"):
        export_mxfp4.check_mxfp4("w", weight, blocks ^ 8, scales)
    with pytest.raises(export.ExportError, match="not finite"):
        export_mxfp4.quantize_mxfp4(weight / 0)
    with pytest.raises(export.ExportError, match="blocks of 32"):
        export_mxfp4.quantize_mxfp4(weight[:, :95])


def test_merge_into_mxfp4_leaves_untouched_experts_to_the_bit(tmp_path):
    base = tiny_model.write_tiny_model("gpt-oss", tmp_path / "base", mxfp4=True)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(base)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", inference_mode=True)
    lora.base_model_name_or_path = str(base)
    model = get_peft_model(model, lora)
    adapter = {
        name.replace(".default", ""): torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.1
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    lora.save_pretrained(str(tmp_path / "adapter"))
    export_run.export_run(tmp_path / "adapter", tmp_path / "out", merge=True, mxfp4=True, proof=False)
    before, after = stored(base), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        if name.endswith("_blocks"):
            target = name.removesuffix("_blocks")
            one, other = (
                export_mxfp4.dequantize_mxfp4(found[name], found[target + "_scales"]) for found in (before, after)
            )
            assert torch.equal(one, other), name
        elif "q_proj.weight" in name or "o_proj.weight" in name:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            delta = adapter[key + "B.weight"] @ adapter[key + "A.weight"] * lora.lora_alpha / lora.r
            assert torch.equal(after[name], (before[name].float() + delta).bfloat16()), name
        elif not name.endswith("_scales"):
            assert torch.equal(before[name], after[name]), name


# ---------------------------------------------------------------- memory

PEAK = """
import re, sys
sys.path.insert(0, sys.argv[1])
import export, export_run
from transformers import AutoTokenizer

def peak():  # ru_maxrss begins with the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

export_run.empty_model(sys.argv[2]); AutoTokenizer.from_pretrained(sys.argv[2])
before = peak()
export.main([*sys.argv[3:], "--shard-size", "32MB", "--no-proof"])
print(peak() - before)
"""


def test_peak_memory_is_near_one_shard_and_not_one_model(tmp_path):
    base = tiny_model.write_tiny_model("qwen3", tmp_path / "base", hidden=1024, layers=11)
    tensors = stored(base)
    whole, run = sum(tensor.nbytes for tensor in tensors.values()), tmp_path / "run"
    assert whole > 280e6
    fsdp, zero = run / "checkpoint-1", run / "checkpoint-2"
    fsdp.mkdir(parents=True)
    dcp.save({"model": tensors}, checkpoint_id=str(fsdp / "pytorch_model_fsdp_0"), no_dist=True)
    (zero / "global_step2").mkdir(parents=True)
    (zero / "latest").write_text("global_step2")
    for rank in range(2):  # ZeRO-3 over two ranks; every size is even
        flat = torch.cat([tensor.flatten().chunk(2)[rank] for tensor in tensors.values()])
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}}
        torch.save(model, zero / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"optimizer_state_dict": {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [flat]}}
        torch.save(state, zero / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        del flat
    mark(fsdp)
    mark(zero)
    (run / "run.json").write_text(json.dumps({"arguments": {"model_name_or_path": str(base)}}))
    for checkpoint in (fsdp, zero):
        out = tmp_path / checkpoint.name
        command = [sys.executable, "-c", PEAK, launching.SCRIPTS, base, checkpoint, out]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        peak = int(done.stdout.splitlines()[-1])
        assert 20e6 < peak < whole / 2, (checkpoint.name, peak, whole)
        found = stored(out)
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
        del found


def test_reading_opens_files_anew(runs, monkeypatch):
    monkeypatch.setattr(export_shards, "REOPEN_BYTES", 10_000)
    reader = export_shards.open_weights(runs["zero2"] / f"checkpoint-{STEPS}")
    whole = {name: reader.read(name).clone() for name in reader.tensors}
    assert all(torch.equal(reader.read(name), whole[name]) for name in reversed(whole))
