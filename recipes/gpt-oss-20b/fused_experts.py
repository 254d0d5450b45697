"""The experts of gpt-oss with fewer passes over memory. Off by default; on with

    ... train.py --model_init_kwargs '{"experts_implementation": "fused"}'

The same file lies in both gpt-oss recipes. transformers 5.24 sends each token to its experts, adds biases, applies the
clamped gate, weighs and sums in some twenty kernels a layer, and in more of them backward; each passes over as many as
tokens x top_k x 5,760 numbers. Elementwise work like this is a quarter of a gpt-oss-20B step. Here it is six kernels, by
torch.compile; the products between them stay torch's grouped_mm, and less is kept for the backward pass. transformers'
registry of experts implementations is the way in, so nothing of it is replaced.

The way of the data in one layer, T tokens, k experts each, S = T x k, E experts, H wide, I inside:

    hidden (T, H) -Dispatch-> (S, H), by expert -gate_up_proj-> (S, 2 I) -Gate-> (S, I) -down_proj-> (S, H) -Combine-> (T, H)

Each kernel computes in fp32 and rounds once, so bf16 results differ from transformers' in the last bits, and are nearer
to those of fp32. On a CPU the same functions run uncompiled.
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
    self: torch.nn.Module, hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """What GptOssExperts computes. hidden: (T, H). expert, weight: (T, k), of the router. Returns (T, H)."""
    if self._is_expert_parallel and expert.size(1) > 1:  # the ranks share a batch, and some choices are another rank's
        return grouped_mm_experts_forward(self, hidden, expert, weight)
    by_expert, order = torch.sort(expert.flatten(), stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(self.num_experts, device=expert.device), right=True).int()
    place = torch.empty_like(order)  # of each token's choices in the order by expert
    place[order] = torch.arange(len(order), device=order.device)
    place = place.view_as(expert)
    up, down = self.gate_up_proj, self.down_proj
    rows = grouped_mm(Dispatch.apply(hidden.to(up.dtype), order, place), up, offs=ends)
    rows = Gate.apply(rows, self.gate_up_proj_bias, by_expert, self.alpha, self.limit)
    rows = grouped_mm(rows.to(down.dtype), down, offs=ends)
    return Combine.apply(rows, self.down_proj_bias, weight, by_expert, order, place).to(hidden.dtype)


def fused(function):
    """`function` as few kernels on a GPU, as it stands elsewhere."""
    compiled = torch.compile(function, fullgraph=True)

    @wraps(function)
    def run(rows, *others):
        return (compiled if rows.is_cuda else function)(rows, *others)

    return run


class Dispatch(Function):
    """(T, H) -> (S, H): each token once for every expert of its choice, in the order of the experts."""

    @staticmethod
    def forward(ctx, hidden, order, place):
        ctx.save_for_backward(place)
        return hidden[order // place.size(1)]

    @staticmethod
    def backward(ctx, grad):
        return gathered_sum(grad, *ctx.saved_tensors), None, None


class Gate(Function):
    """(S, 2 I) -> (S, I): bias, and up + 1 times a gate that lets through what a sigmoid says; both clamped."""

    @staticmethod
    def forward(ctx, rows, bias, expert, alpha, limit):
        ctx.save_for_backward(rows, bias, expert)
        ctx.constants = alpha, limit
        return gate(rows, bias, expert, alpha, limit)

    @staticmethod
    def backward(ctx, grad):
        rows, bias, expert = ctx.saved_tensors
        change = gate_backward(grad, rows, bias, expert, *ctx.constants)
        return change, bias_gradient(change, bias, expert, ctx.needs_input_grad[1]), None, None, None


class Combine(Function):
    """(S, H) -> (T, H): bias, and the sum of each token's experts by their weight."""

    @staticmethod
    def forward(ctx, rows, bias, weight, expert, order, place):
        ctx.save_for_backward(rows, bias, weight, expert, order, place)
        return combine(rows, bias, weight, expert, place)

    @staticmethod
    def backward(ctx, grad):
        rows, bias, weight, expert, order, place = ctx.saved_tensors
        change = weighted(grad, weight, order, rows.dtype)
        of_weight = weight_gradient(grad, rows, bias, weight, expert, place) if ctx.needs_input_grad[2] else None
        return change, bias_gradient(change, bias, expert, ctx.needs_input_grad[1]), of_weight, None, None, None


@fused
def gathered_sum(rows, place):
    return rows[place].float().sum(1).to(rows.dtype)


def clamped(rows, bias, expert, limit):
    """Gate and up, which alternate in a row, in fp32 before and after they are clamped."""
    rows = rows.float() + bias[expert].float()
    free_gate, free_up = rows[:, ::2], rows[:, 1::2]
    return free_gate, free_up, free_gate.clamp(max=limit), free_up.clamp(-limit, limit)


@fused
def gate(rows, bias, expert, alpha, limit):
    _, _, gated, up = clamped(rows, bias, expert, limit)
    return ((up + 1) * gated * torch.sigmoid(alpha * gated)).to(rows.dtype)


@fused
def gate_backward(grad, rows, bias, expert, alpha, limit):
    free_gate, free_up, gated, up = clamped(rows, bias, expert, limit)
    share, grad = torch.sigmoid(alpha * gated), grad.float()
    of_gate = grad * (up + 1) * share * (1 + alpha * gated * (1 - share)) * (free_gate <= limit)
    of_up = grad * gated * share * (free_up.abs() <= limit)
    return torch.stack((of_gate, of_up), dim=-1).flatten(1).to(rows.dtype)


@fused
def combine(rows, bias, weight, expert, place):
    outputs = rows[place].float() + bias[expert[place]].float()  # (T, k, H)
    return (outputs * weight.float().unsqueeze(-1)).sum(1).to(rows.dtype)


@fused
def weighted(grad, weight, order, dtype):
    return (grad[order // weight.size(1)].float() * weight.flatten()[order].float().unsqueeze(-1)).to(dtype)


@fused
def weight_gradient(grad, rows, bias, weight, expert, place):
    outputs = rows[place].float() + bias[expert[place]].float()
    return (outputs * grad.float().unsqueeze(1)).sum(-1).to(weight.dtype)


def bias_gradient(change, bias, expert, needed):
    """The sum of each expert's rows, (S, ...) -> (E, ...), as a product: a scatter would add one row after the other."""
    if not needed:
        return None
    chosen = torch.nn.functional.one_hot(expert, len(bias)).to(change.dtype)
    return (chosen.T @ change).to(bias.dtype)
