"""One step of a model -> Profile: what autograd keeps, by whom, each storage counted once."""

from slimgrad.profiler.profile import profile

__all__ = ["profile"]
