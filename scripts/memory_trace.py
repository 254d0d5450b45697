"""One training step of a model without its weights: how many bytes live when, from torch's own MemTracker.

The model is built on the meta device, its parameters become fake tensors, and the step that TRL takes (autocast, PEFT,
activation checkpointing, fused loss head) runs on them forward and backward. Shapes are real, no number is computed and
no memory is used. `trace` does this with few layers; `at_depth` carries the result to the model's own depth, which is
exact because every peak grows by the same bytes with each layer, or with each round of the layers' kinds.

What a CPU build of torch cannot run on fake tensors has a stand-in that allocates what the CUDA kernel allocates:
scaled dot product attention and FlashAttention (outputs, log-sum-exp, and the fp32 accumulators of the backward pass),
linear attention as flash-linear-attention and causal-conv1d run it, the grouped matrix product of the experts, and the
tiles of the loss head. So have the kernels of fused_experts.py, which a CPU does not compile.
"""

import contextlib
import copy
import math
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch
import trl.kernels.chunked_logprob
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.integrations import moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer import utils as trl_utils

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes" / "gpt-oss-20b"))
import fused_experts

CPU = torch.device("cpu")
DEPTHS = (2, 3)  # gpt-oss alternates two kinds of attention: both depths hold both masks
CHUNK = 64  # tokens between two states that the delta rule's kernels keep
PHASES = ("forward", "head", "backward of the last layer", "backward of the first layer", "end of backward")


class PhaseTracker(MemTracker):
    """MemTracker that keeps the largest total, with its breakdown, of each phase of a step.

    Beside MemTracker's kinds of memory it tells apart "Casts" (bf16 copies that autocast makes of the parameters),
    "Experts" (made inside the experts of a mixture) and "Head" (made between the last layer and its backward).
    """

    def __init__(self):
        super().__init__()
        self._ref_class = [*_MemRefType, "Casts", "Experts", "Head"]
        self.phase, self.peaks, self.casting = "forward", {}, False
        self.tied = None  # shape of an embedding that is the head's weight, too

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.casting = False
        if func is torch.ops.aten._to_copy.default:
            source, _ = self._WINFO.get(args[0].untyped_storage(), (None, None))
            self.casting = source is not None and source.reftype == _MemRefType.PARAM
        held = None
        if func is torch.ops.aten.add.Tensor and self.tied == getattr(args[0], "shape", None) == args[1].shape:
            # The two gradients of a tied embedding: autograd adds in place, but not into fake tensors (input_buffer.cpp).
            func = torch.ops.aten.add_.Tensor
        if func is torch.ops.aten._softmax_backward_data.default:
            # CUDA's kernel multiplies grad and output into a tensor of its own first (SoftMax.cu); held until it is done.
            held = super().__torch_dispatch__(torch.ops.aten.mul.Tensor, types, args[:2])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        del held
        return result

    def _track(self, reftype, t) -> None:
        if self.casting:
            reftype = "Casts"
        elif self.phase == "head":
            reftype = "Head"
        elif any(name.endswith("experts") for name in self._mod_tracker.parents):
            reftype = "Experts"
        super()._track(reftype, t)

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        def mark(parameter):
            self._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

        # MemTracker would hang its gradient hooks on frozen parameters, too, and those refuse them.
        sizes = super()._track_module_params_and_buffers(module, install_grad_hooks=False)
        for parameter in module.parameters():
            if install_grad_hooks and parameter.requires_grad and parameter not in self._param_to_grad_hook_handles:
                handle = parameter.register_post_accumulate_grad_hook(mark)
                self._param_to_grad_hook_handles[parameter] = (handle, handle)
        return sizes

    def _update_peak_stats(self, peak_state) -> None:
        now = self._curr_mem_snap.get(CPU)
        if now and now["Total"] > self.peaks.get(self.phase, {"Total": 0})["Total"]:
            self.peaks[self.phase] = {getattr(kind, "value", kind): size for kind, size in now.items()}


class MaskedRows(TorchDispatchMode):
    """Lets `x[mask]` run on fake tensors, as if the share `labelled` of the mask were true."""

    def __init__(self, labelled: float):
        super().__init__()
        self.labelled = labelled

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            x, mask = args[0], args[1][0]
            return x.new_empty((round(self.labelled * math.prod(mask.shape)), *x.shape[mask.ndim :]))
        return func(*args, **(kwargs or {}))


class Attention(torch.autograd.Function):
    """What a fused attention kernel allocates. q (B, H, S, D); k, v (B, H or KV heads, S, D); output (B, H, S, D).

    Forward: output and fp32 log-sum-exp. Backward: fp32 accumulator of dq, per-row sums, and dk, dv of every query head
    (FlashAttention 2, flash_api.cpp `mha_bwd`) or fp32 accumulators of dk, dv (`fp32_kv`, FlashAttention 4).
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, fp32_kv):
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.fp32_kv = fp32_kv
        ctx.save_for_backward(q, k, v, out, lse, *([] if bias is None else [bias]))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, lse, *_ = ctx.saved_tensors
        accumulators = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)]
        if ctx.fp32_kv:
            accumulators += [torch.empty_like(k, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)]
        elif k.shape[1] != q.shape[1]:
            accumulators += [torch.empty_like(q), torch.empty_like(q)]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


class DeltaRule(torch.autograd.Function):
    """What flash-linear-attention's gated delta rule allocates (0.6, ops/gated_delta_rule/chunk.py).

    q, k (B, S, key heads, K); v (B, S, heads, V); g fp32 and beta (B, S, heads); output (B, S, heads, V). Both passes make
    the state before every CHUNK tokens; the backward pass takes gradients of q and k for each head of v.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        kept = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(q[..., 0], dtype=torch.float32)]
        kept += [torch.empty_like(kept[-1]), v, torch.empty_like(g), beta, k.new_empty(*g.shape, CHUNK)]
        ctx.save_for_backward(*kept)
        working = [*DeltaRule.states(k, v), torch.empty_like(v)]
        out = torch.empty_like(v)
        del working
        return out

    @staticmethod
    def states(k, v) -> list[torch.Tensor]:
        """Keys and values as the state meets them, and the states."""
        *places, heads, width = v.shape
        chunks = math.ceil(places[-1] / CHUNK)
        keys = k.new_empty(*places, heads, k.shape[-1])
        return [keys, torch.empty_like(v), k.new_empty(places[0], chunks, heads, k.shape[-1], width)]

    @staticmethod
    def backward(ctx, grad):
        q, k, _, _, v, g, beta, _ = ctx.saved_tensors
        working = [*DeltaRule.states(k, v), torch.empty_like(v), torch.empty_like(v)]
        working += [torch.empty_like(working[2]), torch.empty_like(v)]
        every = [torch.empty_like(working[0]) for _ in range(3)]  # of q, k and the keys, for each head of v
        dg = torch.empty_like(g)
        every += [torch.empty_like(working[0]), torch.empty_like(v), torch.empty_like(g)]
        del working
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dg, torch.empty_like(beta)


def _delta_rule(query, key, value, g, beta, **kwargs):
    return DeltaRule.apply(query, key, value, g, beta), None


class ShortConvolution(torch.autograd.Function):
    """What causal-conv1d allocates: the output; the gradients of x (B, C, S) and, in fp32, of the weight (C, width)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32).to(weight.dtype)


class GroupedMM(torch.autograd.Function):
    """Shapes of torch.nn.functional.grouped_mm: (S, in) x (experts, in, out) -> (S, out), and its two gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        needs = ctx.needs_input_grad
        ctx.like = x.shape, x.dtype, weight.shape
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        return x.new_empty(x.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        rows, dtype, stack = ctx.like
        shapes = [shape if need else None for shape, need in zip((rows, stack), ctx.needs_input_grad, strict=True)]
        return tuple(None if shape is None else grad.new_empty(shape, dtype=dtype) for shape in shapes)


# What each kernel of the gpt-oss recipes' fused_experts.py allocates: its result.
FUSED_EXPERTS = {
    "grouped_mm": lambda x, weight, offs: GroupedMM.apply(x, weight),
    "gathered_sum": lambda rows, place: rows.new_empty(len(place), rows.shape[1]),
    "gate": lambda rows, *others: rows.new_empty(rows.shape[:2], dtype=others[-1]),  # rows are pairs
    "gate_backward": lambda grad, rows, *_: (torch.empty_like(rows), grad.new_empty(len(grad), dtype=torch.float32)),
    "combine": lambda rows, bias, weight, index, place: rows.new_empty(len(place), rows.shape[1]),
}


def _half(*tensors):
    """What autocast does to the inputs of an attention kernel."""
    return [t.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else t for t in tensors]


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    query, key, value = _half(query, key, value)
    # With a mask CUDA takes the memory-efficient kernel, which wants the mask as an additive bias of its own.
    bias = None if attn_mask is None else torch.empty(attn_mask.shape, dtype=query.dtype)
    return Attention.apply(query, key, value, bias, False)


def _dropout(input, p=0.5, training=True, inplace=False):
    # CUDA's kernel saves a mask of bools for the backward pass; the CPU saves the noise in the type of the input.
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _flash(module, query, key, value, attention_mask, s_aux=None, **kwargs):
    query, key, value = _half(query, key, value)
    return Attention.apply(query, key, value, None, True).transpose(1, 2), None


def _mask(attention: str, padded: bool):
    """Stand-in for transformers' create_causal_mask: the same tensor for the same attention, without looking at values."""

    def create(config=None, inputs_embeds=None, **kwargs):
        batch, length = inputs_embeds.shape[:2]
        if attention == "eager":
            return torch.empty(batch, 1, length, length, dtype=inputs_embeds.dtype)
        return torch.empty(batch, 1, length, length, dtype=torch.bool) if attention == "sdpa" and padded else None

    return create


def depths(config) -> tuple[int, int]:
    """The two depths to trace: both hold every kind of layer in the model's proportion."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    rounds = (n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    period = next(rounds)
    return DEPTHS if period <= DEPTHS[0] else (period, 2 * period)


def meta_model(config, lora: LoraConfig | None = None, dtype: torch.dtype = torch.float32):
    """The causal model of `config` (and its adapter, in fp32 as PEFT makes it) on the meta device."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config._attn_implementation = "eager"
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
            model.to(dtype)
            return model if lora is None else get_peft_model(model, copy.deepcopy(lora))
    finally:
        torch.set_default_dtype(before)


def trace(config, settings, layers: int, compute: str) -> dict[str, dict[str, int]]:
    """Peaks of one step with `layers` layers: {phase: {"Parameter": bytes, "Gradient": ..., "Total": ...}}.

    settings: memory.Settings. compute: "autocast" (parameters as loaded, bf16 arithmetic by autocast), or a dtype name
    that all parameters have while they compute ("bfloat16" under FSDP2 and DeepSpeed).
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (2 * config.layer_types)[:layers]
    dtype = getattr(torch, settings.dtype if compute == "autocast" else compute)
    model = meta_model(config, settings.lora, dtype)
    if compute != "autocast":
        model.to(dtype)
    elif settings.lora and settings.strategy != "python":  # as speed.spare_casts of the recipes on a GPU
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.cast_input_dtype_enabled = False
    base = model.get_base_model() if settings.lora else model
    attention = settings.attention
    base.config._attn_implementation = attention
    if settings.experts == "fused":
        fused_experts.register()
        base.config._experts_implementation = settings.experts
    module = sys.modules[type(base).__module__]
    rows, length = settings.shape
    tracker = PhaseTracker()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(FakeTensorMode())
        for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, _mask(attention, settings.padded)))
        mask = (lambda attention_mask=None, **_: attention_mask) if settings.padded else (lambda **_: None)
        for name, stand_in in (
            ("create_recurrent_attention_mask", mask),
            ("torch_chunk_gated_delta_rule", _delta_rule),
            ("causal_conv1d_fn", lambda x, weight, *_, **__: ShortConvolution.apply(x, weight)),
        ):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _sdpa))
        stack.enter_context(mock.patch.object(torch.nn.functional, "dropout", _dropout))
        flash = {name: _flash for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4")}
        stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, flash))
        stack.enter_context(mock.patch.object(moe, "_grouped_mm", lambda x, w, offs: GroupedMM.apply(x.to(w.dtype), w)))
        for name, stand_in in FUSED_EXPERTS.items():
            stack.enter_context(mock.patch.object(fused_experts, name, stand_in))
        kernels = trl.kernels.chunked_logprob
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            stack.enter_context(mock.patch.object(kernels, name, lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(trl_utils, "_use_triton", lambda device: True))

        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        base.tie_weights()
        model.train()
        if settings.checkpointing:
            if settings.lora:
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trl_utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
        inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        if settings.packing:
            inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
        else:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        decoder = base.base_model.layers
        _mark_phases(tracker, decoder)
        stack.enter_context(MaskedRows(settings.labelled))
        tracker.track_external(model, *inputs.values())
        if settings.accumulation > 1 and compute == "autocast":  # the peak comes after the first micro step
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        if base.config.get_text_config().tie_word_embeddings:
            tracker.tied = base.get_input_embeddings().weight.shape
        with tracker:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == "autocast" and settings.bf16):
                loss = model(**inputs, use_cache=False, fused_lm_head=True).loss
            tracker.phase = "head"
            loss.backward()
    return tracker.peaks


def _mark_phases(tracker: PhaseTracker, layers) -> None:
    """Set the tracker's phase as the step comes to the head, to the backward of the last and the first layer, and out."""

    def at(tensor, phase):
        if tensor.requires_grad:

            def mark(grad):
                tracker.phase = phase

            tensor.register_hook(mark)

    def hidden(value):
        return value if isinstance(value, torch.Tensor) else value[0]

    def leave_last(module, args, output):
        if tracker.phase == "forward":
            tracker.phase = "head"
            at(hidden(output), "backward of the last layer")

    def leave_first(module, args, output):
        if tracker.phase == "forward":
            at(hidden(output), "backward of the first layer")

    def enter_first(module, args, kwargs):
        if tracker.phase == "forward":
            at(hidden(args[0] if args else kwargs["hidden_states"]), "end of backward")

    layers[0].register_forward_pre_hook(enter_first, with_kwargs=True)
    layers[0].register_forward_hook(leave_first)
    layers[-1].register_forward_hook(leave_last)


def at_depth(config, settings, compute: str) -> dict[str, dict[str, int]]:
    """The peaks of `trace` at the depth of `config`, from two shallow traces."""
    few, more = depths(config)
    low, high = (trace(config, settings, layers, compute) for layers in (few, more))
    steps = (config.num_hidden_layers - few) / (more - few)
    return {
        phase: {key: round(low[phase][key] + steps * (high[phase][key] - low[phase][key])) for key in high[phase]}
        for phase in high
        if phase in low
    }
