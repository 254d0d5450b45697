"""Does a launch fit? scripts/memory.py's prediction for the line as it is, and its table for every strategy."""

import dataclasses

from check_launch import Launch

GIB = 2**30


def check(launch: Launch) -> str:
    """Add what does not fit, and return the table for people; "" where the model or the GPU is not known."""
    if launch.model_config is None or launch.training_args is None or launch.cpu or not launch.gpu_bytes:
        return ""
    import memory

    config, gpu, host = launch.model_config, launch.gpu_bytes, launch.host_ram or float("inf")
    settings = memory.settings_of(launch)
    strategies = [name for name in memory.STRATEGIES if name in launch.strategies]
    try:
        found = memory.table(config, settings, gpu, host, strategies)
    except Exception as error:  # a model whose layers cannot be traced is no reason to say nothing of the rest
        launch.notes.append(f"memory was not predicted: {type(error).__name__}: {error}")
        return ""
    row = next((row for row in found["rows"] if row["strategy"] == launch.strategy), None)
    if row is not None and row["prediction"].needs > gpu:
        _too_large_for_the_gpu(launch, row, found, gpu)
    if row is not None and row["prediction"].host > host:
        one = dataclasses.replace(settings, strategy=launch.strategy, stored="bfloat16")
        _too_large_for_the_host(launch, row, host, memory.predict(config, one).host)
    return _table(launch, found, gpu, host)


def _too_large_for_the_gpu(launch: Launch, row: dict, found: dict, gpu: float) -> None:
    prediction, args, key = row["prediction"], launch.training_args, "per_device_train_batch_size"
    cure = " ".join(found["change"])
    if found["cheapest"]:
        cure = f"--config_file accelerate_configs/{found['cheapest']}.yaml"
    if row["largest_batch"]:
        cure = launch.line(key, row["largest_batch"])
    phases = {name: sum(getattr(prediction, name).values()) for name in ("load", "step", "save")}
    largest = max(phases, key=phases.get)
    launch.add(
        "memory",
        launch.where(key),
        key,
        f"{launch.strategy} on {launch.world} GPU(s) needs {prediction.needs / GIB:.0f} GiB per GPU (most in the phase "
        f"{largest}) with micro-batches of {args.per_device_train_batch_size} x {args.max_length} tokens; {launch.gpu} has "
        f"{gpu / GIB:.0f} GiB.",
        cure,
    )


def _too_large_for_the_host(launch: Launch, row: dict, host: float, from_bf16: int) -> None:
    """As the guard says it: MXFP4 is dequantized by every process, and fp32 copies are made by every process."""
    args, key = launch.model_args, "model_name_or_path"
    need = row["prediction"].host
    why = f"{launch.strategy} needs {need / GIB:.0f} GiB of host memory a machine; {host / GIB:.0f} GiB are there."
    cure = "--host-ram of a larger machine, or fewer processes a machine"
    if getattr(launch.model_config, "quantization_config", None):
        why += (
            f" Every process dequantizes all of the MXFP4 weights; from bf16 weights it is {from_bf16 / GIB:.0f} GiB."
        )
        cure = f"python scripts/export.py {args.model_name_or_path} DEST --bf16, then --model_name_or_path DEST"
    elif launch.strategy == "fsdp" and args.dtype == "float32":
        key, cure = "dtype", launch.line("dtype", "bfloat16")
        why += " Every process converts all weights to fp32; FSDP2 keeps fp32 masters of its shards by itself."
    launch.add("memory-host", launch.where(key), key, why, cure)


def _table(launch: Launch, found: dict, gpu: float, host: float) -> str:
    head = f"{'strategy':14}{'load':>7}{'step':>7}{'save':>7}{'needs':>7}{'host':>7}   fits  largest micro-batch"
    lines = [
        f"memory in GiB: each GPU by phase, what it must have, and each machine ({launch.world} process(es))",
        head,
    ]
    for row in found["rows"]:
        prediction = row["prediction"]
        sums = [sum(getattr(prediction, name).values()) / GIB for name in ("load", "step", "save")]
        sums += [prediction.needs / GIB, prediction.host / GIB]
        mark = "*" if row["strategy"] == launch.strategy else " "
        cells = "".join(f"{value:7.1f}" for value in sums)
        lines.append(
            f"{mark}{row['strategy']:13}{cells}   {'yes' if row['fits'] else 'no':4}  {row['largest_batch'] or '-'}"
        )
    if found["cheapest"]:
        lines.append(f"the cheapest that fits: {found['cheapest']}.yaml")
    if not any(row["prediction"].needs <= gpu for row in found["rows"]):
        lines += [f"to make it fit: {change}" for change in found["change"]]
    if host == float("inf"):
        lines.append("the machine's memory is not known: --host-ram GIB compares it")
    return "\n".join(lines)
