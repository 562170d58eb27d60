"""Tables of few-bit derivatives: the functions, the solver, the solved tables and where they are kept."""

from slimgrad.tables.functions import FAMILIES
from slimgrad.tables.table import Table, fewbit_table

__all__ = ["FAMILIES", "Table", "fewbit_table"]
