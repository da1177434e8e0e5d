"""What a million tokens cost, from a price an hour: the user's own, or the planner's dated catalogue."""

from __future__ import annotations

from core.lab.errors import UsageError
from core.lab.plan import Price
from core.plan.catalogue import load_device
from core.plan.errors import PlanError


def per_million(price: Price, tokens_per_s: float) -> float:
    """Dollars for a million tokens at a steady rate."""
    return price.usd_per_hour / 3600 / tokens_per_s * 1e6


def price_of(gpu: str) -> Price:
    """The catalogue's price of a GPU, with its provider and date. UsageError when it has none."""
    try:
        found = load_device(gpu).price()
    except PlanError as error:
        raise UsageError(str(error)) from None
    if found is None:
        raise UsageError(f"the catalogue has no dated price for {gpu}: give your own with price=DOLLARS_PER_HOUR.")
    return Price(usd_per_hour=found.usd_per_hour, source=f"{gpu}: {found.label()}, seen at {found.source}")
