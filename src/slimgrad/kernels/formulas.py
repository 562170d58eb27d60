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
    1.6e-6 of Q at most where Q is above 3e-8, and by 1e-11 beyond.
    """
    log_tail = -6.59019153e-07 * size + 4.43529988e-05
    log_tail = log_tail * size - 8.32325643e-04
    log_tail = log_tail * size + 8.23479223e-03
    log_tail = log_tail * size - 5.35780501e-02
    log_tail = log_tail * size - 4.58711477e-01
    log_tail = log_tail * size - 1.15119412e00
    log_tail = log_tail * size - 9.99997025e-01
    return exp2(log_tail, NATIVE)
