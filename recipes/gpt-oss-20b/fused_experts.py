"""The experts of gpt-oss with fewer passes over memory. Off by default; on with

    ... train.py --model_init_kwargs '{"experts_implementation": "fused"}'

The same file lies in both gpt-oss recipes. transformers 5.24 sends each token to its experts, adds biases, applies the
clamped gate, weighs and sums in some twenty kernels a layer, and in more of them backward; each passes over as many as
tokens x top_k x 5,760 numbers. Elementwise work like this is a quarter of a gpt-oss-20B step. Here torch.compile makes
four functions of it; the products between them stay torch's grouped_mm. transformers' registry of experts implementations
is the way in, so nothing of it is replaced.

The way of the data in one layer, T tokens, k experts each, S = T x k rows, E experts, H wide, I inside:

    (T, H) -Dispatch-> (S, H), by expert -gate_up_proj-> (S, 2 I) -Gate-> (S, I) -down_proj-> (S, H) -Combine-> (T, H)

Gate also weighs, which Combine would else need down_proj's output for in the backward pass: of all this, (S, 2 I) alone is
kept. Each function computes in fp32 and rounds once, so bf16 results differ from transformers' in the last bits. On a CPU
the same functions run uncompiled. With `torch_compile` on top, grouped_mm wants bf16 weights.
"""

from functools import wraps

import torch
from torch.autograd import Function
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward


def register() -> None:
    """Make `fused` one of the values that transformers knows for `experts_implementation`."""
    ALL_EXPERTS_FUNCTIONS.register("fused", experts_forward)


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What GptOssExperts computes. hidden_states: (T, H). top_k_index, top_k_weights: (T, k), of the router.

    Returns (T, H). Raises ValueError for experts that are laid out otherwise than gpt-oss's.
    """
    if not (self.is_transposed and self.has_bias and not self.is_concatenated):
        raise ValueError(f"experts_implementation: `fused` is for gpt-oss, and not for {type(self).__name__}.")
    if self._is_expert_parallel and top_k_index.size(1) > 1:  # ranks share a batch; some choices are another rank's
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    sorted_experts, order = torch.sort(top_k_index.flatten(), stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=order.device), right=True).int()
    place = torch.empty_like(order)  # of each token's choices in the order by expert
    place[order] = torch.arange(len(order), device=order.device)
    place = place.view_as(top_k_index)
    up, down = self.gate_up_proj, self.down_proj
    rows = grouped_mm(Dispatch.apply(hidden_states.to(up.dtype), order, place), up, offs=ends)
    bias = self.gate_up_proj_bias
    rows = Gate.apply(rows, bias, top_k_weights, sorted_experts, order, place, self.alpha, self.limit)
    rows = grouped_mm(rows.to(down.dtype), down, offs=ends)
    output = Combine.apply(rows, self.down_proj_bias, top_k_weights, top_k_index, order, place)
    return output.to(hidden_states.dtype)


def compiled_on_gpu(function):
    """`function` as few kernels on a GPU, as it stands elsewhere, and where torch.compile is off or gives up."""
    compiled = torch.compile(function)

    @wraps(function)
    def run(rows, *others):
        if not rows.is_cuda:
            return function(rows, *others)
        # Detached: tensors with and without requires_grad (training, evaluation) would each be compiled for.
        return compiled(*(x.detach() if isinstance(x, torch.Tensor) else x for x in (rows, *others)))

    return run


# ------------------------------------------------------------------------------------- the steps between the products


class Dispatch(Function):
    """(T, H) -> (S, H): each token once for every expert of its choice, in the order of the experts."""

    @staticmethod
    def forward(ctx, hidden_states, order, place):
        ctx.save_for_backward(place)
        return hidden_states[order // place.size(1)]

    @staticmethod
    def backward(ctx, grad):
        return gathered_sum(grad, *ctx.saved_tensors), None, None


class Gate(Function):
    """(S, 2 I) -> (S, I): bias, clamps, up + 1 times gate times its sigmoid, times the router's weight."""

    @staticmethod
    def forward(ctx, rows, bias, weight, sorted_experts, order, place, alpha, limit):
        ctx.save_for_backward(rows, bias, weight, sorted_experts, order, place)
        ctx.constants = alpha, limit
        return gate(pairs(rows), pairs(bias), weight, sorted_experts, order, alpha, limit, rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        rows, bias, weight, sorted_experts, order, place = ctx.saved_tensors
        grad_rows, grad_weight = gate_backward(
            grad, pairs(rows), pairs(bias), weight, sorted_experts, order, *ctx.constants
        )
        grad_rows, grad_bias = grad_rows.view(rows.dtype).view(rows.shape), None
        if ctx.needs_input_grad[1]:  # as a product: a scatter would add one row after the other
            chosen = torch.nn.functional.one_hot(sorted_experts, len(bias)).to(rows.dtype)  # (S, E)
            grad_bias = (chosen.T @ grad_rows).to(bias.dtype)
        return grad_rows, grad_bias, grad_weight[place].to(weight.dtype), None, None, None, None, None


class Combine(Function):
    """(S, H) -> (T, H): the sum of each token's experts, and of their biases by weight."""

    @staticmethod
    def forward(ctx, rows, bias, weight, top_k_index, order, place):
        ctx.save_for_backward(bias, weight, top_k_index, order)
        return combine(rows, bias, weight, top_k_index, place)

    @staticmethod
    def backward(ctx, grad):
        bias, weight, top_k_index, order = ctx.saved_tensors
        grad_bias = grad_weight = None
        if ctx.needs_input_grad[1]:
            dense = weight.new_zeros(len(weight), len(bias)).scatter(1, top_k_index, weight)  # (T, E)
            grad_bias = (dense.to(grad.dtype).T @ grad).to(bias.dtype)
        if ctx.needs_input_grad[2]:
            grad_weight = (grad @ bias.to(grad.dtype).T).gather(1, top_k_index).to(weight.dtype)
        return grad[order // weight.size(1)], grad_bias, grad_weight, None, None, None


# ------------------------------------------------------------------------------------------------------- the kernels


def pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A gate and its up, neighbours in a row, as one int32 (bf16), so that a kernel loads and stores both at once."""
    return tensor.view(torch.int32) if tensor.dtype == torch.bfloat16 else tensor.unflatten(-1, (-1, 2))


def halves(pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of `pairs`, in fp32."""
    if pair.dtype == torch.int32:
        return (pair << 16).view(torch.float32), (pair & -65536).view(torch.float32)
    return pair[..., 0].float(), pair[..., 1].float()


def joined(gate: torch.Tensor, up: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `halves`. Stacked, they would be a kernel and an fp32 copy of their own (pytorch/pytorch 124002)."""
    if like.dtype == torch.int32:
        low, high = (half.to(torch.bfloat16).view(torch.int16).to(torch.int32) for half in (gate, up))
        return low & 65535 | high << 16
    return torch.stack((gate, up), dim=-1).to(like.dtype)


def clamped(rows, bias, sorted_experts, limit) -> tuple[torch.Tensor, ...]:
    """Gate and up in fp32 before and after they are clamped."""
    (gate, up), (gate_bias, up_bias) = halves(rows), halves(bias[sorted_experts])
    gate, up = gate + gate_bias, up + up_bias
    return gate, up, gate.clamp(max=limit), up.clamp(-limit, limit)


@compiled_on_gpu
def gathered_sum(rows, place):
    return rows[place].float().sum(1).to(rows.dtype)


@compiled_on_gpu
def gate(rows, bias, weight, sorted_experts, order, alpha, limit, dtype):
    _, _, gated, up = clamped(rows, bias, sorted_experts, limit)
    weight = weight.flatten()[order].float().unsqueeze(-1)
    return (weight * (up + 1) * gated * torch.sigmoid(alpha * gated)).to(dtype)


@compiled_on_gpu
def gate_backward(grad, rows, bias, weight, sorted_experts, order, alpha, limit):
    free_gate, free_up, gated, up = clamped(rows, bias, sorted_experts, limit)
    share, grad = torch.sigmoid(alpha * gated), grad.float()
    grad_weight = (grad * (up + 1) * gated * share).sum(1)
    grad = grad * weight.flatten()[order].float().unsqueeze(-1)
    grad_gate = grad * (up + 1) * share * (1 + alpha * gated * (1 - share)) * (free_gate <= limit)
    grad_up = grad * gated * share * (free_up.abs() <= limit)
    return joined(grad_gate, grad_up, rows), grad_weight


@compiled_on_gpu
def combine(rows, bias, weight, top_k_index, place):
    return (rows[place].float() + weight.float().unsqueeze(-1) * bias[top_k_index].float()).sum(1).to(rows.dtype)
