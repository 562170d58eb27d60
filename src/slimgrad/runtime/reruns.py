"""Reruns: the ops that backward can run once more, what each of them reads, and where its node keeps that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from slimgrad.ops.fewbit import FewBit
from slimgrad.ops.grouped import Grouped
from slimgrad.runtime.views import RESHAPING, VIEWS, redone, seen_through, signed

Tensors = tuple[Any, ...]
Again = Callable[[Node, nn.Module | None, Tensors], Tensor]


@dataclass(frozen=True)
class Op:
    """How the op behind a node is run again."""

    reads: tuple[tuple[str | None, int | None], ...]
    """For each tensor it reads: the slot that may hold it, and the edge to what made it. A '?' ends the name of a slot
    that is empty where the op was given nothing."""
    again: Again
    result: str | None = None
    """The slot under which the node keeps what it made."""
    outside: Callable[[Node, nn.Module | None], Tensor | None] | None = None
    """A parameter that is read, but by no slot."""
    owners: tuple[type[nn.Module], ...] = ()
    """Modules alone in which it is known which parameter that is; anywhere if empty."""
    knows: Callable[[Node], bool] | None = None
    """Whether the node is what its name says, and tells which parameter that is."""
    witness: Callable[[Node, nn.Module | None], Tensor | None] | None = None
    """A tensor that changes with what is read, where kernels change that and leave its version as it is."""
    is_product: bool = False
    """Whether it multiplies matrices, which costs more than a pass or two over memory."""
    is_lossy: bool = False
    """Whether its node keeps a few bits, by which what it made comes out a little different."""


def _pointwise(
    function: Callable[..., Tensor], *names: str, slot: str | None = "self", result: str | None = None
) -> Op:
    def again(node: Node, module: nn.Module | None, tensors: Tensors) -> Tensor:
        return function(tensors[0], *[getattr(node, f"_saved_{name}") for name in names])

    return Op(((slot, 0),), again, result)


def _of_two(function: Callable[[Tensor, Tensor], Tensor], *slots: str | None) -> Op:
    return Op(tuple(zip(slots, (0, 1), strict=True)), lambda node, module, tensors: function(*tensors))


def _layer_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight, bias = tensors
    return torch.native_layer_norm(x, node._saved_normalized_shape, weight, bias, module.eps)[0]


def _group_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight = tensors
    sizes = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group
    return torch.native_group_norm(x, weight, norm_bias(node, module), *sizes, node._saved_eps)[0]


def _rms_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight = tensors
    return torch.rms_norm(x, node._saved_normalized_shape, weight, module.eps)


def _batch_norm(function: Callable[..., Any], eps: str) -> Again:
    def again(node: Any, module: Any, tensors: Tensors) -> Tensor:
        x, weight, mean, var = tensors
        training = node._saved_training
        moved = training and mean is not None  # they must not move twice; where there are none, dtypes may be others
        running = (mean.clone(), var.clone()) if moved else (mean, var)
        bias = norm_bias(node, module)
        made = function(x, weight, bias, *running, training, 0.0, getattr(node, f"_saved_{eps}"))
        return made[0]  # type: ignore[no-any-return]

    return again


def norm_bias(node: Node, module: nn.Module | None) -> Tensor | None:
    """The bias of a norm that does not save it; a frozen one is known to the module alone."""
    edge = node.next_functions[2][0]
    if edge is not None:
        return getattr(edge, "variable", None)
    bias = getattr(module, "bias", None)
    return None if bias is None or bias.requires_grad else bias  # a trained one would have an edge, if it were read


def _is_norm_bias_known(node: Node) -> bool:
    """An instance norm adds a bias that was repeated for each example, and is no parameter any more."""
    edge = node.next_functions[2][0]
    return edge is None or hasattr(edge, "variable")


def _batches_seen(node: Any, module: nn.Module | None) -> Tensor | None:
    """What batch norms count whenever they move the running statistics, which are read where they do not train."""
    return None if node._saved_training else getattr(module, "num_batches_tracked", None)


def _leaf_of(node: Node, edge: int) -> Tensor | None:
    """The parameter that enters a node there, through casts and views."""
    return getattr(seen_through(node.next_functions[edge][0], VIEWS | RESHAPING)[1], "variable", None)


def _entering(node: Node, edge: int) -> Tensor:
    """The same in the shape and dtype in which it came."""
    nodes, end = seen_through(node.next_functions[edge][0], VIEWS | RESHAPING)
    return redone(end.variable, nodes)  # type: ignore[union-attr] # `knows` looked


def added(node: Node, module: nn.Module | None) -> Tensor:
    """What `addmm` and `addcmul` add."""
    return _entering(node, 0)


def _leaf_added(node: Node, module: nn.Module | None) -> Tensor | None:
    return _leaf_of(node, 0)


def _is_added_known(node: Node) -> bool:
    return _leaf_of(node, 0) is not None


def _addmm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    return torch.addmm(added(node, module), *tensors, beta=node._saved_beta, alpha=node._saved_alpha)


def _addcmul(node: Any, module: Any, tensors: Tensors) -> Tensor:
    return torch.addcmul(added(node, module), *tensors, value=node._saved_value)


CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolution(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight = tensors
    bias = None if node.next_functions[2][0] is None else _entering(node, 2)
    how = [getattr(node, f"_saved_{name}") for name in CONVOLUTION]
    return torch.convolution(x, weight, bias, *how)


def _convolution_bias(node: Any, module: nn.Module | None) -> Tensor | None:
    return _leaf_of(node, 2)


def _is_convolution_bias_known(node: Any) -> bool:
    has_none = not any(node._saved_bias_sym_sizes_opt or ())  # (0,) where there is none
    return has_none or _convolution_bias(node, None) is not None


def _is_ours(kind: type[FewBit]) -> Callable[[Any], bool]:
    """Others may call a function of theirs so too."""
    return lambda node: getattr(node, "_forward_cls", None) is kind


def _grouped(node: Any, module: Any, tensors: Tensors) -> Tensor:
    return node.fusion.value(*node.saved_tensors)  # type: ignore[no-any-return]


def dropout_scale(p: float) -> float:
    """What is left of a tensor is multiplied with; nothing is left where p is 1."""
    return 1 / (1 - p) if p < 1 else 0.0


NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Modules of which it is known that `bias` is what they add. A convolution that normalizes its weights has one too,
which is zero at first: the first forward would not tell that it is another."""

BATCH_NORM = (("input", 0), ("weight?", 1), ("running_mean?", None), ("running_var?", None))

OPS: dict[str, Op] = {
    "ReluBackward0": _pointwise(torch.relu, slot=None, result="result"),
    "HardtanhBackward0": _pointwise(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _pointwise(F.leaky_relu, "negative_slope"),
    "HardsigmoidBackward0": _pointwise(F.hardsigmoid),
    "HardswishBackward0": _pointwise(F.hardswish),
    "GeluBackward0": Op((("self", 0),), lambda node, m, x: F.gelu(x[0], approximate=node._saved_approximate)),  # type: ignore[attr-defined]
    "SiluBackward0": _pointwise(F.silu),
    "MishBackward0": _pointwise(F.mish),
    "SoftplusBackward0": _pointwise(F.softplus, "beta", "threshold"),
    "SigmoidBackward0": _pointwise(torch.sigmoid, slot=None, result="result"),
    "TanhBackward0": _pointwise(torch.tanh, slot=None, result="result"),
    "GluBackward0": Op((("self", 0),), lambda node, m, x: F.glu(x[0], signed(node._saved_dim))),  # type: ignore[attr-defined]
    "AddBackward0": Op(((None, 0), (None, 1)), lambda node, m, x: torch.add(x[0], x[1], alpha=node._saved_alpha)),  # type: ignore[attr-defined]
    "SubBackward0": Op(((None, 0), (None, 1)), lambda node, m, x: torch.sub(x[0], x[1], alpha=node._saved_alpha)),  # type: ignore[attr-defined]
    "MulBackward0": _of_two(torch.mul, "self", "other"),
    "DivBackward0": _of_two(torch.div, "self", "other"),
    "NativeDropoutBackward0": Op(
        ((None, 0), ("result1", None)),
        lambda node, m, x: torch.ops.aten.native_dropout_backward(x[0], x[1], dropout_scale(node._saved_p)),  # type: ignore[attr-defined]
    ),
    "NativeLayerNormBackward0": Op((("input", 0), ("weight?", 1), ("bias?", 2)), _layer_norm),
    "FusedRmsNormBackward0": Op((("input", 0), ("weight?", 1)), _rms_norm),
    "NativeGroupNormBackward0": Op(
        (("input", 0), ("weight?", 1)), _group_norm, outside=norm_bias, owners=NORMS, knows=_is_norm_bias_known
    ),
    "NativeBatchNormBackward0": Op(
        BATCH_NORM,
        _batch_norm(torch.native_batch_norm, "eps"),
        outside=norm_bias,
        owners=NORMS,
        knows=_is_norm_bias_known,
        witness=_batches_seen,
    ),
    "CudnnBatchNormBackward0": Op(
        BATCH_NORM,
        _batch_norm(torch.cudnn_batch_norm, "epsilon"),
        outside=norm_bias,
        owners=NORMS,
        knows=_is_norm_bias_known,
        witness=_batches_seen,
    ),
    "FewBitBackward": Op(((None, 0),), lambda node, m, x: node.fusion.forward(x[0], None)[0], knows=_is_ours(FewBit)),  # type: ignore[attr-defined]
    "GroupedBackward": Op((), _grouped, knows=_is_ours(Grouped), is_lossy=True),
    "AddcmulBackward0": Op((("tensor1", 1), ("tensor2", 2)), _addcmul, outside=_leaf_added, knows=_is_added_known),
    "AddmmBackward0": Op(
        (("mat1", 1), ("mat2", 2)), _addmm, outside=_leaf_added, knows=_is_added_known, is_product=True
    ),
    "MmBackward0": Op((("self", 0), ("mat2", 1)), lambda node, m, x: torch.mm(*x), is_product=True),
    "BmmBackward0": Op((("self", 0), ("mat2", 1)), lambda node, m, x: torch.bmm(*x), is_product=True),
    "ConvolutionBackward0": Op(
        (("input", 0), ("weight", 1)),
        _convolution,
        outside=_convolution_bias,
        knows=_is_convolution_bias_known,
        is_product=True,
    ),
}
"""By their backward nodes. All but the products cost a pass or two over memory."""

PRODUCTS = frozenset(name for name, op in OPS.items() if op.is_product)

NEED_EPS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")
"""Their nodes do not know it; the module does, if it calls it so."""
