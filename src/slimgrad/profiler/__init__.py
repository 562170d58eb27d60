"""One step of a model: what autograd keeps, each storage counted once, and what keeping less does to gradients."""

from slimgrad.profiler.grad_error import grad_error
from slimgrad.profiler.profile import profile
from slimgrad.profiler.trady_rank import trady_rank

__all__ = ["grad_error", "profile", "trady_rank"]
