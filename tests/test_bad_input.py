"""What a person can get wrong ends in one paragraph that says what, where and what to do, before anything is lost."""

import fcntl
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import tiny_model
from datasets.utils.logging import disable_progress_bar
from transformers import AutoConfig, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "recipes" / "llama-3.2-1b"
sys.path.insert(0, str(LLAMA))
import guard  # noqa: E402
import inputs  # noqa: E402
import keeper  # noqa: E402
import ranks  # noqa: E402

disable_progress_bar()
ALL = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")
GOOD = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_model.write_tiny_model("llama", folder / "llama"),
        "mxfp4": tiny_model.write_tiny_model("gpt-oss", folder / "mxfp4", mxfp4=True),
    }


# ------------------------------------------------------------------------------------------------- the launch line


def problem(monkeypatch, *words, script=LLAMA / "train.py", strategies=ALL, gpus=0, **environment):
    """What guard says of a launch line, or None."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setattr(guard.torch.cuda, "device_count", lambda: gpus)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    return guard.launch_problem(parser, str(script), strategies)


TWO = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
CPU = ("--use_cpu", "true")


def test_a_good_launch_line_has_no_problem(monkeypatch):
    assert problem(monkeypatch, *CPU) is None
    assert problem(monkeypatch, gpus=2, **TWO) is None
    assert problem(monkeypatch, "--config", "lora", *CPU) is None
    assert problem(monkeypatch, "--config=qlora", *CPU) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning_rat", "1e-4"], ["command line", "--learning_rat ", "Did you mean --learning_rate?"]),
        (["--warmup_ratio=0.03"], ["--warmup_ratio", "warmup_steps"]),
        (["--torch_dtype", "bfloat16"], ["--torch_dtype", "--dtype"]),
        (["--max_steps", "10.5"], ["command line", "max_steps", "10.5"]),
        (["--packing_strategy", "best"], ["packing_strategy", "best", "bfd_split"]),
        (["--unfit_rows", "keep"], ["unfit_rows", "keep", "drop"]),
        (["stray"], ["stray", "no flag"]),
        (["--config", "nowhere"], ["nowhere.yaml", "no such config file", "config, lora, qlora"]),
    ],
)
def test_the_command_line_is_strict(monkeypatch, words, said):
    text = problem(monkeypatch, *words, *CPU)
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_steps: 10.5", ["max_steps", "10.5"]),
        ("learning_rte: 1.0e-4", ["`learning_rte`", "Did you mean learning_rate?"]),
        ("seed: 1", ["`seed` stands twice"]),
        ("packing_strategy: best", ["packing_strategy", "best"]),
        ("fp16: maybe", ["fp16", "Truthy value expected", "maybe"]),
        ("a line: [", ["bad.yaml"]),
    ],
)
def test_the_config_file_is_as_strict_as_flags(monkeypatch, tmp_path, line, said):
    config = tmp_path / "bad.yaml"
    config.write_text((LLAMA / "config.yaml").read_text() + line + "\n")
    text = problem(monkeypatch, "--config", str(config), *CPU)
    assert str(config) in text and all(part in text for part in said), text


def test_the_command_line_wins_over_the_config_file(monkeypatch):
    assert problem(monkeypatch, "--learning_rate", "7e-7", *CPU) is None
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    _, training_args, model_args, recipe_args = parser.parse_args_and_config()
    assert (training_args.learning_rate, training_args.max_length, model_args.dtype) == (7e-7, 4096, "float32")
    assert recipe_args.chat_template_kwargs == {"date_string": "26 Jul 2024"}
    assert Path(training_args.chat_template_path) == LLAMA / "llama3_2.jinja"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(TWO), ["no GPU is visible", "2 process(es)", "--use_cpu true"]),
        (dict(TWO, gpus=1), ["2 processes", "1 visible GPU", "--num_processes 1"]),
        (dict(gpus=4), ["4 GPUs are visible", "accelerate launch"]),
        (dict(TWO, gpus=2, strategies=("fsdp", "zero3")), ["does not fit", "`ddp`", "fsdp.yaml, zero3.yaml"]),
        (dict(TWO, gpus=2, ACCELERATE_MIXED_PRECISION="bf16"), ["mixed_precision", "Take that line out"]),
        (dict(TWO, gpus=2, ACCELERATE_USE_FSDP="true", FSDP_VERSION="1"), ["fsdp_version: 2"]),
        (
            dict(TWO, gpus=2, ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE="gone/zero3.json"),
            ["gone/zero3.json", "not here", "cookbook's root"],
        ),
    ],
)
def test_the_launcher_and_the_machine_are_compared(monkeypatch, options, said):
    text = problem(monkeypatch, **options)
    assert all(part in text for part in said), text


# ---------------------------------------------------------------------------------------------------------- memory


class Device:
    type = "cuda"


def memory(monkeypatch, name, world, gpu_gib, strategy, recipe=LLAMA, free_gib=2000, **model):
    """What guard says of the memory for model `name` ("1b", "8b", "20b", "120b") on GPUs of `gpu_gib`."""
    family = {"1b": "llama", "8b": "qwen3"}.get(name, "gpt-oss")
    config = tiny_model.build_real_config(family, name, tiny_model.build_tokenizer(family))
    config.dtype = "bfloat16"  # as published
    if model.pop("mxfp4", False):
        config.quantization_config = {"quant_method": "mxfp4"}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))
    total = SimpleNamespace(total_memory=gpu_gib * 2**30)
    monkeypatch.setattr(guard.torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(guard.psutil, "virtual_memory", lambda: SimpleNamespace(available=free_gib * 2**30))
    monkeypatch.setitem(guard.RUN, "strategy", strategy)
    monkeypatch.setitem(guard.RUN, "strategies", ALL)
    monkeypatch.setitem(guard.RUN, "script", str(recipe / "train.py"))
    arguments = ModelConfig(model_name_or_path=name, **model)
    return guard.memory_problem(config, arguments, SimpleNamespace(device=Device, optim="adamw_torch"))


def test_what_fits_passes(monkeypatch):
    assert memory(monkeypatch, "1b", 1, 24, "single", dtype="float32") is None
    lora = {"use_peft": True, "dtype": "bfloat16", "lora_target_modules": ["q_proj", "v_proj"]}
    assert memory(monkeypatch, "20b", 8, 80, "ddp", **lora) is None
    assert memory(monkeypatch, "120b", 8, 80, "fsdp", **lora) is None
    assert memory(monkeypatch, "8b", 4, 80, "zero3", dtype="float32") is None
    assert memory(monkeypatch, "120b", 1, 80, "single", load_in_4bit=True, **lora) is None


def test_what_does_not_fit_is_refused_with_a_variant_that_does(monkeypatch):
    invoice = ROOT / "recipes" / "qwen3-8b-invoice"
    text = memory(monkeypatch, "8b", 1, 80, "single", recipe=invoice, dtype="float32")
    # fp32 weights, gradients and two Adam moments: 16 bytes for each of 8.19e9 parameters
    assert "needs 122 GiB per GPU under single" in text and "this GPU has 80 GiB" in text, text
    assert "--config lora under single.yaml" in text and "--config qlora under single.yaml" in text, text
    lora = {"use_peft": True, "dtype": "bfloat16", "lora_target_modules": ["q_proj", "v_proj"]}
    text = memory(monkeypatch, "120b", 8, 80, "ddp", recipe=ROOT / "recipes" / "gpt-oss-120b", **lora)
    assert "--config config under fsdp.yaml" in text, text


def test_ranks_that_each_dequantize_must_fit_the_host(monkeypatch):
    lora = {"use_peft": True, "dtype": "bfloat16", "lora_target_modules": ["q_proj", "v_proj"], "mxfp4": True}
    text = memory(monkeypatch, "120b", 8, 80, "fsdp", free_gib=1000, **lora)
    assert "python scripts/export.py 120b DEST --bf16" in text and "1741 GiB" in text, text
    assert memory(monkeypatch, "120b", 8, 80, "fsdp", free_gib=2000, **lora) is None
    # FSDP2 with fp32 weights: transformers converts the bf16 file on every rank
    text = memory(monkeypatch, "8b", 8, 80, "fsdp", free_gib=200, dtype="float32")
    assert "--dtype bfloat16" in text and "244 GiB" in text, text
    assert memory(monkeypatch, "8b", 8, 80, "fsdp", free_gib=200, dtype="bfloat16") is None


# ------------------------------------------------------------------------------------------------------------ rows


def load(tmp_path, name, models, **recipe):
    """Rows of one file through inputs.load_rows; returns (train, eval)."""
    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    training = SFTConfig(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        max_length=recipe.pop("max_length", 256),
        eval_strategy="steps",
        eval_steps=1,
        assistant_only_loss=True,
        chat_template_path=str(LLAMA / "llama3_2.jinja"),
    )
    arguments = inputs.RecipeArguments(**recipe)
    return inputs.load_rows(ScriptArguments(dataset_name=str(name)), training, arguments, tokenizer)


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(("human", "a"), ("gpt", "b")), "the role 'human'"),
        (chat(("user", "a"), ("user", "b"), ("assistant", "c")), "both from 'user'"),
        (chat(("user", "a"), ("system", "b"), ("assistant", "c")), "may only come first"),
        (chat(("user", "a")), "no answer to learn"),
        (chat(("assistant", "a")), "no question"),
        (chat(("user", "a"), ("assistant", "  ")), "(assistant) is empty"),
        (chat(("user", "a"), ("assistant", None)), "(assistant) is empty"),
        (chat(("user", "a"), ("assistant", {"total": 1})), "holds dict, expected a string"),
        ({"messages": []}, "a list of messages"),
        ({"messages": "user: a"}, "a list of messages"),
        ({"messages": ["a"]}, "expected an object with `role` and `content`"),
        (
            {"conversations": [{"from": "bard", "value": "a"}]},
            "turn 1 is from 'bard', expected one of human, gpt, system",
        ),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}, "(assistant) is empty"),
        ({"conversations": "a"}, "a list of messages"),
        ({"instruction": "a", "input": "", "output": ""}, "(assistant) is empty"),
        ({"instruction": "a", "input": {"b": 1}, "output": "c"}, "`instruction` or `input` is no text"),
    ],
)
def test_a_bad_row_is_named_with_its_number_and_reason(tmp_path, models, row, reason):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [GOOD, row, GOOD, GOOD])))
    with pytest.raises(inputs.RowError, match=r"1 of 4 rows do not fit\. row 2: ") as caught:
        load(tmp_path, file, models)
    assert reason in str(caught.value) and "--unfit_rows drop" in str(caught.value)
    train, held_out = load(tmp_path, file, models, unfit_rows="drop")
    assert len(train) + len(held_out) == 3


def test_long_rows_stop_are_dropped_or_are_cut_as_asked(tmp_path, models, capsys):
    long = chat(("user", "a"), ("assistant", "word " * 200))
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [GOOD, long, GOOD, GOOD])))
    with pytest.raises(inputs.RowError, match=r"row 2: \d+ tokens, max_length is 256"):
        load(tmp_path, file, models)
    for choice, counts in (("drop", "4 rows read, 3 kept, 1 dropped, 0 cut"), ("cut", "4 kept, 0 dropped, 1 cut")):
        load(tmp_path, file, models, unfit_rows=choice)
        assert counts in capsys.readouterr().out
    with pytest.raises(inputs.RowError, match="none of 4 rows can be used"):
        load(tmp_path, file, models, unfit_rows="drop", max_length=8)


def test_files_that_cannot_be_read_are_named(tmp_path, models):
    cases = {
        "bytes.jsonl": (json.dumps(GOOD).encode() + b'\n{"messages": "\xff"}\n', "line 2: byte 14 (0xff) is not UTF-8"),
        "cut.jsonl": (json.dumps(GOOD).encode() + b'\n{"messages": [\n', "row 2: this is not JSON"),
        "list.jsonl": (b"[1]\n", "row 1: found list, expected an object"),
        "array.json": (b'[{"a": 1},\n oops]', "line 2: this is not JSON"),
        "columns.jsonl": (b'{"question": "a", "answer": "b"}\n', "has the columns answer, question; this recipe reads"),
        "empty.jsonl": (b"", "holds no rows"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(inputs.RowError) as caught:
            load(tmp_path, tmp_path / name, models)
        assert said in str(caught.value), (name, str(caught.value))
    with pytest.raises(inputs.RowError, match="there is no file or folder"):
        load(tmp_path, tmp_path / "nowhere.jsonl", models)
    with pytest.raises(inputs.RowError, match="the Hub did not give its split 'train'"):
        load(tmp_path, "nobody/nothing", models)


def test_rows_of_every_form_become_the_same_chats(tmp_path, models):
    """Alpaca's columns and ShareGPT's, with the spare ones that the published sets have, beside messages."""
    forms, speakers = {"messages": [], "sharegpt": [], "alpaca": []}, {"system": "system", "user": "human"}
    for number in range(8):
        more = f"{number}" * (number % 2)
        chats = chat(("user", f"Say it.\n\n{more}" if more else "Say it."), ("assistant", f"It, {number}."))
        turns = [
            {"from": speakers.get(m["role"], "gpt"), "value": m["content"], "weight": None} for m in chats["messages"]
        ]
        forms["messages"].append(chats)
        forms["sharegpt"].append({"conversations": turns, "source": "made", "score": 5.0})
        forms["alpaca"].append(
            {"instruction": "Say it.", "input": more, "output": f"It, {number}.", "text": "Below ..."}
        )
    made = []
    for name, rows in forms.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        made.append([[*part["messages"]] for part in load(tmp_path, file, models)])
    assert made[0] == made[1] == made[2]
    system = inputs.chat({"conversations": [{"from": "system", "value": "Be short."}, *turns]})["messages"]
    assert [message["role"] for message in system] == ["system", "user", "assistant"]


def test_all_file_kinds_give_the_same_rows(tmp_path, models):
    pairs = [{"prompt": f"When? {i}", "completion": f"2018-03-{i:02d}"} for i in range(1, 9)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, pairs)).encode())
    (tmp_path / "b.json").write_text(json.dumps(pairs, indent=1))
    lines = [f"{row['prompt']},{row['completion']}" for row in pairs]
    (tmp_path / "c.csv").write_text("\n".join(["\ufeffprompt,completion", *lines]), encoding="utf-8")
    from datasets import Dataset

    Dataset.from_list(pairs).to_parquet(tmp_path / "d.parquet")
    read = [[*inputs.read_file(path)] for path in sorted(tmp_path.iterdir()) if path.suffix in inputs.FILE_KINDS]
    assert len(read) == 4 and all(rows == pairs for rows in read)  # an ISO date stays text


def test_held_out_rows_are_drawn_by_the_seed_kept_and_never_trained_on(tmp_path, models):
    file = tmp_path / "rows.jsonl"
    rows = [chat(("user", f"q {i}"), ("assistant", f"a {i}")) | {"vendor": f"v{i % 4}"} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    train, held_out = load(tmp_path, file, models, eval_fraction=0.25)
    again = load(tmp_path, file, models, eval_fraction=0.25)
    assert (len(train), len(held_out)) == (30, 10) and [*again[1]["messages"]] == [*held_out["messages"]]
    kept = json.loads((tmp_path / "run" / "eval_rows.json").read_text())
    assert [rows[number - 1]["messages"] for number in kept] == [*held_out["messages"]]
    assert not {m[0]["content"] for m in train["messages"]} & {m[0]["content"] for m in held_out["messages"]}
    load(tmp_path, file, models, eval_fraction=0.25, group_by="vendor")
    kept = json.loads((tmp_path / "run" / "eval_rows.json").read_text())
    assert len({rows[number - 1]["vendor"] for number in kept}) == 1 and len(kept) == 10


# ------------------------------------------------------------------------------------------------- the run folder


def test_no_secret_reaches_the_run_record(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(guard.RUN, "folder", tmp_path)
    monkeypatch.setitem(guard.RUN, "record", {"command": ["train.py", "--hub_token", "hf_abcdefghijklmnop"]})
    ranks.record(error="no answer from https://user:pass-word@host/data")
    text = (tmp_path / "run.json").read_text()
    assert "abcdefgh" not in text and "pass-word" not in text and "@host/data" in text


def test_a_checkpoint_that_is_not_whole_is_told_apart(tmp_path):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    assert "cut off" in keeper.is_complete(folder)
    (folder / keeper.MARK).write_text("{")
    assert "cut off" in keeper.is_complete(folder)
    (folder / keeper.MARK).write_text(json.dumps({"files": {"weights": 4, "optimizer.pt": 2}}))
    assert keeper.is_complete(folder) == "optimizer.pt is missing, expected 2 bytes"
    (folder / "optimizer.pt").write_bytes(b"")
    assert keeper.is_complete(folder) == "optimizer.pt is 0 bytes, expected 2 bytes"
    (folder / "optimizer.pt").write_bytes(b"12")
    assert keeper.is_complete(folder) is None


# ------------------------------------------------------------------------- what only a real launch can show


@pytest.fixture
def attempt(tmp_path, models):
    """Launch the Llama recipe with a tiny model and return (exit code, the paragraph it printed)."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, [GOOD] * 8)))

    def launch(strategy, *words, run="run", **options):
        arguments = ["--model_name_or_path", models["llama"], "--dataset_name", rows, "--max_steps", "2"]
        arguments += ["--output_dir", tmp_path / run, "--bf16", "false", "--save_steps", "1", *words]
        result = launching.launch(LLAMA, strategy, *arguments, log=tmp_path / "log", timeout=180, **options)
        paragraphs = re.findall(r"^error: .+?(?=\n\n)", result.output, re.MULTILINE | re.DOTALL)
        return result.rc, " ".join(" ".join(paragraphs).split()), result.output

    return launch


def test_fsdp_that_would_be_plain_ddp_is_refused(attempt):
    rc, said, _ = attempt("fsdp", wrapper=False)
    assert rc != 0 and "asks for fsdp over 2 process(es), but what runs is ddp" in said


def test_full_weights_in_bf16_without_masters_are_refused(attempt):
    rc, said, _ = attempt("ddp", "--dtype", "bfloat16", "--bf16", "true")
    assert rc != 0 and "without fp32 masters" in said and said.count("error:") == 1


def test_loading_that_has_a_flag_of_its_own_is_refused(attempt):
    """Everything else in model_init_kwargs reaches the model, here a name that transformers refuses."""
    rc, said, _ = attempt("ddp", "--model_init_kwargs", '{"dtype": "bfloat16", "device_map": "auto"}')
    assert rc != 0 and "model_init_kwargs names dtype, device_map. Leave that to --dtype, the launcher." in said
    rc, said, _ = attempt("ddp", "--model_init_kwargs", "experts_implementation=fused")
    assert rc != 0 and "model_init_kwargs is 'experts_implementation=fused', expected JSON" in said
    rc, _, output = attempt("single", "--model_init_kwargs", '{"experts_implementation": "nobody"}', processes=1)
    assert rc != 0 and 'Specified `experts_implementation="nobody"` is not supported' in output
    assert "warning: model_init_kwargs changes the model" not in output


def test_a_model_that_cannot_be_had_is_named_once(attempt):
    rc, said, _ = attempt("ddp", "--model_name_or_path", "nobody/nothing")
    assert rc != 0 and "'nobody/nothing' is no folder here" in said and "HF_TOKEN" in said and said.count("error:") == 1


def test_a_run_folder_belongs_to_one_run_and_one_process(attempt, tmp_path):
    rc, _, output = attempt("single", processes=1)
    assert rc == 0, output
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    rc, said, _ = attempt("single", "--learning_rate", "1e-3", processes=1)
    assert rc != 0 and "holds another run: learning_rate was 2e-05, now 0.001" in said
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rc, said, _ = attempt("single", processes=1)
        assert rc != 0 and "in use by a live run" in said
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}


def test_an_adapter_that_misses_its_experts_is_refused(models, monkeypatch):
    """peft only warns of a target parameter that matches nothing, and trains the rest."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models["mxfp4"]))
    config = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_projection"])
    said = []
    monkeypatch.setattr(keeper, "agree", lambda stage, text: said.append(text))
    monkeypatch.setattr(keeper, "say", lambda text: None)
    trainer = SimpleNamespace(model=get_peft_model(model, config))
    with pytest.raises(AttributeError):  # the stand-in has no data: the check comes before it
        keeper.watch(trainer)
    assert "mlp.experts.gate_up_projection" in said[0]
