"""Several nodes: they meet before a launch and name what is wrong; the outcome is read from the run; job files are valid."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "scripts" / "engines"
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py"))
sys.path.insert(0, str(ENGINES))

import local_slurm  # noqa: E402
import node  # noqa: E402
import render  # noqa: E402

LINE = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml", "recipes/llama-3.2-1b/train.py"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# ------------------------------------------------------------------------------------------- the nodes meet


def together(
    monkeypatch, lines: list, ranks=(0, 1), addresses=("127.0.0.1", "127.0.0.1"), wait=30.0, same=None
) -> list:
    """What `meet` gives two nodes, each a thread with a name of its own: host names, or the error."""
    monkeypatch.setattr(node, "host", lambda: threading.current_thread().name)
    port = local_slurm.free_ports(2)[0]

    def one(number: int):
        threading.current_thread().name = f"host-{'ab'[number]}"
        place = node.Place(ranks[number], 2, addresses[number], port, 300, wait)
        try:
            facts = same[number] if same else node.facts(lines[number], 1)
            return node.meet(place, lines[number], facts, None)
        except node.RefusedError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def line_into(folder: Path, words=LINE):
    return node.read_line([*words, "--output_dir", str(folder)])


def test_equal_nodes_meet_and_leave_no_file(monkeypatch, tmp_path):
    line = line_into(tmp_path / "run")
    assert together(monkeypatch, [line, line]) == [["host-a", "host-b"]] * 2
    assert list((tmp_path / "run").iterdir()) == []


def test_other_versions_and_files_are_named_with_their_node(monkeypatch, tmp_path):
    other = tmp_path / "other"
    for folder in ("recipes/llama-3.2-1b", "accelerate_configs", "deepspeed_configs"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    line = line_into(tmp_path / "run")
    first = node.facts(line, 1)
    config = other / "recipes" / "llama-3.2-1b" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("seed: 42", "seed: 43"), encoding="utf-8")
    with contextlib.chdir(other):
        second = node.facts(line, 1) | {"transformers": "5.23.0"}
    errors = together(monkeypatch, [line, line], same=[first, second])
    for error in errors:
        assert error.code == node.REFUSED
        assert "not the same as on host-a: host-b: " in str(error)
        assert "transformers is 5.23.0 instead of " in str(error)
        assert "recipes/llama-3.2-1b/config.yaml is " in str(error) and "train.py" not in str(error)


def test_a_rank_that_stands_twice_is_named(monkeypatch, tmp_path):
    line = line_into(tmp_path)
    place = node.Place(0, 3, "127.0.0.1", 1, 300, 3)
    met = [(0, "host-a", {}), (1, "host-b", {}), (1, "host-c", {})]
    text = node.twice_problem(place, met)
    assert "host-b (NODE_RANK 1), host-c (NODE_RANK 1)" in text and "no node has NODE_RANK 2" in text
    errors = together(monkeypatch, [line, line], ranks=(0, 0), wait=3)
    assert any("second node with NODE_RANK 0" in str(error) and error.code == node.REFUSED for error in errors)


def test_an_output_folder_that_is_not_shared_is_refused(monkeypatch, tmp_path):
    lines = [line_into(tmp_path / name) for name in ("disk-a", "disk-b")]
    same = [node.facts(lines[0], 1)] * 2  # one path, as on two machines with local disks
    for error in together(monkeypatch, lines, same=same, wait=3):
        assert error.code == node.REFUSED
        assert f"what host-a writes into {tmp_path / 'disk-a'} is not seen by host-b ({tmp_path / 'disk-b'})" in str(
            error
        )


def test_a_missing_node_and_a_wrong_address_are_worth_another_start(monkeypatch, tmp_path):
    line = line_into(tmp_path)
    alone, lost = together(monkeypatch, [line, line], addresses=("127.0.0.1", "192.0.2.1"), wait=3)
    assert alone.code == lost.code == node.RESTART
    assert "1 of 2 nodes have come: host-a with NODE_RANK 0" in str(alone)
    assert "host-b (NODE_RANK 1) cannot reach MASTER_ADDR 192.0.2.1" in str(lost)
    other, _ = together(monkeypatch, [line, line], addresses=("192.0.2.1", "127.0.0.1"), wait=3)
    assert other.code == node.REFUSED and "192.0.2.1 (192.0.2.1) is no address of it" in str(other)


def test_nodes_whose_counts_contradict_each_other_are_refused():
    for variables, told in (
        ({"NUM_NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK 2 of NUM_NODES 2"),
        ({"NUM_NODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR is not set"),
        ({"NUM_NODES": "two"}, "whole numbers"),
    ):
        with pytest.raises(node.RefusedError, match=told):
            node.read_place(variables)
    assert node.read_place({"NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "a"}).rank == 1


def test_a_line_that_counts_processes_itself_is_refused():
    with pytest.raises(node.RefusedError, match="take --num_processes out"):
        node.read_line([*LINE[:2], "--num_processes", "16", *LINE[2:]])
    with pytest.raises(node.RefusedError, match=r"single\.yaml is for 1 process, and the job has 2 nodes"):
        single = [word.replace("zero2", "single") for word in LINE]
        node.count_processes(node.read_line(single), node.Place(0, 2, "a", 1, 300, 1))
    with pytest.raises(node.RefusedError, match=r"no file `recipes/llama-3.2-1b/nothing.yaml`"):
        node.read_line([*LINE, "--config", "nothing"])


def test_the_launch_carries_the_engines_numbers_and_the_line_as_it_is():
    line = node.read_line([*LINE, "--learning_rate", "1e-5"])
    words = node.launch_words(line, node.Place(1, 4, "node-0", 29500, 300, 1), 8)
    flags = "--num_machines 4 --machine_rank 1 --main_process_ip node-0 --main_process_port 29500 --num_processes 32"
    assert words[words.index("launch") + 1 :] == flags.split() + line.words[2:]


# ------------------------------------------------------------------------------------------- the outcome


@pytest.mark.parametrize(
    "outcome, error, opened, refusal, expected",
    [
        ("done", None, True, "", node.DONE),
        ("done", None, False, "", node.DONE),  # finished before: the recipe said so, exit code 0
        ("preempted", None, True, "", node.RESTART),
        ("running", None, True, "", node.RESTART),  # its processes were killed
        ("failed", "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer", True, "", node.RESTART),
        ("failed", "DistBackendError: NCCL error: remote process exited", True, "", node.RESTART),
        ("failed", "OutOfMemoryError: CUDA out of memory", True, "", node.REFUSED),
        ("failed", "step 3: the loss is nan", True, "step 3: the loss is nan", node.REFUSED),
        ("preempted", None, False, "unknown key", node.REFUSED),  # of an earlier start: this one was refused
        (None, None, False, "", node.RESTART),
    ],
)
def test_the_outcome_is_read_from_the_run(tmp_path, outcome, error, opened, refusal, expected):
    if outcome:
        record = {"outcome": outcome, "error": error, "started": [1.0, 2.0]}
        (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    code = 0 if outcome == "done" else 1
    assert node.judge(tmp_path, 1 if opened else 2, refusal, code)[0] == expected


def test_restarts_without_a_new_checkpoint_are_counted_and_bounded(tmp_path):
    for _ in range(3):
        assert node.stalled_problem(tmp_path, 2) is None
        node.note(tmp_path, checkpoint=0)
        node.note(tmp_path, exit_code=node.RESTART)
    assert "restarted 2 times in a row and no new checkpoint came" in node.stalled_problem(tmp_path, 2)
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "complete.json").write_text("{}", encoding="utf-8")
    assert node.stalled_problem(tmp_path, 2) is None  # there was progress
    for _ in range(3):
        node.note(tmp_path, checkpoint=4)
    assert node.stalled_problem(tmp_path, 2)
    node.note(tmp_path, exit_code=node.REFUSED)  # a person starts it again
    assert node.stalled_problem(tmp_path, 2) is None


# ------------------------------------------------------------------------------------------- job files


def job_file(engine: str, recipe: Path, nodes: int, *more: str) -> str:
    folder = {"air": "/Volumes/main/default/runs"}.get(engine, "/runs")
    strategy = render.strategies(recipe)[-1]
    line = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    line += [str(recipe.relative_to(ROOT) / "train.py"), "--output_dir", f"{folder}/{recipe.name}"]
    command = [sys.executable, str(ENGINES / "render.py"), engine, "--nodes", str(nodes), *more, *line]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " ".join(line) in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def job_files() -> dict:
    """Every engine's file for every recipe, on two nodes."""
    return {(engine, recipe.name): job_file(engine, recipe, 2) for engine in render.ENGINES for recipe in RECIPES}


def test_node_and_gpu_counts_agree_everywhere_in_a_job_file(job_files):
    for recipe in RECIPES:
        (jobset,) = yaml.safe_load_all(job_files["jobset", recipe.name])
        service, job = yaml.safe_load_all(job_files["indexed_job", recipe.name])
        inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        for spec, address in (
            (inner, f"{jobset['metadata']['name']}-node-0-0.{jobset['spec']['network']['subdomain']}"),
            (job["spec"], f"{job['metadata']['name']}-0.{service['metadata']['name']}"),
        ):
            pod = spec["template"]["spec"]
            (container,) = pod["containers"]
            variables = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert spec["completions"] == spec["parallelism"] == int(variables["NUM_NODES"]) == 2
            assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
            assert variables["MASTER_ADDR"] == address
            assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} == container["resources"]["requests"]
            assert pod["terminationGracePeriodSeconds"] > int(variables["GRACE_SECONDS"])
            assert spec["podFailurePolicy"]["rules"][0] == {
                "action": "FailJob",
                "onExitCodes": {"containerName": "train", "operator": "In", "values": [node.REFUSED]},
            }
            assert node.read_line(container["args"]).recipe.name == recipe.name
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/dev/shm", "/runs"} == mounts
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and pod["subdomain"]
        sky = yaml.safe_load(job_files["sky", recipe.name])
        assert sky["num_nodes"] == 2 and sky["resources"]["accelerators"] == "H100:8"
        assert "pip install -r requirements.txt -r requirements-hopper.txt" in sky["setup"]
        assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [node.RESTART]
        air = yaml.safe_load(job_files["air", recipe.name])
        assert air["compute"] == {"accelerator_type": "GPU_8xH100", "num_accelerators": 16}
        pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
        assert air["environment"]["dependencies"] == pins


def test_flash_attention_is_installed_where_the_gpu_can_use_it():
    sky = {kind: yaml.safe_load(job_file("sky", RECIPES[0], 1, "--accelerator", kind)) for kind in ("H200", "A100")}
    assert ["hopper" in file["setup"] for file in sky.values()] == [True, False]


@pytest.mark.parametrize(
    "engine, arguments, told",
    [
        ("jobset", [*LINE, "--output_dir", "run"], "give --output_dir in the launch line, under /runs/"),
        ("air", [*LINE, "--output_dir", "/runs/x"], "under /Volumes/"),
        ("jobset", [*LINE, "--output_dir", "/runs/x", "--use_cpu", "true"], "take `--use_cpu true` out"),
        ("air", ["--gpus", "4", *LINE, "--output_dir", "/Volumes/x"], "--accelerator GPU_8xH100 and --gpus 4"),
        (
            "sky",
            [*LINE[:3], "accelerate_configs/none.yaml", LINE[4], "--output_dir", "/runs/x"],
            "there is no file `accelerate_configs/none.yaml`",
        ),
        (
            "sky",
            [*LINE[:3], "accelerate_configs/ddp.yaml", "recipes/gpt-oss-120b/train.py", "--output_dir", "/runs/x"],
            "recipes/gpt-oss-120b does not fit ddp.yaml",
        ),
    ],
)
def test_a_job_that_could_not_run_gets_no_file(engine, arguments, told):
    done = subprocess.run(
        [sys.executable, str(ENGINES / "render.py"), engine, *arguments], capture_output=True, text=True
    )
    assert done.returncode == node.REFUSED and told in done.stderr and done.stdout == ""


SCHEMAS = ("databricks-air==1.2.1", "kubeflow-trainer-api==2.3.0", "kubernetes-validate==1.37.0")
VALIDATE = """
import json, sys, yaml, copy
import kubernetes_validate
from cli.sdk.config import RunConfig
from cli.sdk.exceptions import AirConfigError
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

files = json.load(sys.stdin)
for name, text in files["jobset"].items():
    asked = yaml.safe_load(text)
    assert JobsetV1alpha2JobSet.from_dict(asked).to_dict() == asked, name  # an unknown key would be lost
    inner = asked["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name.replace(".", "-")}, **inner}
    kubernetes_validate.validate(job, "1.37", strict=True)
for text in files["indexed_job"].values():
    for part in yaml.safe_load_all(text):
        kubernetes_validate.validate(part, "1.37", strict=True)
for text in files["air"].values():
    good = yaml.safe_load(text)
    RunConfig.model_validate(good)

def refused(change):
    bad = copy.deepcopy(good)
    change(bad)
    try:
        RunConfig.model_validate(bad)
    except (ValueError, AirConfigError):
        return True

forms = {
    "flat code_source": lambda file: file.update(code_source={"root_path": "."}),
    "version without dependencies": lambda file: file["environment"].pop("dependencies"),
    "a part of a node": lambda file: file["compute"].update(num_accelerators=12),
    "integer variable": lambda file: file["env_variables"].update(GRACE_SECONDS=300),
    "dotted name": lambda file: file.update(experiment_name="llama-3.2"),
    "unknown key": lambda file: file.update(nodes=2),
    "no command": lambda file: file.pop("command"),
    "secret without scope": lambda file: file.update(secrets={"HF_TOKEN": "token"}),
}
accepted = [name for name, change in forms.items() if not refused(change)]
assert not accepted, accepted
print("valid")
"""


@pytest.mark.matrix
def test_job_files_pass_the_published_schemas(job_files, tmp_path):
    """Kubernetes 1.37, JobSet v1alpha2 and AI Runtime, from packages in an environment of their own."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *SCHEMAS], check=True)
    files = {engine: {} for engine in render.ENGINES}
    for (engine, recipe), text in job_files.items():
        files[engine][recipe] = text
    done = subprocess.run([python, "-c", VALIDATE], input=json.dumps(files), capture_output=True, text=True)
    assert done.stdout == "valid\n", done.stderr


def test_slurm_file_passes_shellcheck():
    beside = Path(sys.executable).with_name("shellcheck")
    tool = beside if beside.is_file() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed: requirements-dev.txt has it for Linux on x86-64")
    done = subprocess.run([tool, ENGINES / "slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_file_gives_the_ranks_the_time_that_it_asks_for():
    text = (ENGINES / "slurm.sbatch").read_text(encoding="utf-8")
    seconds = text.split("--signal=TERM@")[1].split()[0]
    assert f"GRACE_SECONDS:-{seconds}}}" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text and "#SBATCH --requeue\n" in text


def test_job_arrays_need_a_folder_for_each_task():
    variables = {"SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
    command = ["bash", str(ENGINES / "slurm.sbatch"), *LINE, "--output_dir", "/shared/run"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == node.REFUSED and "write %a into --output_dir" in done.stderr


def test_every_command_of_the_docs_is_understood():
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    found = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    programs = set()
    for command in "".join(found).splitlines():
        words = shlex.split(command.removeprefix("until ").partition(" > ")[0].partition(";")[0])
        line = words[words.index("accelerate") :] if "accelerate" in words else []
        programs.add(words[1] if words[0] == "python" else words[0])
        if words[0] == "accelerate":
            parsed = launch_command_parser().parse_args(line[2:])
            assert (parsed.num_machines, parsed.num_processes) == (2, 16)
        elif words[:2] == ["python", "scripts/engines/render.py"]:
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
            assert done.returncode == 0 and done.stdout, done.stderr
        elif line:
            assert node.read_line(line).launch_file.stem in render.strategies(node.read_line(line).recipe)
        else:
            assert words[0] in ("export", "pip"), command
    assert programs >= {"sbatch", "accelerate", "scripts/engines/node.py", "scripts/engines/ray_launch.py"}
