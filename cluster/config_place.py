"""A cluster's configuration as its file means it: a model that is named relative to the file, found from where that is."""

import pathlib
import re

from headrace import config_file
from headrace.config import ClusterConfig
from headrace.errors import ConfigError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def load(path: pathlib.Path) -> ClusterConfig:
    """The configuration, with a model folder found from where the file is."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}: give a configuration file, such as examples/laptop.yaml")
    return absolute(config_file.load(path), path.resolve().parent)


def absolute(config: ClusterConfig, base: pathlib.Path) -> ClusterConfig:
    """A model folder or file that is named relative to the configuration file, as an absolute path."""
    config = config.model_copy(update={"model": _absolute(config.model, base)})
    if config.canary is None or config.canary.model is None:
        return config
    canary = config.canary.model_copy(update={"model": _absolute(config.canary.model, base)})
    return config.model_copy(update={"canary": canary})


def _absolute(model: str, base: pathlib.Path) -> str:
    place = base / pathlib.Path(model).expanduser()
    return str(place.resolve()) if place.exists() or is_path(model) else model


def is_path(model: str) -> bool:
    """Whether it can only be meant as a place on this machine: no hub would take it for an id."""
    return not HUB_ID.fullmatch(model)
