"""Reads trained weights tensor by tensor from what a run leaves: safetensors, FSDP shards, DeepSpeed's ZeRO shards.

Every reader has `tensors`, {name: Entry(shape, dtype)} known without reading a weight, and `read(name)`. Memory stays
near one tensor. No pickle of a checkpoint is executed: DeepSpeed's files go through torch.load(weights_only=True), where
DeepSpeed's own zero_to_fp32 (0.19.8) reads them with weights_only=False; torch's FileSystemReader (2.13) loads FSDP's
`.metadata` with plain pickle, so here that file is read by an unpickler that knows a short list of classes.
"""

import collections
import contextlib
import enum
import itertools
import json
import math
import pathlib
import pickle
import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint.filesystem as dcp_files
import torch.distributed.checkpoint.metadata as dcp_metadata
from export_files import ExportError, Stored, read_headers, read_tensor
from export_mxfp4 import dequantize_mxfp4, pair_table, plan_bf16
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

FSDP_FOLDER = "pytorch_model_fsdp_0"
REOPEN_BYTES = 2**25  # mapped pages count as memory while a file is open: it is opened anew after this much reading
SAFETENSORS_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor that a reader can give."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# ---------------------------------------------------------------- safetensors


class SafetensorsReader:
    """A model or adapter folder in safetensors; the experts of an MXFP4 folder are given as bf16.

    Of a model that reads images, too, the language model alone, under the names of its own class.
    Raises ExportError as `read_headers` does, and for MXFP4 weights in another layout than the published one.
    """

    def __init__(self, folder: Path, config: dict | None = None):
        self.stored: dict[str, Stored] = read_headers(folder)
        self.plan, self.names = None, {}
        if "text_config" in (config or {}):
            text = [name for name in self.stored if not name.startswith(("model.visual.", "mtp."))]
            self.names = {name.replace("model.language_model.", "model.", 1): name for name in text}
            self.stored = {name: self.stored[published] for name, published in self.names.items()}
        if any(name.endswith("_blocks") for name in self.stored):
            self.plan, self.table = plan_bf16(self.stored, folder, config or {}), pair_table()
            self.tensors = {name: Entry(planned.shape, torch.bfloat16) for name, planned in self.plan.items()}
            return
        self.tensors = {}
        for name, stored in self.stored.items():
            if stored.dtype not in SAFETENSORS_DTYPES:
                raise ExportError(
                    f"{stored.file}: {name} is {stored.dtype}, expected one of {', '.join(SAFETENSORS_DTYPES)}. "
                    "Quantized weights are not exported: give a run or checkpoint with plain weights."
                )
            self.tensors[name] = Entry(stored.shape, SAFETENSORS_DTYPES[stored.dtype])

    def read(self, name: str) -> torch.Tensor:
        if self.plan is None:
            return read_tensor(self.stored[name], self.names.get(name, name))
        parts = [read_tensor(self.stored[source], source) for source in self.plan[name].sources]
        return dequantize_mxfp4(*parts, self.table) if len(parts) == 2 else parts[0].to(torch.bfloat16)


# ---------------------------------------------------------------- FSDP


def enum_member(kind, name: str):
    """In place of getattr, which before Python 3.11.4 every pickled Enum member calls; reads no other attribute."""
    return kind[name] if isinstance(kind, type) and issubclass(kind, enum.Enum) else name


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch.distributed.checkpoint's `.metadata` and refuses whatever does not belong there."""

    KNOWN = {  # noqa: RUF012 (read only)
        dcp_metadata.__name__: (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        dcp_files.__name__: ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        pathlib.__name__: ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
        collections.__name__: ("OrderedDict",),
    }  # fmt: skip

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if module == "pathlib":
            return pathlib.PurePath  # only the folder that was written to: it need not be a path of this system
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in self.KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class SafeFileSystemReader(dcp_files.FileSystemReader):
    """torch's reader of a distributed checkpoint, with `.metadata` read once and without executing anything."""

    metadata = None

    def read_metadata(self, *args, **kwargs) -> dcp_metadata.Metadata:
        """Raises ExportError when `.metadata` is missing, damaged, or holds what does not belong there."""
        if self.metadata is None:
            path = Path(self.path) / ".metadata"
            try:
                with open(path, "rb") as file:
                    self.metadata = MetadataUnpickler(file).load()
                names = {info.relative_path for info in self.metadata.storage_data.values()}
                if any(Path(name).name != name for name in names):
                    raise pickle.UnpicklingError("it names files outside its own folder")
            except OSError as error:
                raise ExportError(
                    f"{path} cannot be read ({error.strerror}): the save was cut off. Give another checkpoint."
                ) from error
            except Exception as error:  # a damaged pickle raises what it likes
                raise ExportError(
                    f"{path} is not the metadata of a distributed checkpoint ({error}). It is not loaded, because a "
                    "pickle can run code. Give a checkpoint that the recipes wrote."
                ) from error
            self.metadata.storage_meta = dcp_metadata.StorageMeta()
        return self.metadata


class FsdpReader:
    """FSDP shards (`pytorch_model_fsdp_0/`, torch.distributed.checkpoint), each tensor put together when it is read.

    Source: accelerate 1.15 `save_fsdp_model`, which keeps the state dict under "model"; for LoRA it holds the adapter.
    """

    PREFIX = "model."

    def __init__(self, folder: Path):
        self.folder, self.reader = folder, SafeFileSystemReader(folder)
        metadata = self.reader.read_metadata().state_dict_metadata
        self.tensors = {
            name.removeprefix(self.PREFIX): Entry(tuple(found.size), found.properties.dtype)
            for name, found in metadata.items()
            if isinstance(found, dcp_metadata.TensorStorageMetadata)
        }
        missing = {info.relative_path for info in self.reader.metadata.storage_data.values()}
        missing = sorted(name for name in missing if not (folder / name).is_file())
        if missing:
            raise ExportError(
                f"{folder} lacks {', '.join(missing)}, which its .metadata names: a rank's part is missing. Copy the "
                "files of all machines together, or give another checkpoint."
            )

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _load_state_dict({self.PREFIX + name: tensor}, self.reader, no_dist=True, planner=planner)
        return tensor


# ---------------------------------------------------------------- DeepSpeed ZeRO


class Ignored:
    """Stands for the objects in DeepSpeed's files that have nothing to do with weights."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


DEEPSPEED_OBJECTS = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
    (enum_member, "builtins.getattr"),
]


class Fragment(NamedTuple):
    """Elements [start, stop) of one flat partition of one rank."""

    rank: int
    group: int
    start: int
    stop: int


def load_mapped(file: Path) -> dict:
    """A DeepSpeed file with its tensors mapped, not read. Raises ExportError where it is not only weights and numbers."""
    try:
        with torch.serialization.safe_globals(DEEPSPEED_OBJECTS):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # zip, pickle and torch each have their own errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"{file} cannot be read as weights ({reason}). It is damaged or holds objects that could run code; give "
            "another checkpoint."
        ) from error


class ZeroReader:
    """The fp32 master weights of a DeepSpeed ZeRO 1, 2 or 3 checkpoint, each put together when it is read.

    The arithmetic is that of DeepSpeed 0.19.8's zero_to_fp32 (which, for stages 1 and 2, joins all partitions in memory
    first). Stages 1 and 2: a group's parameters lie one after another in one vector, cut into equal parts over the
    ranks. Stage 3: each parameter is cut into equal parts, padded at the end, and a rank's parts lie one after another.
    """

    def __init__(self, checkpoint: Path):
        latest = checkpoint / "latest"
        folder = checkpoint / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
        if folder is None or folder.parent != checkpoint or not folder.is_dir():
            raise ExportError(f"{latest} does not name a folder with ZeRO shards. Give another checkpoint.")
        self.folder = folder
        self.optimizer_files = self._in_order("*_optim_states.pt")
        self.model_files = self._in_order("*_model_states.pt")
        self.fragments: dict[str, list[Fragment]] = {}
        self.tensors: dict[str, Entry] = {}
        self.elsewhere: dict[str, str] = {}  # frozen weights and buffers, by the key of the model file they lie under
        self._open()
        self._plan()

    def _in_order(self, pattern: str) -> list[Path]:
        def numbers(path: Path) -> list[int]:
            return [int(number) for number in re.findall(r"\d+", path.name)]

        files = sorted(self.folder.glob(pattern), key=numbers)
        if not files:
            raise ExportError(f"{self.folder} holds no {pattern}: the save was cut off. Give another checkpoint.")
        return files

    def _open(self) -> None:
        self.unread = REOPEN_BYTES
        self.models = [load_mapped(file) for file in self.model_files]
        optimizers = [load_mapped(file)["optimizer_state_dict"] for file in self.optimizer_files]
        first = optimizers[0]
        self.stage3 = "fp32_flat_groups" in first
        key = "fp32_flat_groups" if self.stage3 else "single_partition_of_fp32_groups"
        if key not in first:
            raise ExportError(
                f"{self.optimizer_files[0]} holds no fp32 weights of ZeRO 1, 2 or 3 (its keys: "
                f"{', '.join(map(str, first))}). Give a checkpoint of the recipes' zero launch files."
            )
        count = first["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(optimizers):
            raise ExportError(
                f"{self.folder} holds the optimizer files of {len(optimizers)} ranks, but {count} ranks wrote it. Copy "
                "the files of all machines together."
            )
        self.partitions, self.paddings = [state[key] for state in optimizers], first.get("param_alignment_paddings")

    def _plan(self) -> None:
        state, ranks = self.models[0], len(self.partitions)
        if self.stage3:
            bounds = [0]
            for group in self.partitions[0]:
                bounds.append(bounds[-1] + group.numel())
            place = 0
            for shapes in state["param_shapes"]:
                for name, shape in shapes.items():
                    part = math.ceil(shape.numel() / ranks)
                    spans = [
                        (group, max(place, low) - low, min(place + part, high) - low)
                        for group, (low, high) in enumerate(itertools.pairwise(bounds))
                        if low < place + part and place < high
                    ]
                    self._add(name, shape, [Fragment(rank, *span) for rank in range(ranks) for span in spans])
                    place += part
            self._check(place, bounds[-1], 0)
        else:
            for group, shapes in enumerate(state["param_shapes"]):
                sizes, place = [part[group].numel() for part in self.partitions], 0
                for number, (name, shape) in enumerate(shapes.items()):
                    fragments, low = [], 0
                    for rank, size in enumerate(sizes):
                        start, stop = max(place - low, 0), min(place + shape.numel() - low, size)
                        if start < stop:
                            fragments.append(Fragment(rank, group, start, stop))
                        low += size
                    self._add(name, shape, fragments)
                    place += shape.numel() + (self.paddings[group][number] if self.paddings else 0)
                self._check(place, sum(sizes), 2 * ranks)
        for name, shape in (state.get("frozen_param_shapes") or {}).items():
            self.tensors[name] = Entry(tuple(shape), state["frozen_param_fragments"][name].dtype)
            self.elsewhere[name] = "frozen_param_fragments"
        for name in state["buffer_names"]:
            if name in state["module"]:
                self.tensors[name] = Entry(tuple(state["module"][name].shape), state["module"][name].dtype)
                self.elsewhere[name] = "module"

    def _add(self, name: str, shape: torch.Size, fragments: list[Fragment]) -> None:
        self.fragments[name] = fragments
        self.tensors[name] = Entry(tuple(shape), self.partitions[0][0].dtype)

    def _check(self, used: int, there: int, slack: int) -> None:
        if not used <= there <= used + max(slack, 1) - 1 and used != there:
            raise ExportError(
                f"{self.folder}: the parameters take {used} numbers of each flat vector, but it has {there}. The files "
                "are of two saves, or of another DeepSpeed; give another checkpoint."
            )

    def read(self, name: str) -> torch.Tensor:
        shape, dtype = self.tensors[name]
        count = math.prod(shape)
        if self.unread < 0:
            self._open()
        self.unread -= count * dtype.itemsize
        if key := self.elsewhere.get(name):
            parts = [state[key][name].flatten() for state in (self.models if self.stage3 else self.models[:1])]
        else:
            parts = [self.partitions[rank][group][start:stop] for rank, group, start, stop in self.fragments[name]]
        return torch.cat(parts)[:count].view(shape)


# ---------------------------------------------------------------- adapters


class Renamed:
    """A reader under other names: `names` maps each new name to the old one."""

    def __init__(self, reader, names: dict[str, str]):
        self.reader, self.names = reader, names
        self.tensors = {new: reader.tensors[old] for new, old in names.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.reader.read(self.names[name])


def adapter_names(names) -> dict[str, str]:
    """Names as peft saves them for the names of a model in training: without the adapter's own name, `default`."""
    return {re.sub(r"\.default(?=\.|$)", "", name): name for name in names}


def open_weights(folder: Path, config: dict | None = None):
    """The reader that fits a checkpoint or a final folder: FSDP shards, ZeRO shards, adapter or model safetensors.

    FSDP and ZeRO come first: they hold what was trained in the precision it was trained in. Raises ExportError for a
    tensor without elements and for a folder that holds none of these.
    """
    if (folder / FSDP_FOLDER).is_dir():
        reader = FsdpReader(folder / FSDP_FOLDER)
    elif list(folder.glob("global_step*")):
        reader = ZeroReader(folder)
    elif (folder / "pytorch_model_fsdp.bin").is_file():
        raise ExportError(
            f"{folder} was saved with FULL_STATE_DICT, as a pickle. Give a checkpoint of accelerate_configs/fsdp.yaml "
            "(SHARDED_STATE_DICT), or the run's final/."
        )
    else:
        reader = SafetensorsReader(folder, config)
    for name, entry in reader.tensors.items():
        if 0 in entry.shape:
            raise ExportError(
                f"{folder}: tensor {name} is empty (shape {list(entry.shape)}), so this checkpoint has lost weights. "
                "Use a checkpoint that was gathered before it was saved."
            )
    if not reader.tensors:
        raise ExportError(f"{folder} holds no tensor. Give another checkpoint.")
    if any("lora_" in name for name in reader.tensors):
        reader = Renamed(reader, adapter_names(name for name in reader.tensors))
    return reader


def whole_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole, or None; the rule is keeper.py's: complete.json lists each file with its size."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        files = json.loads((checkpoint / "complete.json").read_text(encoding="utf-8"))["files"]
        for name, size in files.items():
            found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
            if found != size:
                return f"{name} is {'missing' if found is None else f'{found} bytes'}, expected {size} bytes"
        return None
    return "it has no complete.json, which is written last: the save was cut off"
