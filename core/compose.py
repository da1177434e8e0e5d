"""From words such as `recipe=premium_chat scheduler=static` to a Recipe, by Hydra.

Beside the command lines this is the only module that imports hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from core.interfaces.plugin import SEAMS, Options
from core.models.source import spec_from_word
from core.names import near
from core.recipe import EngineConfig, MemoryConfig, Recipe, RecipeError, ServerConfig
from core.registry import PartError, Registry
from core.twins import TWINS

CONFIG_MODULE = "recipes"


def compose(recipe: str = "premium_chat", overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with the overrides of a command line applied. RecipeError: an unknown part, key or value."""
    return compose_words([f"recipe={recipe}", *overrides])


def compose_words(words: Sequence[str]) -> Recipe:
    """A Recipe from a whole command line, `recipe=NAME` among its words (premium_chat without one)."""
    words = [_group_form(word) for word in words]
    given = _parse(words)
    registry = Registry(given.get("plugin_path"))
    register(registry)
    asked = given.get("model")
    model = spec_from_word(asked) if isinstance(asked, str) else asked if isinstance(asked, dict) else None
    if model is not None:
        words = [word for word in words if word.split("=", 1)[0] != "model"]
    data = _compose(words, registry)
    if model is not None:
        data["model"] = model
    return to_recipe(data, str(given.get("recipe", "premium_chat")))


def register(registry: Registry) -> None:
    """Make every part an option of its Hydra group, with its options' defaults as keys."""
    store = ConfigStore.instance()
    store.store("settings", settings())
    for found in registry.all:
        if found.problem:
            continue
        try:
            options = registry.info(found.seam, found.name).options
        except PartError:
            continue  # an error only for a recipe that names it; see `_explain`
        twin = {"books_only": False} if found.seam in TWINS else {}
        node = {"name": found.name, "otherwise": None, **twin, **_defaults(options)}
        store.store(found.name, node, group=found.seam.replace(".", "/"), provider=found.distribution)


def settings() -> dict[str, Any]:
    """The keys of a recipe that are not parts, with their defaults."""
    return {
        "memory": MemoryConfig().model_dump(),
        "engine": EngineConfig().model_dump(),
        "server": ServerConfig().model_dump(),
        "observers": [],
        "plugin_path": None,
    }


def to_recipe(data: Mapping[str, Any] | DictConfig, name: str) -> Recipe:
    """Validate what Hydra composed. RecipeError names each key at fault."""
    if isinstance(data, DictConfig):
        data = OmegaConf.to_container(data, resolve=True)  # type: ignore[assignment]
    try:
        return Recipe.model_validate({**data, "name": name})
    except ValidationError as error:
        raise RecipeError("; ".join(_problem(item) for item in error.errors())) from None


def _problem(item: Any) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] != "string_type":
        return f"{key}: {item['msg']} (given: {item['input']!r})"
    # may be a secret, so it is not repeated
    return f"{key} must be a text, not {type(item['input']).__name__}; quote it, in a shell as {key}=\"'...'\""


def _compose(words: Sequence[str], registry: Registry) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra_compose("config", overrides=list(words))
            return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError(_explain(error, words, registry)) from None


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Key to value of each override. RecipeError: one that cannot be read, or a key given twice."""
    parsed: dict[str, Any] = {}
    parser = OverridesParser.create()
    for word in words:
        try:
            override = parser.parse_override(word)
            value = override.value() if not override.is_sweep_override() else None
        except HydraException as error:
            raise RecipeError(
                f"cannot read {word!r}: {' '.join(str(error).split())}\n"
                "quote a value with special characters as key='\"a,b=c\"' in a shell, or 'key=\"a,b=c\"' in Python"
            ) from None
        key = override.get_key_element().lstrip("+~")
        if not key:
            raise RecipeError(f"cannot read {word!r}: there is no key before the =")
        if key.partition(".")[0] == "hydra":
            raise RecipeError(f"there is no key {key!r}: Hydra composes the recipe, and its own settings are not used")
        if key in parsed:
            raise RecipeError(f"{key} is given twice; the last would win silently, so give it once")
        parsed[key] = value if isinstance(value, (str, int, float, bool, dict, list)) or value is None else str(value)
    return parsed


def _group_form(word: str) -> str:
    """`attention.kernel=sdpa` means the group attention/kernel."""
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if equals and bare in SEAMS and not value.startswith("{"):
        return key.replace(".", "/") + "=" + value
    return word


def _explain(error: Exception, words: Sequence[str], registry: Registry) -> str:
    """Hydra's message, with near names, and the real reason where a part's card did not load."""
    text = " ".join(str(error).split())
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        seam = key.replace("/", ".")
        if seam in SEAMS and value:
            try:
                registry.info(seam, value)
            except PartError as problem:
                return str(problem)
        if key in ("recipe", "model") and f"{key}/{value}" in text:
            return f"there is no {key} named {value!r}{near(value, _choices(key))}"
        if f"Could not override '{key}'" in text:
            slots = [slot for slot in SEAMS if slot.startswith(f"{key}.")]
            if slots:
                return f"{key} is not one slot; set {' or '.join(slots)}"
            parent, _, leaf = key.rpartition(".")
            return f"there is no key {key!r}{near(leaf, _keys(parent, [w for w in words if w != word]))}"
    return text


def _choices(group: str) -> list[str]:
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return list(GlobalHydra.instance().config_loader().get_group_options(group))


def _keys(parent: str, words: Sequence[str]) -> list[str]:
    chosen = [word for word in words if re.fullmatch(r"[\w/]+=[\w.-]+", word) and not word.startswith("+")]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = hydra_compose("config", overrides=[w for w in chosen if "." not in w.split("=")[0]])
    except (HydraException, OmegaConfBaseException):
        return []
    node = OmegaConf.select(config, parent) if parent else config
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _defaults(options: type[Options]) -> dict[str, Any]:
    values = {}
    for key, info in options.model_fields.items():
        default = info.get_default(call_default_factory=True)
        values[key] = "???" if default is PydanticUndefined else default
    return values
