"""One step of a model: what autograd keeps, each storage counted once, and what keeping less does to gradients."""

from slimgrad.profiler.grad_error import grad_error
from slimgrad.profiler.profile import profile

__all__ = ["grad_error", "profile"]
