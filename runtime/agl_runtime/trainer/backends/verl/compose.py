"""verl's whole configuration from agl's overrides, as verl's own entry point would read it. Hydra is imported late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agl_runtime.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENGINE = "model_engine"
CONFIG_PACKAGE = "verl.trainer.config"
CONFIG_FILE = "ppo_trainer"


def compose(values: Mapping[str, Any]) -> DictConfig:
    """verl's files with `values` (dotted keys, `settings.overrides`) over them. Raises ConfigError for a key that verl
    does not know: neither listed in its files, nor in a mapping that these leave empty, nor with a leading `+`."""
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_module(CONFIG_PACKAGE, version_base=None):
        config = hydra.compose(CONFIG_FILE, [f"{ENGINE}={values[ENGINE]}"] if ENGINE in values else [])
    keys = [key for key in values if key != ENGINE]
    unknown = [key for key in keys if not key.startswith("+") and not _is_known(config, key)]
    if unknown:
        raise ConfigError(
            f"train.verl sets {', '.join(unknown)}, which verl does not know.",
            "Correct the name, or put a + before it to add it.",
        )
    for key in keys:
        OmegaConf.update(config, key.lstrip("+"), values[key], merge=False, force_add=True)
    return config


def _is_known(config: DictConfig, key: str) -> bool:
    from omegaconf import DictConfig

    node: Any = config
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return False
        if part not in node.keys():  # `in` leaves out what is still to be filled in  # noqa: SIM118
            return len(node) == 0
        node = node._get_node(part)
    return True
