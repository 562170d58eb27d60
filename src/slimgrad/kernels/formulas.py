"""Functions in Triton that more than one kernel computes, in float32."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.halves import exp2, inverse

FAR = tl.constexpr(16.0)
"""Beyond this the normal distribution's tail is zero in float32, and infinities do no harm."""


@triton.jit
def logistic(x, NATIVE: tl.constexpr):
    return inverse(1.0 + exp2(x * -1.4426950408889634, NATIVE), NATIVE)


@triton.jit
def normal_tail(size, NATIVE: tl.constexpr):
    """Q(size), the normal distribution's upper tail, for a size in [0, FAR].

    log2(Q) is nearly a polynomial: this one, fitted by least squares with weights that even out the error, is off by
    1.6e-6 of Q at most where Q is above 3e-8, and by 1e-11 beyond. Kernels that pack groups let nothing be fused that
    does not say so.
    """
    log_tail = tl.fma(size, -6.59019153e-07, 4.43529988e-05)
    log_tail = tl.fma(log_tail, size, -8.32325643e-04)
    log_tail = tl.fma(log_tail, size, 8.23479223e-03)
    log_tail = tl.fma(log_tail, size, -5.35780501e-02)
    log_tail = tl.fma(log_tail, size, -4.58711477e-01)
    log_tail = tl.fma(log_tail, size, -1.15119412e00)
    log_tail = tl.fma(log_tail, size, -9.99997025e-01)
    return exp2(log_tail, NATIVE)


@triton.jit
def _gelu(x, NATIVE: tl.constexpr):
    """max(x, 0) - |x| Q(|x|): 11 instructions, which memory hides, where erf takes 25 and does not; and below zero it
    loses none of the digits that 1 + erf does.
    """
    size = tl.minimum(tl.abs(x), FAR)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * normal_tail(size, NATIVE)


@triton.jit
def value_of(x, FUNCTION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """f(x) in float32."""
    if FUNCTION == "gelu" and PRECISE:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu":
        y = _gelu(x, NATIVE)
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2u
        y = x * logistic(x * (1.5957691216057308 + 0.07135481282724548 * x * x), NATIVE)
    elif FUNCTION == "silu":
        y = x * logistic(x, NATIVE)
    elif FUNCTION == "quick_gelu":
        y = x * logistic(1.702 * x, NATIVE)
    elif FUNCTION == "sigmoid":
        y = logistic(x, NATIVE)
    elif FUNCTION == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif FUNCTION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(FUNCTION == "mish", "a name in FUSED that has no formula here")
        e = exp2(tl.minimum(x, 20.0) * 1.4426950408889634, NATIVE)  # tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2)
        e = e * (e + 2.0)
        y = x * (e * inverse(e + 2.0, NATIVE))
    return y


@triton.jit
def _density(x, NATIVE: tl.constexpr):
    """Of the normal distribution."""
    return 0.3989422804014327 * exp2(x * x * -0.7213475204444817, NATIVE)


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """f(x) and f'(x) in float32. What a kernel does not use, the compiler leaves out."""
    if FUNCTION == "gelu" and PRECISE:
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * below
        slope = below + x * _density(x, NATIVE)
    elif FUNCTION == "gelu":  # by |x|, so that below zero no digits get lost
        size = tl.minimum(tl.abs(x), FAR, propagate_nan=tl.PropagateNan.ALL)
        tail = normal_tail(size, NATIVE)
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
        negative = tail - size * _density(size, NATIVE)
        slope = tl.where(x > 0.0, 1.0 - negative, negative)
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2u
        s = logistic(x * (1.5957691216057308 + 0.07135481282724548 * x * x), NATIVE)
        value = x * s
        slope = s + value * (1.0 - s) * (1.5957691216057308 + 0.21406443848173644 * x * x)
    elif FUNCTION == "sigmoid":
        value = logistic(x, NATIVE)
        slope = value * (1.0 - value)
    else:
        tl.static_assert(FUNCTION == "silu" or FUNCTION == "quick_gelu", "a function that has no formula here")
        SCALE: tl.constexpr = 1.702 if FUNCTION == "quick_gelu" else 1.0
        s = logistic(SCALE * x, NATIVE)
        value = x * s
        slope = s + SCALE * value * (1.0 - s)
    return value, slope


@triton.jit
def slope_of(x, FUNCTION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """f'(x) in float32, by the name that DERIVATIVES in chains.py has for it."""
    OF: tl.constexpr = "gelu" if FUNCTION == "d_gelu" else "gelu_tanh" if FUNCTION == "d_gelu_tanh" else "silu"
    tl.static_assert(OF != "silu" or FUNCTION == "d_silu", "a derivative that has no formula here")
    _, slope = value_and_slope(x, OF, PRECISE, NATIVE)
    return slope
