"""Communication of data-parallel training, on paper: bytes and seconds of each collective, and what a step loses to it.

Used by scaling.py. Strategies are launch files; `hsdp` shards within a node and replicates across nodes, `ep` also keeps
each expert on one GPU of its node and sends it the tokens (transformers' DistributedConfig: fsdp_size,
dp_replicate_size, ep_size).
"""

import dataclasses
import math

NODE = 8  # GPUs of one machine
NVLINK = 370e9  # bytes/s that a GPU receives within a node: effective, an assumption for the ring of 8 H100 or H200
# Bytes/s per GPU between nodes: a 400 Gb/s adapter for each GPU (DGX H100's data sheet), with the share of the line rate
# that NVLINK is of its 450 GB/s. No measurement of ours.
NETWORK = 50e9 * NVLINK / 450e9
# Seconds: start of a collective, a ring step over NVLink and over the network, the same for a tree. Source: NVIDIA/nccl,
# src/graph/tuning.cc, baseLat and hwLat, protocol Simple.
START, RING, TREE = 8.4e-6, (3.4e-6, 9.6e-6), (28e-6, 50e-6)
HBM = 4.3e12  # bytes/s, H200's memory: what reading the experts' weights is bound by
DDP_BUCKET = 25 * 2**20  # bytes; `bucket_cap_mb` of DistributedDataParallel
ZERO_BUCKET = 500_000_000  # elements; `reduce_bucket_size` of DeepSpeed's stages 1 and 2


@dataclasses.dataclass(frozen=True)
class Work:
    """One GPU's share of an optimizer step. tokens: of a micro-step. compute: seconds of a micro-step on one GPU.

    parameters, trained, experts: elements (experts: the stacks, of `parameters`). gradient: bytes per element that DDP
    reduces. reduces: buckets in which ZeRO-3 reduces all gradients. routed: bytes that one pass of all layers sends to and
    gets back from experts, per token. passes: forward, backward and recomputation. expert_read: seconds to read all
    experts' weights in these passes.
    """

    layers: int
    parameters: int
    trained: int
    tokens: int
    compute: float
    micro_steps: int = 1
    gradient: int = 2
    reduces: int = 1
    experts: int = 0
    routed: int = 0
    passes: int = 2
    expert_read: float = 0.0


def collective(kind: str, size: float, gpus: int, nodes: int = 1, messages: int = 1) -> dict:
    """Bytes that each GPU receives, and seconds, of a collective over `gpus` that lie on `nodes` in equal parts.

    kind: all_gather, reduce_scatter, all_reduce or all_to_all. size: bytes of the whole tensor; for all_to_all what one
    GPU has to hand out. messages: launches that `size` is split into. Bandwidth: each GPU receives (n-1)/n of the tensor,
    all_reduce twice; between nodes each byte enters a node once, spread over its GPUs' adapters, at the same time.
    """
    if gpus == 1 or not size:
        return {"kind": kind, "bytes": 0.0, "seconds": 0.0}
    rounds, local = (2 if kind == "all_reduce" else 1), gpus // nodes
    received = rounds * size * (gpus - 1) / gpus
    within = received / NVLINK if local > 1 else 0.0
    across = rounds * size * (nodes - 1) / nodes / local / NETWORK
    latency = rounds * ((gpus - nodes) * RING[0] + (nodes - 1) * RING[1])
    if kind == "all_reduce":
        latency = min(latency, 2 * ((local - 1) * TREE[0] + math.log2(nodes) * TREE[1]))
    elif kind == "all_to_all":  # all pairs at once
        latency = RING[nodes > 1]
    return {"kind": kind, "bytes": received, "seconds": max(within, across) + messages * (START + latency)}


def collectives(strategy: str, work: Work, gpus: int) -> list[dict]:
    """The collectives of one optimizer step. When gradients travel: FSDP2 and DDP once a step (no_sync), ZeRO-1 too;
    ZeRO-2 and -3 every micro-step. ZeRO-1 and -2 all-reduce (DeepSpeed's `use_multi_rank_bucket_allreduce`)."""
    nodes, steps, units = math.ceil(gpus / NODE), work.micro_steps, work.layers + 1
    everyone, half = (gpus, nodes), 2 * work.trained
    if strategy == "ddp":
        size = work.gradient * work.trained
        return [collective("all_reduce", size, *everyone, math.ceil(size / DDP_BUCKET))]
    if strategy in ("zero1", "zero2"):
        repeats, messages = (steps if strategy == "zero2" else 1), math.ceil(work.trained / ZERO_BUCKET)
        found = [collective("all_reduce", half, *everyone, messages)] * repeats
        return [*found, collective("all_gather", half, *everyone, messages)]
    if strategy in ("fsdp", "zero3"):
        found = [collective("all_gather", 2 * work.parameters, *everyone, units)] * (2 * steps)
        messages = units if strategy == "fsdp" else work.reduces
        reduce = collective("reduce_scatter", half, *everyone, messages)
        return found + [reduce] * (1 if strategy == "fsdp" else steps)
    if strategy not in ("hsdp", "ep"):
        raise ValueError(f"strategy is {strategy!r}, expected ddp, zero1, zero2, zero3, fsdp, hsdp or ep.")
    local = min(gpus, NODE)
    gathered = work.parameters - (work.experts if strategy == "ep" else 0)
    found = [collective("all_gather", 2 * gathered, local, 1, units)] * (2 * steps)
    found.append(collective("reduce_scatter", half, local, 1, units))
    found.append(collective("all_reduce", half / local, nodes, nodes, units))
    if strategy == "ep":
        size, messages = work.routed * work.tokens * work.passes, 2 * work.layers * work.passes
        found += [collective("all_to_all", size, local, 1, messages)] * steps
    return found


def predict(strategy: str, work: Work, gpus: int, host: float = 0.0) -> dict:
    """Seconds of a step and tokens/s/GPU. low: nothing overlaps, and `host` seconds go to every layer of a micro-step;
    high: communication hides behind arithmetic wherever it is shorter, the host costs nothing."""
    found = collectives(strategy, work, gpus)
    read = work.expert_read / (min(gpus, NODE) if strategy == "ep" else 1)
    compute = work.micro_steps * max(work.compute, read)
    communication, tokens = sum(one["seconds"] for one in found), work.micro_steps * work.tokens
    slow = compute + communication + host * work.layers * work.micro_steps
    fast = max(compute, communication)
    kinds = {}
    for one in found:
        total = kinds.setdefault(one["kind"], {"bytes": 0.0, "seconds": 0.0})
        total["bytes"] += one["bytes"]
        total["seconds"] += one["seconds"]
    return {
        "strategy": strategy,
        "gpus": gpus,
        "collectives": kinds,
        "compute_seconds": compute,
        "communication_seconds": communication,
        "tokens_per_second": {"low": tokens / slow, "high": tokens / fast},
        "efficiency": {"low": compute / slow, "high": compute / fast},
    }


# Two H200 of one machine, Llama-3.2-1B, all weights in bf16, 8 rows of 2048 a GPU, TRL without recipe code; tokens/s/GPU.
ONE, TWO = 49636, {"ddp": 47700, "fsdp": 45282, "zero2": 45756, "zero3": 36944}
LLAMA = Work(layers=16, parameters=1235814400, trained=1235814400, tokens=16384, compute=16384 / ONE, reduces=113)
# Four H200, Llama-3 8B, full weights, 4 x 4096 x 2; KempnerForge, benchmarks/mfu_scaling: 10,471 alone, 9,746 of four.
KEMPNER = Work(layers=32, parameters=8030261248, trained=8030261248, tokens=16384, compute=16384 / 10471, micro_steps=2)
MEASURED = [("Llama 1B, 2 GPUs", s, LLAMA, 2, rate / ONE) for s, rate in TWO.items()]
MEASURED.append(("Llama 8B, 4 GPUs (published)", "fsdp", KEMPNER, 4, 9746 / 10471))


def host_seconds(strategy: str) -> float:
    """What a layer of a micro-step took on two GPUs beyond arithmetic and predicted communication: the library's share."""
    near = {"zero1": "zero2", "hsdp": "fsdp", "ep": "fsdp"}.get(strategy, strategy)
    found = predict(near, LLAMA, 2)
    rest = LLAMA.tokens / TWO[near] - found["compute_seconds"] - found["communication_seconds"]
    return max(0.0, rest) / LLAMA.layers
