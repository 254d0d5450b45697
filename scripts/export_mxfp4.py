"""MXFP4, the layout that gpt-oss is published in, to bf16 and back, in plain PyTorch on any machine."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from export_files import ExportError, Stored

FLOAT_DTYPES = ("BF16", "F16", "F32")
# The sixteen values of FP4 (E2M1), in the order of their codes: the high bit is the sign (OCP MX v1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Planned(NamedTuple):
    """One bf16 tensor to write: its shape, and the one stored name it comes from, or two (MXFP4 blocks, scales)."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]


def pair_table() -> torch.Tensor:
    """Every (scale, byte) of MXFP4 as its two bf16 values, packed in one int32: shape (256 * 256,), row-major.

    It is filled by the operation that transformers' loader applies to whole tensors, so the ends of the exponent
    range come out the same, too.
    """
    exponents = torch.arange(256, dtype=torch.int32).unsqueeze(1) - 127
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16).repeat(256, 1)
    torch.ldexp(values, exponents, out=values)
    byte = torch.arange(256)
    pairs = torch.stack([values[:, byte & 0x0F], values[:, byte >> 4]], dim=-1)  # the low half of a byte comes first
    return pairs.contiguous().view(torch.int32).flatten()


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize the experts of one projection to bf16, in the layout of transformers' gpt-oss module.

    blocks: uint8 (experts, out, in / 32, 16), two FP4 values a byte. scales: uint8 (experts, out, in / 32), powers of
    two with bias 127. Returns bf16 (experts, in, out), contiguous. One expert is converted at a time, so little memory
    is needed beyond the result. Source: `convert_moe_packed_tensors` in transformers/integrations/mxfp4.py.
    """
    table = pair_table() if table is None else table
    experts, rows, groups, _ = blocks.shape
    result = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        codes = scales[expert].to(torch.int32).mul_(256).unsqueeze(-1) + blocks[expert]
        values = table.index_select(0, codes.flatten()).view(torch.bfloat16)
        result[expert] = values.view(rows, groups * 32).T
    return result


def plan_bf16(tensors: dict[str, Stored], folder: Path, config: dict) -> dict[str, Planned]:
    """Map every tensor of an MXFP4 checkpoint to the bf16 tensor to write, from headers alone.

    Raises ExportError when the checkpoint is not MXFP4, or is MXFP4 only in part.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    blocks = sum(name.endswith("_blocks") for name in tensors)
    if method != "mxfp4" or not blocks:
        raise ExportError(
            f"{folder} is not an MXFP4 checkpoint: config.json has quantization_config.quant_method "
            f'{json.dumps(method)} and the weights have {blocks} tensors ending in _blocks; expected "mxfp4" and at '
            "least one, as in openai/gpt-oss-20b. A folder that is bf16 already needs no --bf16: train on it as it is "
            "(and delete quantization_config from its config.json if the section is left over from an earlier save)."
        )
    plan = {}
    for name, stored in tensors.items():
        if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors:
            continue
        if name.endswith("_blocks"):
            target = name.removesuffix("_blocks")
            scales = tensors.get(target + "_scales")
            if (
                scales is None
                or stored.dtype != "U8"
                or scales.dtype != "U8"
                or len(stored.shape) != 4
                or stored.shape[-1] != 16
                or stored.shape[:-1] != scales.shape
            ):
                found = "no scales" if scales is None else f"scales {scales.dtype} {list(scales.shape)}"
                raise ExportError(
                    f"{stored.file}: {name} is {stored.dtype} {list(stored.shape)} with {found}; expected U8 blocks "
                    "(experts, out, in / 32, 16) and U8 scales (experts, out, in / 32). Download the model again."
                )
            experts, rows, groups, _ = stored.shape
            plan[target] = Planned((experts, groups * 32, rows), (name, target + "_scales"))
        elif stored.dtype in FLOAT_DTYPES:
            plan[name] = Planned(stored.shape, (name,))
        else:
            raise ExportError(
                f"{stored.file}: {name} is {stored.dtype}; expected {', '.join(FLOAT_DTYPES)}, or U8 in a pair of "
                "_blocks and _scales. This layout is not the published MXFP4 one, and is not converted."
            )
    return plan


# ---------------------------------------------------------------- bf16 to MXFP4

# The code of each magnitude, by twice the magnitude: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
FP4_CODES = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the experts of one projection to the published layout; `dequantize_mxfp4` is the way back.

    weight: (experts, in, out), bf16 or fp32, `in` a multiple of 32. Returns blocks uint8 (experts, out, in / 32, 16) and
    scales uint8 (experts, out, in / 32). The scale of 32 values is the smallest power of two at which the largest fits
    under 6 (OCP MX v1.0; triton_kernels' `downcast_to_mxfp` rounds it the same way); values go to the nearest FP4, ties
    to the even code. So no value is clipped, and a weight that came from MXFP4 comes out the same to the bit. One expert
    is converted at a time. Raises ExportError for a shape that does not divide and for a number that is not finite.
    """
    experts, inner, outer = weight.shape
    if inner % 32:
        raise ExportError(
            f"an expert weight of shape {list(weight.shape)} has no whole blocks of 32 along dimension 1."
        )
    blocks = torch.empty(experts, outer, inner // 32, 16, dtype=torch.uint8)
    scales = torch.empty(experts, outer, inner // 32, dtype=torch.uint8)
    for expert in range(experts):
        values = weight[expert].T.float().reshape(outer, inner // 32, 32)
        largest = values.abs().amax(dim=-1)
        if not torch.isfinite(largest).all():
            raise ExportError(f"expert {expert} holds a number that is not finite. Give a checkpoint before it.")
        fraction, exponent = torch.frexp(largest)  # largest = fraction * 2**exponent, fraction in [0.5, 1)
        exponent = torch.where(fraction > 0.75, exponent - 2, exponent - 3).clamp_(-127, 127)
        exponent[largest == 0] = -127
        scaled = torch.ldexp(values.abs(), -exponent.unsqueeze(-1)).clamp_(max=6.0)
        step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
        codes = FP4_CODES[((scaled / step).round_() * step * 2).to(torch.int64)]
        codes |= torch.signbit(values).to(torch.uint8) << 3
        blocks[expert] = codes[..., 0::2] | codes[..., 1::2] << 4  # the low half of a byte comes first
        scales[expert] = (exponent + 127).to(torch.uint8)
    return blocks, scales


def check_mxfp4(name: str, weight: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> tuple[float, float]:
    """Dequantize again: no value of `weight` may be off by more than half of the widest step between two FP4 values.

    Returns (sum of squared differences, sum of squares), for a relative error. Raises ExportError where one is.
    """
    again = dequantize_mxfp4(blocks, scales)
    wrong = noise = power = 0
    for expert in range(len(weight)):
        before = weight[expert].T.float()
        off = before - again[expert].T.float()
        # The widest step of FP4 is 2, between 4 and 6: half of it, times the block's scale.
        most = torch.exp2(scales[expert].float() - 127).repeat_interleave(32, dim=-1)
        wrong += int((off.abs() > most).sum())
        noise, power = noise + off.square().sum().item(), power + before.square().sum().item()
    if wrong:
        raise ExportError(f"{name}: {wrong} values are further off after dequantizing than MXFP4's step allows.")
    return noise, power
