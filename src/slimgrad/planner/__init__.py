"""From a profile and a budget to a plan, and from a plan to a model that fits."""

from slimgrad.planner.calibration import Calibration
from slimgrad.planner.fitting import Fitted, fit
from slimgrad.planner.frontier import Frontier, frontier
from slimgrad.planner.largest import MaxBatch, max_batch
from slimgrad.planner.plan import Action, Plan
from slimgrad.planner.planning import plan
from slimgrad.planner.sensitivity import Sensitivity, sensitivity
from slimgrad.planner.timing import calibrate

__all__ = [
    "Action",
    "Calibration",
    "Fitted",
    "Frontier",
    "MaxBatch",
    "Plan",
    "Sensitivity",
    "calibrate",
    "fit",
    "frontier",
    "max_batch",
    "plan",
    "sensitivity",
]
