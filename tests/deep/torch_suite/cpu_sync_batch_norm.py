"""`SyncBatchNorm` on the CPU: torch has the functions below for accelerators only."""

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm


def _dims(tensor):
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _wide(channels, like):
    return channels.view(1, -1, *[1] * (like.dim() - 2))


def _stats(x, eps):
    x = x.float()
    variance = x.var(_dims(x), unbiased=False)
    return x.mean(_dims(x)), (variance + eps).rsqrt()


def _gather_stats(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    counts = counts.view(-1, 1)
    count = counts.sum()
    total = (mean * counts).sum(0) / count
    squares = ((invstd.pow(-2) - eps + (mean - total).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(total.to(running_mean.dtype), momentum)
        running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return total, (squares / count + eps).rsqrt()


def _elemt(x, weight, bias, mean, invstd, eps):
    y = (x.float() - _wide(mean, x)) * _wide(invstd, x)
    if weight is not None:
        y = y * _wide(weight, x) + _wide(bias, x)
    return y.to(x.dtype)


def _backward_reduce(gradient, x, mean, invstd, weight, *needs):
    gradient = gradient.float()
    centred = x.float() - _wide(mean, x)
    sum_dy = gradient.sum(_dims(x))
    sum_dy_xmu = (gradient * centred).sum(_dims(x))
    dtype = x.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def _backward_elemt(gradient, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    count = count.sum()
    centred = x.float() - _wide(mean, x)
    projected = centred * _wide(invstd.square() * sum_dy_xmu / count, x)
    result = (gradient.float() - _wide(sum_dy / count, x) - projected) * _wide(invstd, x)
    if weight is not None:
        result = result * _wide(weight, x)
    return result.to(x.dtype)


def install(ddp):
    """In this process, for good. torch's class `ddp` no longer refuses it."""
    torch.batch_norm_stats = _stats
    torch.batch_norm_gather_stats_with_counts = _gather_stats
    torch.batch_norm_elemt = _elemt
    torch.batch_norm_backward_reduce = _backward_reduce
    torch.batch_norm_backward_elemt = _backward_elemt
    forward, name_of = SyncBatchNorm.forward, torch._C._get_privateuse1_backend_name

    def on_cpu(self, x):
        torch._C._get_privateuse1_backend_name = lambda: "cpu"  # counts as an accelerator
        try:
            return forward(self, x)
        finally:
            torch._C._get_privateuse1_backend_name = name_of

    SyncBatchNorm.forward = on_cpu
    ddp._passing_sync_batchnorm_handle = lambda self, module: None  # refuses the CPU
