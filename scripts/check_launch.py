"""One launch line, read as accelerate and the recipe read it; no process is started and nothing is trained.

The words before the script go through accelerate's own launch parser and its own merging of the launch file; the words
after it through the recipe's own `inputs.py` and TRL's parser with the dataclasses that train.py names. What cannot be
read becomes a finding, and the rest is read on, so that one call shows all mistakes.
"""

import argparse
import ast
import contextlib
import copy
import difflib
import importlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import yaml

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload")


@dataclass
class Gpu:
    """What a GPU offers: memory in bytes, dense bf16 TFLOP/s (fp16 where there is no bf16), compute capability."""

    bytes: int
    tflops: float
    capability: tuple[int, int]


def _gpu(mib: int, tflops: float, major: int, minor: int) -> Gpu:
    return Gpu(mib * 2**20, tflops, (major, minor))


# Memory as nvidia-smi prints it, in MiB; dense tensor-core rates of NVIDIA's data sheets, SXM where there are two.
GPUS = {
    "v100-16gb": _gpu(16384, 125, 7, 0),
    "v100-32gb": _gpu(32768, 125, 7, 0),
    "t4-16gb": _gpu(15360, 65, 7, 5),
    "a10-24gb": _gpu(23028, 125, 8, 6),
    "a10g-24gb": _gpu(23028, 70, 8, 6),
    "rtx3090-24gb": _gpu(24576, 71, 8, 6),
    "a6000-48gb": _gpu(49140, 155, 8, 6),
    "a100-40gb": _gpu(40960, 312, 8, 0),
    "a100-80gb": _gpu(81920, 312, 8, 0),
    "l4-24gb": _gpu(23034, 121, 8, 9),
    "rtx4090-24gb": _gpu(24564, 165, 8, 9),
    "l40s-48gb": _gpu(46068, 362, 8, 9),
    "h100-80gb": _gpu(81559, 989, 9, 0),
    "h100-94gb": _gpu(95830, 835, 9, 0),
    "gh200-96gb": _gpu(97871, 990, 9, 0),
    "h200-141gb": _gpu(143771, 989, 9, 0),
    "b200-180gb": _gpu(183359, 2250, 10, 0),
    "rtx5090-32gb": _gpu(32607, 209, 12, 0),
}


@dataclass
class Finding:
    """One thing to fix. rule: the stable name of the check. write: the line to write in place of what stands there."""

    rule: str
    severity: str  # "error" or "warning"
    file: str
    key: str
    why: str
    write: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.file}, {self.key}: {self.why} Write: {self.write}  [{self.rule}]"


@dataclass
class Launch:
    """A launch line that was read. `None` stands for what could not be read; its finding says why.

    accelerate: what accelerate's launcher would run with, after its merging. launch_keys, deepspeed, config_keys: the
    three files as they stand; given: the launch file's settings with the line's flags. strategies: the launch files that
    train.py names. recipe_words: what follows train.py. model_config: a transformers config, and model_source where it
    comes from. gpu_bytes and host_ram: bytes of one GPU and of one machine.
    """

    words: list[str]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    accelerate: argparse.Namespace | None = None
    launch_file: Path | None = None
    launch_keys: dict = field(default_factory=dict)
    given: dict = field(default_factory=dict)
    deepspeed_file: Path | None = None
    deepspeed: dict | None = None
    strategy: str = "single"
    world: int = 1
    gpus_per_node: int = 1
    nodes: int = 1
    script: Path | None = None
    recipe: Path | None = None
    strategies: tuple[str, ...] = STRATEGIES
    config_file: Path | None = None
    config_keys: dict = field(default_factory=dict)
    recipe_words: list[str] = field(default_factory=list)
    flags: dict = field(default_factory=dict)
    script_args: object = None
    training_args: object = None
    model_args: object = None
    recipe_args: object = None
    model_config: object = None
    model_source: str = ""
    gpu: str | None = None
    gpu_bytes: int | None = None
    gpu_facts: Gpu | None = None
    host_ram: int | None = None
    elsewhere: bool = False  # --gpu was given: the line is for another machine
    cpu: bool = False  # --use_cpu true

    @property
    def is_deepspeed(self) -> bool:
        return self.strategy.startswith("zero")

    def add(self, rule: str, file: object, key: str, why: str, write: str, severity: str = "error") -> None:
        self.findings.append(Finding(rule, severity, str(file), key, why, write))

    def warn(self, rule: str, file: object, key: str, why: str, write: str) -> None:
        self.add(rule, file, key, why, write, "warning")

    def where(self, key: str) -> str:
        """The file to name for an argument of the recipe: the command line wins over the config file."""
        return "command line" if key in self.flags else str(self.config_file or "command line")

    def line(self, key: str, value: object) -> str:
        """How to write an argument of the recipe where it stands now."""
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        return f"--{key} {text}" if key in self.flags else f"{key}: {text}"

    def settle(self) -> None:
        """Errors first; a setting that the line's flags gave is named there, not in the launch file."""
        for finding in self.findings:
            key = finding.key.rpartition(".")[2]
            if finding.file == str(self.launch_file) and key in getattr(self.accelerate, "nondefault", ()):
                finding.file = "command line"
                name, _, value = finding.write.partition(": ")
                finding.write = f"--{name} {value}" if name == key else finding.write.replace(f"`{key}`", f"`--{key}`")
        self.findings.sort(key=lambda finding: finding.severity)

    def as_dict(self) -> dict:
        """What `--json` prints of the line itself."""
        keys = ("strategy", "world", "gpus_per_node", "nodes", "gpu", "model_source", "notes")
        facts = {key: getattr(self, key) for key in keys}
        return facts | {
            "launch_file": str(self.launch_file),
            "recipe": str(self.recipe),
            "config_file": str(self.config_file),
            "findings": [asdict(finding) for finding in self.findings],
        }


# ------------------------------------------------------------------------------------------------------- the words


def launch_parser() -> argparse.ArgumentParser:
    """Accelerate's launch parser with this program's own options in front; none of accelerate's flags is shadowed."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    own = parser.add_argument_group("Check", "Options of check.py.")
    own.add_argument("--gpu", type=str.lower, choices=sorted(GPUS), help="check for this GPU, not for this machine")
    own.add_argument("--gpus_per_node", type=int, help="GPUs of one machine")
    own.add_argument("--nodes", type=int, help="machines")
    own.add_argument("--host_ram", type=float, help="memory of one machine in GiB")
    own.add_argument("--json", action="store_true", help="print one JSON object")
    own.add_argument("--data", type=str, help="inspect N rows of the data, or `all`")
    return parser


def read(words: list[str]) -> Launch:
    """Read the words of `accelerate launch` with the options of `launch_parser`; raises SystemExit as argparse does."""
    launch, parser = Launch(words), launch_parser()
    parser.error = partial(_refuse_words, parser)
    args = parser.parse_args(words)
    _read_launch_file(launch, args)
    _read_script(launch, args)
    _read_deepspeed(launch)
    launch.strategy = _strategy(launch)
    _read_places(launch, args)
    if launch.strategy == "ddp" and launch.world == 1:
        launch.strategy = "single"
    return launch


def _refuse_words(parser: argparse.ArgumentParser, message: str) -> None:
    """One paragraph in place of accelerate's hundred flags."""
    near = [
        f"{word} ({close[0]}?)"
        for word in re.findall(r"--[\w-]+", message)
        if word not in parser._option_string_actions
        and (close := difflib.get_close_matches(word, parser._option_string_actions, n=1))
    ]
    hint = f" Did you mean: {', '.join(near)}" if near else ""
    print(
        f"error: the words before the recipe: {message}.{hint} `accelerate launch --help` lists its flags.",
        file=sys.stderr,
    )
    raise SystemExit(2)


def load_yaml(path: Path) -> tuple[dict, list[str]]:
    """The keys of a YAML or JSON file and those that stand twice. Raises ValueError for what is no mapping."""
    twice = []

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice.extend(dict.fromkeys(str(key) for key in keys if keys.count(key) > 1))
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not readable: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no `key: value` lines.")
    return content, twice


def load_json(path: Path) -> tuple[dict, list[str]]:
    """The keys of a JSON file and those that stand twice. Raises ValueError for what is no JSON object."""
    twice = []

    def pairs(items):
        keys = [key for key, _ in items]
        twice.extend(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(items)

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=pairs)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object.")
    return content, twice


def _read_launch_file(launch: Launch, args: argparse.Namespace) -> None:
    """Accelerate's own reading of the launch file and its merging with the words."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command
    from check_files import given_settings, lint_accelerate, lint_settings

    launch.accelerate = args
    if args.config_file is None:
        chosen = args.multi_gpu or args.use_fsdp or args.use_deepspeed
        launch.add(
            "no-launch-file",
            "command line",
            "--config_file",
            "no launch file is named, so what the line leaves open is decided by a default of this user.",
            "--config_file accelerate_configs/ddp.yaml",
            "warning" if chosen else "error",
        )
        return
    path = launch.launch_file = Path(args.config_file)
    if not path.is_file():
        known = sorted(str(p) for p in (path.parent if path.parent.is_dir() else ROOT / "accelerate_configs").glob("*"))
        launch.add(
            "no-launch-file", path, "--config_file", f"there is no such file here ({Path.cwd()}).", " | ".join(known)
        )
        return
    try:
        launch.launch_keys, twice = load_yaml(path)
    except ValueError as error:
        launch.add("unreadable", path, "file", str(error), "key: value")
        return
    launch.given = given_settings(launch.launch_keys, args)
    launch.findings += lint_accelerate(launch.launch_keys, path, twice)
    launch.findings += lint_settings(launch.given, path, strict=True)
    known = {key: launch.launch_keys[key] for key in launch.launch_keys if key in ClusterConfig.__dataclass_fields__}
    known |= {key: launch.launch_keys[key] for key in ("fp16", "dynamo_backend") if key in launch.launch_keys}
    known = {k: v for k, v in known.items() if isinstance(v, dict) or not k.endswith("_config")}
    with tempfile.TemporaryDirectory() as folder:  # accelerate reads on without the keys that were named above
        args.config_file = str(Path(folder, "launch.yaml"))
        Path(args.config_file).write_text(yaml.safe_dump(known), encoding="utf-8")
        try:
            _validate_launch_command(args)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if not any(finding.severity == "error" for finding in launch.findings):
                launch.add("refused", path, "accelerate", f"accelerate stops here: {' '.join(str(error).split())}", "")
        args.config_file = str(path)


def _read_deepspeed(launch: Launch) -> None:
    from check_files import lint_deepspeed

    args = launch.accelerate
    if not getattr(args, "use_deepspeed", False):
        return
    if not args.deepspeed_config_file:
        launch.add(
            "no-deepspeed-file",
            launch.launch_file or "command line",
            "deepspeed_config.deepspeed_config_file",
            "the strategy stands in this file; the recipes read it from a DeepSpeed file, and stop without one.",
            "deepspeed_config_file: deepspeed_configs/zero3.json",
        )
        return
    path = launch.deepspeed_file = Path(args.deepspeed_config_file)
    if not path.is_file():
        launch.add(
            "no-deepspeed-file",
            launch.launch_file,
            "deepspeed_config.deepspeed_config_file",
            f"{path} is not here ({Path.cwd()}); the path is relative to the working directory. Start from the "
            "cookbook's root, or beside deepspeed_configs/.",
            "deepspeed_config_file: deepspeed_configs/zero3.json",
        )
        return
    try:
        launch.deepspeed, twice = load_json(path)
    except ValueError as error:
        launch.add("unreadable", path, "file", str(error), "{}")
        return
    launch.findings += lint_deepspeed(launch.deepspeed, path, twice)


def _strategy(launch: Launch) -> str:
    """As guard.declared_strategy names it, from the launch line in place of the launcher's environment."""
    args = launch.accelerate
    if getattr(args, "use_deepspeed", False):
        zero = (launch.deepspeed or {}).get("zero_optimization", {})
        zero = zero if isinstance(zero, dict) else {}
        stage = zero.get("stage", 0) if launch.deepspeed is not None else args.zero_stage or 2
        return f"zero{stage}" + ("_offload" if "offload_optimizer" in zero else "")
    if getattr(args, "use_fsdp", False):
        return "fsdp"
    single = args.num_processes in (1, "1") or (not args.multi_gpu and args.num_processes is not None)
    return "single" if single else "ddp"


def _read_places(launch: Launch, args: argparse.Namespace) -> None:
    """Processes, machines and GPUs: those of the line against those that were named or are here."""
    import psutil
    import torch

    launch.elsewhere, launch.gpu = args.gpu is not None, args.gpu
    asked, machines = args.num_processes, args.num_machines or 1
    launch.nodes = args.nodes or machines
    counted = isinstance(asked, int) or str(asked).isdigit()
    if launch.elsewhere:
        launch.gpu_facts = GPUS[args.gpu]
        launch.gpu_bytes = launch.gpu_facts.bytes
        launch.gpus_per_node = args.gpus_per_node or (-(-max(1, int(asked)) // machines) if counted else 8)
        if args.gpus_per_node is None and not counted:
            launch.notes.append("8 GPUs a machine are assumed; --gpus-per-node N names another number.")
    else:
        launch.gpus_per_node = args.gpus_per_node if args.gpus_per_node is not None else torch.cuda.device_count()
        if torch.cuda.is_available():
            facts = torch.cuda.get_device_properties(0)
            known = next(
                (GPUS[name] for name in GPUS if name.split("-")[0] in facts.name.lower().replace(" ", "")), None
            )
            launch.gpu, launch.gpu_bytes = facts.name, facts.total_memory
            launch.gpu_facts = Gpu(facts.total_memory, known.tflops if known else 0, (facts.major, facts.minor))
    here = None if launch.elsewhere else psutil.virtual_memory().total
    launch.host_ram = int(args.host_ram * 2**30) if args.host_ram else here
    launch.world = (
        int(asked) if counted else launch.gpus_per_node * (1 if asked == "gpu" and machines == 1 else machines)
    )
    launch.world = max(launch.world, 1)


# ------------------------------------------------------------------------------------------------------- the recipe


@cache
def load_module(path: Path) -> ModuleType:
    """A file of a recipe folder, with that folder first on the import path, as when train.py runs.

    Two recipes have modules of the same names: those of this one are taken out of sys.modules afterwards.
    """
    own = {file.stem for file in path.parent.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent.resolve()))
        for name in own & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(before)


def _parse_train(path: Path) -> tuple[list[str], tuple[str, ...]]:
    """The dataclasses that train.py hands to TrlParser, by name, and the strategies that it hands to the guard."""
    names, strategies = ["ScriptArguments", "SFTConfig", "ModelConfig", "RecipeArguments"], STRATEGIES
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "TrlParser" and isinstance(call.args[0], ast.Tuple):
            names = [ast.unparse(element).rpartition(".")[2] for element in call.args[0].elts]
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "guard.check_launch":
            strategies = tuple(ast.literal_eval(call.args[2]))
    return names, strategies


def _read_script(launch: Launch, args: argparse.Namespace) -> None:
    words = list(args.training_script_args)
    script = Path(args.training_script)
    if words and words[0].endswith("train.py") and not (script.parent / "inputs.py").is_file():
        script = Path(words.pop(0))  # a program that runs the recipe, as fsdp_on_cpu.py
    if not script.is_file():
        near = sorted(str(path) for path in Path.cwd().glob("recipes/*/train.py"))
        launch.add(
            "no-recipe",
            "command line",
            str(script),
            f"there is no such file here ({Path.cwd()}).",
            " | ".join(near) or "recipes/NAME/train.py",
        )
        return
    launch.script, launch.recipe = script, script.parent
    if not (script.parent / "inputs.py").is_file():
        launch.warn(
            "no-recipe",
            script,
            "inputs.py",
            "this is no recipe folder: its arguments cannot be read, and only the "
            "launch and DeepSpeed files were checked.",
            "recipes/NAME/train.py",
        )
        return
    names, launch.strategies = _parse_train(script)
    launch.recipe_words = words
    _read_arguments(launch, names, words)
    if launch.model_args is not None:
        whole, launch.model_source = model_config(launch.model_args, launch)
        launch.model_config = (
            whole and whole.get_text_config()
        )  # of a model that reads images, too, the text is trained
        _choose_attention(launch)


def _choose_attention(launch: Launch) -> None:
    """The recipe's own choice, without FlashAttention: it switches packing off where documents would meet."""
    file, asked = launch.recipe / "speed.py", launch.model_args.attn_implementation
    if launch.model_config is None or not file.is_file() or not launch.training_args.packing:
        return
    if "linear_attention" in (getattr(launch.model_config, "layer_types", None) or ()) and not launch.cpu:
        launch.notes.append(
            "this model packs rows only where flash-linear-attention and causal-conv1d are installed; without them the "
            "recipe switches packing off, and trains more and shorter rows. --packing false checks that run."
        )
        return
    with contextlib.redirect_stdout(io.StringIO()):
        load_module(file.resolve()).choose_attention(launch.model_config, launch.training_args, asked)
    if launch.training_args.packing:
        return
    if asked is None:
        launch.notes.append(
            "without a flash kernel the recipe switches packing off, as this model would attend across documents; "
            "--attn_implementation flash_attention_4 checks the packed run."
        )
    else:
        launch.warn(
            "packing-off",
            launch.where("attn_implementation"),
            "attn_implementation",
            f"with {asked} this model would attend across packed documents, so the recipe switches packing off.",
            launch.line("attn_implementation", "flash_attention_4"),
        )


def _read_arguments(launch: Launch, names: list[str], words: list[str]) -> None:
    """The recipe's config file and flags: every unknown or unreadable one a finding, the rest through TRL's parser."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels that only serving needs
    import trl
    from transformers import HfArgumentParser

    inputs = load_module((launch.recipe / "inputs.py").resolve())
    types = [getattr(inputs, name, None) or getattr(trl, name) for name in names]
    parser = trl.TrlParser(types)

    def refuse(message):
        raise ValueError(message)

    parser.error, parser.allow_abbrev = refuse, False
    known = {action.dest for action in parser._actions} - {"help", "config"}
    words = _expand(launch, words)
    given = _config_words(launch, inputs, parser, known)
    if not launch.config_keys:
        return

    kept = []
    for flag, *values in _groups(words):
        option = flag.partition("=")[0]
        if option not in parser._option_string_actions:
            near = inputs._suggest(option.removeprefix("--").replace("-", "_"), known)
            if flag.startswith("--"):
                why = "no argument of TRL or of the recipe has this name."
                launch.add("unknown-flag", "command line", option, why, f"--{near}")
            else:
                launch.add("stray-words", "command line", flag, "the word belongs to no flag.", "--flag value")
            continue
        key = parser._option_string_actions[option].dest
        try:
            if rest := parser.parse_known_args([flag, *values])[1]:
                raise ValueError(f"the words {' '.join(rest)} belong to no flag")
        except (ValueError, SystemExit) as error:
            launch.add("wrong-value", "command line", key, f"{error}.", f"{option} a value of the right kind")
            continue
        launch.flags[key] = values
        kept += [flag, *values]

    # CPU mode, because TRL refuses bf16 where no GPU is visible; what was asked for is read beforehand.
    words = given + kept
    launch.cpu = bool(parser.parse_known_args(words)[0].use_cpu)
    with _quiet_environment():
        for _ in range(3):
            try:
                parsed = HfArgumentParser.parse_args_into_dataclasses(
                    parser, args=[*words, "--use_cpu", "true"], look_for_args_file=False
                )
                break
            except (ValueError, TypeError) as error:
                key = _named(str(error), known)
                rule = "tf32" if key == "tf32" else "refused-arguments"
                if rule == "refused-arguments":  # tf32 alone depends on the GPU
                    launch.add(
                        rule, launch.where(key), key, f"{' '.join(str(error).split())}.", launch.line(key, "...")
                    )
                words = [word for i, word in enumerate(words) if not _belongs(words, i, key)]
        else:
            return
    groups = {type(group).__name__: group for group in parsed}
    launch.script_args, launch.training_args = groups.get("ScriptArguments"), groups.get("SFTConfig")
    launch.model_args, launch.recipe_args = groups.get("ModelConfig"), groups.get("RecipeArguments")


def _groups(words: list[str]) -> list[list[str]]:
    """The words, each flag with its values."""
    groups = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _expand(launch: Launch, words: list[str]) -> list[str]:
    """Take `--config NAME` out of the words and find its file, as inputs.strict_arguments does."""
    path = launch.recipe / "config.yaml"
    for i, word in enumerate(words):
        if word == "--config" or word.startswith("--config="):
            name = word.partition("=")[2] or "".join(words[i + 1 : i + 2])
            path = Path(name) if os.path.isfile(name) else launch.recipe / f"{name.removesuffix('.yaml')}.yaml"
            words = words[:i] + words[i + (1 if "=" in word else 2) :]
            break
    launch.config_file = path
    return words


def _config_words(launch: Launch, inputs: ModuleType, parser, known: set[str]) -> list[str]:
    """The config file as words; each key that is unknown or of a wrong kind is a finding and left out."""
    path = launch.config_file
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in launch.recipe.glob("*.yaml")))
        launch.add(
            "no-config", "command line", "--config", f"{path} is no file.", f"--config NAME, NAME one of {names}"
        )
        return []
    try:
        keys, twice = load_yaml(path)
    except ValueError as error:
        launch.add("unreadable", path, "file", str(error), "key: value")
        return []
    for key in twice:
        launch.add("twice", path, key, "the key stands twice, and the first would be lost.", f"{key}: ... once")
    words = []
    for key, value in keys.items():
        if key not in known:
            near = inputs._suggest(str(key), known)
            launch.add(
                "unknown-key", path, str(key), "no argument of TRL or of the recipe has this name.", f"{near}: {value}"
            )
            continue
        text = yaml.safe_dump({key: value})
        one = inputs._config_words(SimpleNamespace(read_text=lambda text=text, **_: text, parent=path.parent), known)
        try:
            parser.parse_known_args(one)
        except (ValueError, SystemExit) as error:
            launch.add("wrong-value", path, key, f"{error}.", f"{key}: a value of the right kind")
            continue
        launch.config_keys[key] = value
        words += one
    return words


def _named(message: str, known: set[str]) -> str:
    """The argument that an error message is about."""
    found = [name for name in re.findall(r"\w+", message) if name in known]
    return found[0] if found else "arguments"


def _belongs(words: list[str], i: int, key: str) -> bool:
    """Whether words[i] is the flag of `key` or one of its values."""
    while i >= 0 and not words[i].startswith("--"):
        i -= 1
    return i >= 0 and words[i].removeprefix("--").partition("=")[0] == key


@contextlib.contextmanager
def _quiet_environment():
    """Without a launcher's variables and warnings; what TRL sets meanwhile (state, environment) is put back."""
    from accelerate import PartialState

    before, had = dict(os.environ), bool(PartialState._shared_state)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ):
            del os.environ[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if not had:
            PartialState._reset_state()


# -------------------------------------------------------------------------------------------------------- the model


@cache
def hub_answers() -> bool:
    """Whether the Hub is reachable: one question, three seconds; hf_hub_download alone would try for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:
        return False
    return True


def model_config(model_args, launch: Launch):
    """The model's config and where it came from: a folder, the cache, the Hub, or the built-in dimensions.

    Nothing but config.json is read or downloaded. (None, "") where nothing is known.
    """
    from huggingface_hub import hf_hub_download
    from transformers import AutoConfig

    name, revision = model_args.model_name_or_path, model_args.model_revision
    try:
        if os.path.isdir(name):
            return AutoConfig.from_pretrained(name), f"folder {name}"
        try:
            file = hf_hub_download(name, "config.json", revision=revision, local_files_only=True)
        except (OSError, ValueError):
            if not hub_answers():
                raise
            file = hf_hub_download(name, "config.json", revision=revision)
        return AutoConfig.from_pretrained(Path(file).parent), "config.json of the Hub"
    except Exception as error:
        import tiny_model

        if name in tiny_model.PUBLISHED:  # for a machine without the Hub
            family, size = tiny_model.PUBLISHED[name]
            config = AutoConfig.for_model(tiny_model.model_type(family), **copy.deepcopy(tiny_model.REAL[family, size]))
            config.dtype = "bfloat16"
            if config.model_type == "gpt_oss":
                config.quantization_config = dict(tiny_model.MXFP4_SECTION)
            launch.notes.append(f"the Hub did not give {name}: its dimensions are those of scripts/tiny_model.py.")
            return config, "scripts/tiny_model.py"
        kind = type(error).__name__
        launch.warn(
            "no-model",
            launch.where("model_name_or_path"),
            "model_name_or_path",
            f"{name!r} is no folder here, and the "
            f"Hub did not give it ({kind}), so the checks against the model were left out. Check the spelling, the network and, "
            "for a gated model, its licence and HF_TOKEN.",
            launch.line("model_name_or_path", "FOLDER"),
        )
        return None, ""
