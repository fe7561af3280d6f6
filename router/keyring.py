"""API keys and whose they are. Keys come from files and environment variables; nothing here keeps, shows or logs one."""

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

from headrace.config import ClusterConfig
from headrace.config_tenants import TenantConfig
from headrace.errors import ConfigError, Unauthenticated
from headrace.values import DEFAULT_TENANT


class Keyring:
    """Keys by their digests: finding one compares digests alone, so that the time it takes says nothing of a key."""

    def __init__(self, keys: Mapping[str, Iterable[str]]) -> None:
        """Keys by tenant. ConfigError when two tenants have the same, or a key is none."""
        self._tenants: dict[bytes, str] = {}
        for tenant, its in keys.items():
            for key in its:
                if not key or not key.isascii() or not key.isprintable() or " " in key:
                    raise ConfigError(
                        f"a key of tenant {tenant} must be at least 1 printable ASCII character without spaces",
                        key=tenant,
                    )
                other = self._tenants.setdefault(_digest(key), tenant)
                if other != tenant:
                    raise ConfigError(f"tenants {other} and {tenant} have the same key", key=tenant)

    @property
    def has_keys(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str:
        """Whose key the header carries; DEFAULT_TENANT where there are no keys at all, Unauthenticated if nobody's."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("an API key is needed: send it as 'Authorization: Bearer KEY'")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise Unauthenticated("the API key is not known here")
        return tenant


def load_keyring(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> Keyring:
    """ConfigError names the file or the variable that is not there."""
    keys: dict[str, list[str]] = {DEFAULT_TENANT: list(config.router.api_keys)}
    for name, tenant in config.tenants.items():
        keys.setdefault(name, []).extend(_keys_of(name, tenant, environ))
    return Keyring(keys)


def _keys_of(name: str, tenant: TenantConfig, environ: Mapping[str, str]) -> Iterator[str]:
    for number, variable in enumerate(tenant.key_env):
        if not environ.get(variable):  # not repeated: it may be a key that was pasted there
            key = f"tenants.{name}.key_env[{number}]"
            raise ConfigError(f"{key}: must name an environment variable that holds a key; it is not set", key=key)
        yield environ[variable].strip()
    for file in tenant.key_files:
        yield from read_keys(pathlib.Path(file), f"tenants.{name}.key_files")


def read_keys(file: pathlib.Path, key: str) -> tuple[str, ...]:
    """The API keys in a file that `key` of the configuration names: one a line, comments begin with #. ConfigError when
    there is none: a router that was to ask for keys never stands open because a file is missing or empty."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"{key}: cannot read {file}: {why}", key=key, value=file) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{key}: {file} holds no key, it must hold one a line", key=key, value=file)
    return keys


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="replace"), digest_size=32).digest()
