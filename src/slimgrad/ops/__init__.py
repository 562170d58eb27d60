"""Ops that compute gradients from packed data directly: the fast roads beside codecs."""

from slimgrad.ops.fewbit import FewBitFunction, fewbit_function
from slimgrad.ops.gated import GatedFunction, gated_function

__all__ = ["FewBitFunction", "GatedFunction", "fewbit_function", "gated_function"]
