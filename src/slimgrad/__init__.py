"""slimgrad: train bigger models on the memory you have, by keeping less between forward and backward."""

from slimgrad.codecs import Blocks, Bounded, Channels, Codec, FewBit, Keep, Lossless, Packed, Quant, TopK
from slimgrad.errors import (
    BatchError,
    DoubleBackwardError,
    RuleError,
    SavedTensorModifiedError,
    SiteChangedError,
    SlimgradError,
    SlimgradWarning,
    SpecError,
    UnsupportedModelError,
)
from slimgrad.ops import FewBitFunction, GatedFunction, fewbit_function, gated_function
from slimgrad.profiler import grad_error, profile, trady_rank
from slimgrad.recipes import (
    BlockPruning,
    ChannelChoice,
    Comet,
    DropIT,
    LayerRank,
    Ranking,
    Trady,
    block_pruning,
    comet,
    dropit,
    fewbit,
    trady,
)
from slimgrad.rules import Rule
from slimgrad.runtime.run import Run, apply
from slimgrad.spec import GradError, Need, ParameterError, Profile, Report, Site, Storage
from slimgrad.tables import Table, fewbit_table

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BlockPruning",
    "Blocks",
    "Bounded",
    "ChannelChoice",
    "Channels",
    "Codec",
    "Comet",
    "DoubleBackwardError",
    "DropIT",
    "FewBit",
    "FewBitFunction",
    "GatedFunction",
    "GradError",
    "Keep",
    "LayerRank",
    "Lossless",
    "Need",
    "Packed",
    "ParameterError",
    "Profile",
    "Quant",
    "Ranking",
    "Report",
    "Rule",
    "RuleError",
    "Run",
    "SavedTensorModifiedError",
    "Site",
    "SiteChangedError",
    "SlimgradError",
    "SlimgradWarning",
    "SpecError",
    "Storage",
    "Table",
    "TopK",
    "Trady",
    "UnsupportedModelError",
    "apply",
    "block_pruning",
    "comet",
    "dropit",
    "fewbit",
    "fewbit_function",
    "fewbit_table",
    "gated_function",
    "grad_error",
    "profile",
    "trady",
    "trady_rank",
]
