"""What each backward slot needs: one table, (node, slot) -> need. Anything not listed is EXACT.

A row may depend on the node: a convolution's input serves the weight's gradient only (OPERAND), is never read when the
weight is frozen (NOTHING), and serves a gradient that flows on (VALUES) when the weight is computed, not a parameter.
tests/runtime/test_needs.py feeds every NOTHING, MASK and INDEX row a reconstruction and asks for bit-equal gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from slimgrad.runtime.views import leaf_behind
from slimgrad.spec import Need


@dataclass(frozen=True)
class Answer:
    """What a slot needs; `fn` and `detail` say which function and with which constants."""

    need: Need
    fn: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    sibling: str | None = None
    """Another slot of the same node whose shape is needed too."""
    once: bool = False
    """Whether this serves first-order gradients only."""


EXACT = Answer(Need.EXACT)
VALUES = Answer(Need.VALUES)
NOTHING = Answer(Need.NOTHING)
WEIGHT = Answer(Need.WEIGHT)
OPERAND = Answer(Need.OPERAND)
BOOL = Answer(Need.MASK, "bool")

Row = Answer | Callable[[Node], Answer]


def constants(node: Node, *names: str) -> dict[str, Any]:
    """The node's own constants by name."""
    return {name: getattr(node, f"_saved_{name}") for name in names}


# --- rows that depend on the node -----------------------------------------------------------------------------------


def operand_of(partner: int) -> Callable[[Node], Answer]:
    """A factor of a product that is read only for the gradient of input number `partner`."""

    def row(node: Node) -> Answer:
        edge = node.next_functions[partner][0]
        if edge is None:
            return NOTHING
        return OPERAND if leaf_behind(edge) is not None else VALUES

    return row


def mask(fn: str, *names: str) -> Callable[[Node], Answer]:
    return lambda node: Answer(Need.MASK, fn, constants(node, *names))


def derivative(fn: str, *names: str) -> Callable[[Node], Answer]:
    return lambda node: Answer(Need.DERIVATIVE, fn, constants(node, *names))


def derivative_by_result(fn: str, *names: str) -> Callable[[Node], Answer]:
    """The node keeps f(x) and finds f' from it."""
    return lambda node: Answer(Need.DERIVATIVE, fn, {**constants(node, *names), "saved": "result"})


def batch_norm_input(node: Node) -> Answer:
    """In eval mode dX = dY * weight / std: the input is read for the weight's gradient only."""
    frozen = node.next_functions[1][0] is None
    return NOTHING if frozen and not node._saved_training else VALUES  # type: ignore[attr-defined]


def prelu_input(node: Node) -> Answer:
    """dX needs x > 0, its own gradient x >= 0; the slope's gradient needs x."""
    return Answer(Need.MASK, "leaky_relu", once=True) if node.next_functions[1][0] is None else VALUES


def rrelu_input(node: Node) -> Answer:
    """In eval mode this is LeakyReLU; in training the noise holds the slopes, ones included, and x is not read."""
    return NOTHING if node._saved_training else Answer(Need.MASK, "leaky_relu")  # type: ignore[attr-defined]


def window_index(node: Node) -> Answer:
    detail = constants(node, "kernel_size", "stride", "padding", "dilation")
    detail["stride"] = detail["stride"] or detail["kernel_size"]
    return Answer(Need.INDEX, "window", detail, sibling="self")


ELU = ("alpha", "scale", "input_scale")
PLANE_INDEX = Answer(Need.INDEX, "plane", sibling="self")


def _values(*slots: str) -> dict[str, Row]:
    return dict.fromkeys(slots, VALUES)


SDPA: dict[str, Row] = _values("query", "key", "value", "output")
"""A bias stays exact: it is often a mask of -inf."""
LOSS: dict[str, Row] = _values("self", "target")
CONVOLUTION: dict[str, Row] = {"input": operand_of(1), "weight": operand_of(0)}
BACKEND_CONVOLUTION: dict[str, Row] = {"self": operand_of(1), "weight": operand_of(0)}

TABLE: dict[str, dict[str, Row]] = {
    # products
    "AddmmBackward0": {"mat1": operand_of(2), "mat2": operand_of(1)},
    "MmBackward0": {"self": operand_of(1), "mat2": operand_of(0)},
    "BmmBackward0": {"self": operand_of(1), "mat2": operand_of(0)},
    "BaddbmmBackward0": {"batch1": operand_of(2), "batch2": operand_of(1)},
    "AddbmmBackward0": {"batch1": operand_of(2), "batch2": operand_of(1)},
    "LinearBackward0": {"input": operand_of(1), "weight": operand_of(0)},
    "MvBackward0": {"self": operand_of(1), "vec": operand_of(0)},
    "AddmvBackward0": {"mat": operand_of(2), "vec": operand_of(1)},
    "DotBackward0": {"self": operand_of(1), "tensor": operand_of(0)},
    "TrilinearBackward0": _values("i1", "i2", "i3"),
    "ConvolutionBackward0": CONVOLUTION,
    "ConvolutionBackward1": CONVOLUTION,
    "MkldnnConvolutionBackward0": BACKEND_CONVOLUTION,
    "CudnnConvolutionBackward0": BACKEND_CONVOLUTION,
    "ConvTbcBackward0": {"self": VALUES, "weight": VALUES},
    # functions whose backward reads one bit
    "ReluBackward0": {"result": mask("relu")},
    "LeakyReluBackward0": {"self": mask("leaky_relu")},
    "LeakyReluBackward1": {"result": mask("leaky_relu")},
    "ThresholdBackward0": {"self": mask("threshold", "threshold")},
    "ThresholdBackward1": {"self": mask("threshold", "threshold")},
    "HardtanhBackward0": {"self": mask("hardtanh", "min_val", "max_val")},
    "HardsigmoidBackward0": {"self": mask("hardsigmoid")},
    "HardshrinkBackward0": {"self": mask("shrink", "lambd")},
    "SoftshrinkBackward0": {"self": mask("shrink", "lambd")},
    "PreluKernelBackward0": {"self": prelu_input, "weight": VALUES},
    "RreluWithNoiseBackward0": {"self": rrelu_input},
    "ClampBackward1": {"self": mask("clamp", "min", "max")},
    "ClampMinBackward0": {"self": mask("clamp", "min")},
    "ClampMaxBackward0": {"self": mask("clamp", "max")},
    "NativeDropoutBackward0": {"result1": BOOL},
    "WhereBackward0": {"condition": BOOL},
    "MaskedFillBackward0": {"mask": BOOL},
    "MaskedFillBackward1": {"mask": BOOL},
    "MaskedSelectBackward0": {"mask": BOOL, "self": NOTHING},
    "MaskedScatterBackward0": {"mask": BOOL},
    # functions whose backward reads f'(x)
    "GeluBackward0": {"self": derivative("gelu", "approximate")},
    "SiluBackward0": {"self": derivative("silu")},
    "MishBackward0": {"self": derivative("mish")},
    "HardswishBackward0": {"self": derivative("hardswish")},
    "SoftplusBackward0": {"self": derivative("softplus", "beta", "threshold")},
    "EluBackward0": {"self": derivative("elu", *ELU)},
    "EluBackward1": {"result": derivative_by_result("elu", *ELU)},
    "CeluBackward0": {"self": derivative("celu", "alpha")},
    "CeluBackward1": {"result": derivative_by_result("celu", "alpha")},
    "LogSigmoidBackward0": {"self": derivative("logsigmoid"), "buffer": VALUES},
    "SigmoidBackward0": {"result": derivative_by_result("sigmoid")},
    "TanhBackward0": {"result": derivative_by_result("tanh")},
    "GluBackward0": {"self": VALUES},
    # pooling
    "MaxPool2DWithIndicesBackward0": {"self": NOTHING, "result1": window_index},
    "MaxPool3DWithIndicesBackward0": {"self": NOTHING, "result1": window_index},
    "AdaptiveMaxPool2DBackward0": {"self": NOTHING, "result1": PLANE_INDEX},
    "AdaptiveMaxPool3DBackward0": {"self": NOTHING, "result1": PLANE_INDEX},
    "FractionalMaxPool2DBackward0": {"self": NOTHING, "result1": PLANE_INDEX},
    "FractionalMaxPool3DBackward0": {"self": NOTHING, "result1": PLANE_INDEX},
    "AvgPool2DBackward0": {"self": NOTHING},
    "AvgPool3DBackward0": {"self": NOTHING},
    "AdaptiveAvgPool2DBackward0": {"self": NOTHING},
    "AdaptiveAvgPool3DBackward0": {"self": NOTHING},
    # padding
    "ReflectionPad1DBackward0": {"self": NOTHING},
    "ReflectionPad2DBackward0": {"self": NOTHING},
    "ReflectionPad3DBackward0": {"self": NOTHING},
    "ReplicationPad1DBackward0": {"self": NOTHING},
    "ReplicationPad2DBackward0": {"self": NOTHING},
    "ReplicationPad3DBackward0": {"self": NOTHING},
    # norms: statistics stay exact
    "NativeBatchNormBackward0": {"input": batch_norm_input},
    "CudnnBatchNormBackward0": {"input": batch_norm_input},
    "MiopenBatchNormBackward0": {"input": VALUES},
    "NativeLayerNormBackward0": {"input": VALUES},
    "NativeGroupNormBackward0": {"input": VALUES},
    "FusedRmsNormBackward0": {"input": VALUES},
    "LinalgVectorNormBackward0": {"self": VALUES},
    "NormBackward0": {"self": VALUES},
    "NormBackward1": {"self": VALUES},
    # softmax and attention: log-sum-exp, seeds and offsets stay exact
    "SoftmaxBackward0": {"result": VALUES},
    "LogSoftmaxBackward0": {"result": VALUES},
    "SafeSoftmaxBackward0": {"result": VALUES},
    "LogsumexpBackward0": {"self": VALUES},
    "ScaledDotProductFlashAttentionBackward0": SDPA,
    "ScaledDotProductFlashAttentionForCpuBackward0": SDPA,
    "ScaledDotProductEfficientAttentionBackward0": SDPA,
    "ScaledDotProductCudnnAttentionBackward0": SDPA,
    "ScaledDotProductFusedAttentionOverrideableBackward0": SDPA,
    # losses
    "NllLossBackward0": {"self": NOTHING},
    "NllLoss2DBackward0": {"self": NOTHING},
    "MseLossBackward0": LOSS,
    "SmoothL1LossBackward0": LOSS,
    "HuberLossBackward0": LOSS,
    "BinaryCrossEntropyBackward0": LOSS,
    "BinaryCrossEntropyWithLogitsBackward0": LOSS,
    "SoftMarginLossBackward0": LOSS,
    "MultiMarginLossBackward0": {"self": VALUES},
    "MultilabelMarginLossBackward0": {"self": VALUES},
    # elementwise products and powers
    "MulBackward0": _values("self", "other"),
    "DivBackward0": _values("self", "other"),
    "PowBackward0": {"self": VALUES},
    "PowBackward1": _values("self", "exponent", "result"),
    "PowBackward2": _values("exponent", "result"),
    "ExpBackward0": {"result": VALUES},
    "Exp2Backward0": {"result": VALUES},
    "Expm1Backward0": {"result": VALUES},
    "LogBackward0": {"self": VALUES},
    "Log1PBackward0": {"self": VALUES},
    "SqrtBackward0": {"result": VALUES},
    "RsqrtBackward0": {"result": VALUES},
    "ReciprocalBackward0": {"result": VALUES},
    "AbsBackward0": {"self": VALUES},
    "SinBackward0": {"self": VALUES},
    "CosBackward0": {"self": VALUES},
    "ErfBackward0": {"self": VALUES},
    "LerpBackward1": _values("self", "end", "weight"),
    "AddcmulBackward0": _values("tensor1", "tensor2"),
    "AddcdivBackward0": _values("tensor1", "tensor2"),
    # indexing: the indices stay exact, the indexed tensor is read for its shape only
    "GatherBackward0": {"self": NOTHING},
    "TakeBackward0": {"self": NOTHING},
    "CummaxBackward0": {"self": NOTHING},
    "CumminBackward0": {"self": NOTHING},
    "IndexAddBackward0": {"source": NOTHING},
    "IndexCopyBackward0": {"source": NOTHING},
    "GridSampler2DBackward0": {"input": VALUES},
    "GridSampler3DBackward0": {"input": VALUES},
}


def answer(node: Node, slot: str) -> Answer:
    """What `slot` of `node` needs."""
    rows = TABLE.get(node.name())
    if rows is None:
        return EXACT
    row = rows.get(slot, EXACT)
    return row if isinstance(row, Answer) else row(node)


CHECKPOINT = "checkpoint"
"""Stands for the node by which torch.utils.checkpoint (use_reentrant=False) saves the inputs of a region. They are read
while some node of the region runs, and the region is run again from them: they are VALUES."""

DROPOUTS = (nn.Dropout,)
"""Modules whose forward is exactly F.dropout, so that on a CPU the factor they multiply by is zeros and 1/(1-p)."""

DROPOUT_MASK = Answer(Need.MASK, "dropout")


def answer_in_module(node: Node, slot: str, module: nn.Module | None, device_type: str) -> Answer:
    """As `answer`, with what only module and device can tell.

    The CPU's dropout is a plain product with its mask. Its log-sigmoid finds f' from a buffer of its own and reads x
    for the sign, so that another x with the right f' will not do.
    """
    if device_type == "cpu" and slot == "self" and node.name() == "LogSigmoidBackward0":
        return VALUES
    if device_type == "cpu" and slot == "other" and type(module) in DROPOUTS and node.name() == "MulBackward0":
        return DROPOUT_MASK
    return answer(node, slot)
