"""Ops that compute gradients from packed data directly: the fast roads beside codecs."""

from slimgrad.ops.fewbit import FewBitFunction, fewbit_function

__all__ = ["FewBitFunction", "fewbit_function"]
