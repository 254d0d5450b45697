"""What this machine has: versions against the tested set, GPUs, drivers, compilers, limits, caches. No secrets."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sysconfig
from pathlib import Path

from check_launch import ROOT, Launch

GIB = 2**30
# As ranks.SECRET, without the seconds that importing it takes; a test holds them together.
SECRET = r"hf_\w{8,}|(?<=://)[^@/\s\"]+(?=@)"
SHOWN = (
    "CUDA_",
    "NCCL_",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "ACCELERATE_",
    "DS_",
    "LD_LIBRARY_PATH",
)


def tested() -> dict[str, str]:
    """The versions of requirements.txt, by package."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", text, re.MULTILINE))


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str:
    """The first line that a program prints, or "" where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "")


def facts() -> dict[str, object]:
    """What is here, by name; every value can be printed, and what cannot be found says so."""
    import psutil
    import torch

    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name, version in tested().items():
        here = installed(name)
        found[name] = here or "not installed"
        if here and here.partition("+")[0] != version:
            found[name] = f"{here} (tested: {version})"
    found |= {"CUDA of torch": torch.version.cuda or "none", "GPUs": torch.cuda.device_count()}
    found["driver"] = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "no nvidia-smi"
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            found[f"GPU {i}"] = (
                f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
            )
        pairs = [(a, b) for a in range(torch.cuda.device_count()) for b in range(a)]
        reach = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        found["peer access"] = f"{reach} of {len(pairs)} pairs"
    names = {"flash_attn": "FlashAttention", "flash_attn_interface": "FlashAttention 3", "kernels": "kernels"}
    for module, name in names.items():
        found[name] = "installed" if importlib.util.find_spec(module) else "not installed"
    found["FlashAttention 4"] = installed("flash-attn-4") or "not installed"
    compiler = os.environ.get("CXX", "c++")
    found["C++ compiler"] = output_of(compiler, "--version") or "none"
    found["ninja"] = shutil.which("ninja") or ("installed" if importlib.util.find_spec("ninja") else "none")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    found["Python's headers"] = "here" if header.is_file() else "none"
    memory = psutil.virtual_memory()
    found["cores"] = os.cpu_count()
    found["memory"] = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available"
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        found["shared memory"] = f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free"
    found["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    cache = cache_folder()
    found["cache"] = f"{cache}, {free_bytes(cache) / GIB:.1f} GiB free"
    found["HF token"] = "set" if has_token() else "none"
    for name in sorted(os.environ):
        if name.startswith(SHOWN) and "TOKEN" not in name and "KEY" not in name:
            found[name] = os.environ[name]
    return {name: re.sub(SECRET, "***", str(value)) for name, value in found.items()}


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk where `folder` is or would be made."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def check(launch: Launch) -> None:
    """What of this machine would stop or slow the launch; nothing where the line is for another machine."""
    if launch.elsewhere:
        return
    for name, version in tested().items():
        here = installed(name)
        needed = name != "deepspeed" or launch.is_deepspeed
        needed = needed and (name != "bitsandbytes" or getattr(launch.model_args, "load_in_4bit", False))
        if here is None and needed:
            launch.add("version", "requirements.txt", name, "it is not installed.", f"pip install {name}=={version}")
        elif here is not None and here.partition("+")[0] != version:
            launch.warn(
                "version",
                "requirements.txt",
                name,
                f"{here} is installed, tested was {version}.",
                f"pip install {name}=={version}",
            )
    _driver(launch)
    _compiler(launch)
    _limits(launch)
    _download(launch)


def _driver(launch: Launch) -> None:
    import torch

    if launch.cpu or torch.cuda.is_available() or not torch.version.cuda:
        return
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        need = {"13": 580, "12": 525}.get(torch.version.cuda.partition(".")[0])
        launch.add(
            "driver",
            "machine",
            "driver",
            f"driver {driver} is here, but torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
            + (f"; it needs driver {need} or newer." if need else "."),
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126",
        )


def _compiler(launch: Launch) -> None:
    """DeepSpeed compiles its CPU Adam on first use: for offload, and for every ZeRO run on CPUs."""
    if not launch.is_deepspeed or not (launch.strategy.endswith("offload") or launch.cpu):
        return
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        launch.add(
            "compiler",
            "machine",
            "C++ compiler",
            "DeepSpeed compiles its CPU Adam and finds none.",
            "sudo apt-get install g++",
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        launch.add(
            "compiler",
            "machine",
            "Python.h",
            "DeepSpeed's CPU Adam needs Python's headers.",
            "sudo apt-get install python3-dev",
        )
    home = os.environ.get("CUDA_HOME") or (
        Path("/usr/local/cuda") if Path("/usr/local/cuda").is_dir() else shutil.which("nvcc")
    )
    if not launch.cpu and not home:
        launch.warn(
            "compiler",
            "machine",
            "CUDA_HOME",
            "DeepSpeed looks for the CUDA toolkit when it compiles, and finds none.",
            "export CUDA_HOME=/usr/local/cuda",
        )


def _limits(launch: Launch) -> None:
    local = -(-launch.world // max(launch.nodes, 1))
    shm = Path("/dev/shm")
    workers = launch.training_args is not None and launch.training_args.dataloader_num_workers
    if shm.is_dir() and local > 1 and not launch.cpu and (free := shutil.disk_usage(shm).free) < local * 64 * 2**20:
        launch.add(
            "shared-memory",
            "machine",
            "/dev/shm",
            f"{free / 2**20:.0f} MiB are free; NCCL takes about 64 MiB a process.",
            "docker run --shm-size 16g",
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < 1024 + 256 * local * (1 if workers else 0):
        launch.warn("open-files", "machine", "ulimit -n", f"{limit} open files may be too few.", "ulimit -n 65536")


def _download(launch: Launch) -> None:
    """Room for the weights in the cache, and a token for what is gated; only where the Hub is asked for weights."""
    import check_launch

    args = launch.model_args
    if args is None or launch.model_config is None or os.path.isdir(args.model_name_or_path):
        return
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    if any(
        isinstance(try_to_load_from_cache(args.model_name_or_path, n, revision=args.model_revision), str) for n in names
    ):
        return
    file = launch.where("model_name_or_path")
    if not check_launch.hub_answers():
        launch.warn(
            "hub",
            file,
            "model_name_or_path",
            f"{args.model_name_or_path} is not in the cache, and the Hub does not answer from here.",
            launch.line("model_name_or_path", "FOLDER"),
        )
        return
    if args.model_name_or_path.startswith("meta-llama/") and not has_token():
        launch.add("hub", file, "model_name_or_path", "the model is gated, and no token is set.", "export HF_TOKEN=...")
    from check_model import meta_model

    meta, free = meta_model(launch), free_bytes(cache_folder())
    need = 2 * sum(p.numel() for p in meta.parameters()) if meta is not None else 0
    if getattr(launch.model_config, "quantization_config", None):
        need = need * 0.28  # MXFP4: 4.25 bits for most weights
    if need > free:
        launch.add(
            "cache",
            "machine",
            "HF_HOME",
            f"the weights of {args.model_name_or_path} take about {need / GIB:.0f} GiB, and the cache's disk has "
            f"{free / GIB:.0f} GiB free.",
            "export HF_HOME=a folder on a larger disk",
        )
