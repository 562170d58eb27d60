"""TraDy: transfer learning under a strict memory budget. recipe.py says what there is to say to it, controller.py does
it, with costs, draws, rankings and weights in a file each."""

from slimgrad.recipes.trady.choice import ChannelChoice
from slimgrad.recipes.trady.ranking import LayerRank, Ranking
from slimgrad.recipes.trady.recipe import Trady, trady

__all__ = ["ChannelChoice", "LayerRank", "Ranking", "Trady", "trady"]
