"""verl's whole configuration from agl's overrides, as verl's own entry point would read it.

Only verl's YAML files are read, found without an import of verl, so that a wrong setting is told in half a second.
Hydra is imported late.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_runtime.errors import ConfigError, PreconditionError

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENGINE = "model_engine"
CONFIG_FILE = "ppo_trainer"


def compose(values: Mapping[str, Any]) -> DictConfig:
    """verl's files with `values` (dotted keys, `settings.overrides`) over them. Raises ConfigError for what they do not
    fit (`faults`), PreconditionError where verl is not installed."""
    try:
        import hydra
        from omegaconf import OmegaConf
    except ModuleNotFoundError as error:
        raise missing(str(error.name)) from error
    folder = config_folder()
    engines = sorted(file.stem for file in (folder / ENGINE).glob("*.yaml"))
    if (engine := values.get(ENGINE, "dp")) not in engines:
        raise ConfigError(f"train.verl sets {ENGINE} to {engine!r}.", f"Use one of {', '.join(engines)}.")
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose(CONFIG_FILE, [f"{ENGINE}={engine}"])
    chosen = {key: value for key, value in values.items() if key != ENGINE}
    known = OmegaConf.to_container(config)
    if found := faults(chosen, known if isinstance(known, dict) else {}):
        raise ConfigError(f"train.verl sets {', and '.join(found)}.", "Correct it, or put a + before a name to add it.")
    for key, value in chosen.items():
        OmegaConf.update(config, key.lstrip("+"), value, merge=False, force_add=True)
    return config


def config_folder() -> Path:
    """Of verl's own YAML files. Raises PreconditionError."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise missing("verl")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def missing(package: str) -> PreconditionError:
    return PreconditionError(
        f"The verl backend needs the package {package}, which is not installed here.",
        "Run `make setup-verl`, or install agl with its extra: `pip install 'agl[verl]'`.",
    )


def faults(values: Mapping[str, Any], known: Mapping[Any, Any]) -> list[str]:
    """What of `values` (dotted keys) does not fit verl's files, each in words: a key that is neither listed there nor
    in a mapping that they leave empty, and a value of another kind than verl's own. A leading `+` makes a key fit."""
    chosen = {key: value for key, value in values.items() if not key.startswith("+")}
    return [f"{key}{fault}" for key, value in chosen.items() if (fault := _fault(key.split("."), value, known))]


def _fault(path: Sequence[str], value: Any, node: Any) -> str | None:
    for part in path:
        if not isinstance(node, Mapping) or (node and part not in node):
            nearest = get_close_matches(part, map(str, node), 1) if isinstance(node, Mapping) else []
            return f", which verl does not know{f' (it knows {nearest[0]})' if nearest else ''}"
        if not node:
            return None
        node = node[part]
    kind = _other_kind(value, node)
    return f" to {value!r}, where verl has {kind}" if kind else None


def _other_kind(value: Any, default: Any) -> str | None:
    """The kind of verl's own value, in words, where it tells that the user's cannot be meant."""
    if value is None or (isinstance(value, str) and value.startswith("${")):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else str(default).lower()
    if isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        return f"the number {default}{' (write 1e-4 as 1.0e-4)' if 'e-' in str(value) else ''}"
    return (
        "a group of settings" if isinstance(default, Mapping) and default and not isinstance(value, Mapping) else None
    )
