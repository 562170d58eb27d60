"""The plain values that travel between the rooms. Nothing here touches a device."""

from slimgrad.spec.grad_error import GradError, ParameterError
from slimgrad.spec.profile import Profile
from slimgrad.spec.report import Report, SiteReport
from slimgrad.spec.sites import NO_SITE, OUTSIDE, Need, Site, Storage
from slimgrad.spec.values import Value

__all__ = [
    "NO_SITE",
    "OUTSIDE",
    "GradError",
    "Need",
    "ParameterError",
    "Profile",
    "Report",
    "Site",
    "SiteReport",
    "Storage",
    "Value",
]
