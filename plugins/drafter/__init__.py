"""Cards of the drafters."""

from pydantic import PositiveInt, model_validator

from core.interfaces.drafter import DrafterOptions
from core.interfaces.plugin import PluginInfo


class NgramOptions(DrafterOptions):
    """`n_max` and `n_min`: the longest and the shortest run of last tokens that is looked for, longest first."""

    n_max: PositiveInt = 4
    n_min: PositiveInt = 2

    @model_validator(mode="after")
    def _ordered(self) -> "NgramOptions":
        if self.n_min > self.n_max:
            raise ValueError(f"n_min ({self.n_min}) must not be more than n_max ({self.n_max})")
        return self


NONE = PluginInfo(
    name="none",
    seam="drafter",
    part="plugins.drafter.none:NoDrafter",
    options=DrafterOptions,
    provides=frozenset({"lossless"}),
    summary="One token a step",
)

NGRAM = PluginInfo(
    name="ngram",
    seam="drafter",
    part="plugins.drafter.ngram:NgramDrafter",
    options=NgramOptions,
    provides=frozenset({"lossless"}),
    summary="Looks its last tokens up in what came before, and tries what followed then",
)
