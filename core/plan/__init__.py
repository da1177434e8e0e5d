"""The capacity planner: which device, how many users, how long a context, at what price.

It is arithmetic over a model's shape, a device's data sheet and a recipe; it needs no torch and no engine.
"""

from core.plan.catalogue import Device, Price, known_devices, known_models, load_device, load_model, own_price
from core.plan.errors import PlanError
from core.plan.figures import Figure
from core.plan.latency import Efficiency, Load, Roofline, Step
from core.plan.memory import Memory, plan_memory
from core.plan.models import Model
from core.plan.plan import Plan, Ranked, make_plan, rank
from core.plan.recipe import Recipe, Speculation, load_recipe

__all__ = [
    "Device", "Efficiency", "Figure", "Load", "Memory", "Model", "Plan", "PlanError", "Price", "Ranked",
    "Recipe", "Roofline", "Speculation", "Step", "known_devices", "known_models", "load_device", "load_model",
    "load_recipe", "make_plan", "own_price", "plan_memory", "rank",
]  # fmt: skip
