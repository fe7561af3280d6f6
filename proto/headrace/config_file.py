"""Reads a cluster's configuration: one pass over its shape, one over what its parts must agree on. Every fault is a
ConfigError with the key, the value and what is allowed."""

import pathlib
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.config import CanaryConfig, ClusterConfig
from headrace.errors import ConfigError
from headrace.values import DEFAULT_TENANT, STABLE


class _OnceEach(yaml.SafeLoader):
    """YAML forbids a key twice in a mapping; its reader here would take the last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As it stands in the file: a mapping that others are merged into (<<) may have their keys beside its own later."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                twice = f"key {key.value!r} stands twice in one mapping"
                raise yaml.composer.ComposerError(None, None, twice, key.start_mark)
            seen.add(key.value)
        return node


def parse(text: str, source: str = "headrace.yaml") -> ClusterConfig:
    """A cluster's configuration from YAML text; ConfigError names what is wrong in it."""
    try:
        data: Any = yaml.load(text, Loader=_OnceEach)  # a safe one
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of keys, got {type(data).__name__}")
    try:
        config = ClusterConfig.model_validate(_with_whole_engine(data))
    except ValidationError as error:
        raise first_fault(source, error, ClusterConfig) from error
    roles = {pool.role for pool in config.pools.values()}
    if roles == {"prefill"}:
        raise ConfigError.out_of_range(
            f"{source}: pools", sorted(roles), "at least one pool that decodes (decode or unified)"
        )
    _check_classes(config, source)
    _check_keys(config, source)
    if config.autoscaling.mode != "fixed":
        _check_scaling(config, source)
    if config.canary is not None:
        check_canary(config, config.canary, source)
    if not (config.rollouts.max_unavailable or config.rollouts.max_surge):
        allowed = "at least 1, or rollouts.max_surge at least 1: nobody could be replaced"
        raise ConfigError.out_of_range(f"{source}: rollouts.max_unavailable", 0, allowed)
    return config


def _with_whole_engine(data: dict[str, Any]) -> dict[str, Any]:
    """What a canary's engine does not say is as everybody's."""
    canary, engine = data.get("canary"), data.get("engine")
    if not isinstance(canary, dict) or not isinstance(engine, dict):
        return data
    own = canary.get("engine", {})
    return {**data, "canary": {**canary, "engine": {**engine, **own}}} if isinstance(own, dict) else data


def check_canary(config: ClusterConfig, canary: CanaryConfig, source: str) -> None:
    """What a canary and the rest of the file must agree on; ConfigError names field, value and range."""
    key = f"{source}: canary"
    if canary.revision == STABLE:
        raise ConfigError.out_of_range(f"{key}.revision", STABLE, "another name: that is what serves already")
    for name, pool in canary.pools.items():
        where = f"{key}.pools.{name}"
        if name in config.pools:
            allowed = f"other names than those of pools: {', '.join(config.pools)}"
            raise ConfigError.out_of_range(where, name, allowed)
        if pool.min_replicas is not None or pool.max_replicas is not None:
            bounds = f"{pool.min_replicas} to {pool.max_replicas}"
            raise ConfigError.out_of_range(where, bounds, "no min_replicas or max_replicas: its size is fixed")
        if pool.replicas < 1:
            raise ConfigError.out_of_range(f"{where}.replicas", pool.replicas, "at least 1")
    roles = {pool.role for pool in canary.pools.values()}
    if roles == {"prefill"}:
        raise ConfigError.out_of_range(f"{key}.pools", sorted(roles), "at least one that decodes (decode or unified)")
    budget = config.autoscaling.budget_gpus
    least = sum(pool.bounds[0] * pool.layout.world_size for pool in config.pools.values())
    if budget is not None and least + canary.num_gpus > budget:
        allowed = f"at most {max(budget - least, 0)} GPUs: autoscaling.budget_gpus is {budget}, and pools take {least}"
        raise ConfigError.out_of_range(f"{key}.pools", f"{canary.num_gpus} GPUs", allowed)


def _check_scaling(config: ClusterConfig, source: str) -> None:
    """Bounds that can be kept, within the budget, and an SLO that sizes follow from."""
    for name, pool in config.pools.items():
        least, most = pool.bounds
        if not least <= pool.replicas <= most:
            key = f"{source}: pools.{name}"
            raise ConfigError.out_of_range(key, f"{least} ≤ {pool.replicas} ≤ {most}", "min ≤ replicas ≤ max")
    its = config.autoscaling
    if its.budget_gpus is not None:
        for what, sizes in (
            ("min_replicas", {name: pool.bounds[0] for name, pool in config.pools.items()}),
            ("replicas", {name: pool.replicas for name, pool in config.pools.items()}),
        ):
            needed = sum(size * config.pools[name].layout.world_size for name, size in sizes.items())
            if needed > its.budget_gpus:
                allowed = f"at least {needed}, which {what} of all pools take"
                raise ConfigError.out_of_range(f"{source}: autoscaling.budget_gpus", its.budget_gpus, allowed)
    if its.service_class is None and config.admission.service_class is None:
        raise ConfigError(
            f"{source}: autoscaling.service_class: must name one of service_classes: sizes follow from its targets",
            key="autoscaling.service_class",
        )


def _check_classes(config: ClusterConfig, source: str) -> None:
    """Every class that is named is one that there is."""
    named = [("admission.service_class", config.admission.service_class)]
    named.append(("autoscaling.service_class", config.autoscaling.service_class))
    for tenant, its in config.tenants.items():
        named.append((f"tenants.{tenant}.service_class", its.service_class))
        named += [(f"tenants.{tenant}.service_classes", name) for name in its.service_classes or ()]
    allowed = ", ".join(config.service_classes) or "absent: service_classes names none"
    for key, name in named:
        if name is not None and name not in config.service_classes:
            raise ConfigError.out_of_range(
                f"{source}: {key}", name, f"one of {allowed}" if config.service_classes else allowed
            )


def _check_keys(config: ClusterConfig, source: str) -> None:
    """Every tenant is somebody: `default` has the keys of the router, any other its own."""
    for tenant, its in config.tenants.items():
        if tenant != DEFAULT_TENANT and not (its.key_env or its.key_files):
            key = f"tenants.{tenant}"
            raise ConfigError(
                f"{source}: {key}: must have a key, by key_env or key_files: without one no request is ever its own",
                key=key,
            )


def first_fault(source: str, error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """The first thing wrong, with what would be right there: an unknown key before a bad value, which it may explain.
    `root` is what was read, `source` the file's name, or empty."""
    faults = error.errors()
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    *path, name = [str(part) for part in fault["loc"] if part != "[key]"] or ["the file"]
    key = ".".join((*path, name))
    section = _section(path, root)
    where = f"{source}: {key}" if source else key
    if fault["type"] == "extra_forbidden":
        known = ", ".join(sorted(section.model_fields)) if section is not None else "no keys"
        return ConfigError(f"{where}: unknown key; known here: {known}", key=key, value=name, allowed=known)
    if fault["type"] == "missing":
        return ConfigError(f"{where}: must be given", key=key)
    if fault["type"] == "value_error":
        return ConfigError(f"{where}: {fault['msg'].removeprefix('Value error, ')}", key=key)
    field = section.model_fields.get(name) if section is not None else None
    allowed = (_range(field) if field is not None else "") or fault["msg"].removeprefix("Input should be ").replace(
        "String should match pattern", "a text that matches"
    ).replace("a valid tuple", "a list")
    if fault["type"] == "finite_number":  # which bounds alone need not say
        allowed = allowed.replace("a number", "a finite number", 1)
    given = "(not shown)" if {"api_keys", "key_env"} & {*path, name} else fault.get("input")
    return ConfigError.out_of_range(where, given, allowed)


def _section(path: list[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """The part of the file that a path of keys leads to."""
    kind: Any = root
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = _given(kind.model_fields[part].annotation)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif get_origin(kind) is list:
            kind = get_args(kind)[0]
        else:
            return None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _given(kind: Any) -> Any:
    """What a key has that may also be null."""
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) is UnionType else []
    return kinds[0] if len(kinds) == 1 else kind


def _range(field: FieldInfo) -> str:
    """A number's bounds in words; empty where there are none."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{word} {getattr(limit, name)}"
        for limit in field.metadata
        for name, word in words.items()
        if getattr(limit, name, None) is not None
    ]
    whole = field.annotation is int or int in get_args(field.annotation)
    return f"{'a whole number' if whole else 'a number'} {' and '.join(bounds)}" if bounds else ""


def load(path: pathlib.Path) -> ClusterConfig:
    """parse() of a file, its relative paths taken from where it lies; ConfigError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return _placed(parse(text, str(path)), path.resolve().parent)


def _placed(config: ClusterConfig, folder: pathlib.Path) -> ClusterConfig:
    """Paths as they are meant where the file is: whoever serves from it may run elsewhere."""
    log, plan = config.router.decision_log, config.console.plan
    if log.path is not None:
        log = log.model_copy(update={"path": str(folder / pathlib.Path(log.path).expanduser())})
        config = config.model_copy(update={"router": config.router.model_copy(update={"decision_log": log})})
    if config.router.tls is not None:
        files = config.router.tls.model_dump(exclude={"server_name"}, exclude_none=True)
        placed = {name: str(folder / pathlib.Path(file).expanduser()) for name, file in files.items()}
        tls = config.router.tls.model_copy(update=placed)
        config = config.model_copy(update={"router": config.router.model_copy(update={"tls": tls})})
    if plan is not None:
        placed = {"plan": str(folder / pathlib.Path(plan).expanduser())}
        config = config.model_copy(update={"console": config.console.model_copy(update=placed)})
    return config
