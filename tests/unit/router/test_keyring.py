import pathlib

import pytest

from headrace.config_file import parse
from headrace.errors import ConfigError, Unauthenticated
from headrace.values import DEFAULT_TENANT
from router.keyring import Keyring, load_keyring

CONFIG = """
model: m
pools: {a: {role: unified}}
router: {api_keys: [operator-key]}
tenants:
  acme: {key_env: [ACME_KEY]}
  beta: {key_files: [FILE]}
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "keys"
    file.write_text("# of beta\nbeta-1\n\n  beta-2 \n", encoding="utf-8")
    return file


def test_keys_come_from_files_and_the_environment(file: pathlib.Path) -> None:
    keyring = load_keyring(parse(CONFIG.replace("FILE", str(file))), {"ACME_KEY": "acme-1\n"})
    owners = {key: keyring.tenant(f"Bearer {key}") for key in ("operator-key", "acme-1", "beta-1", "beta-2")}
    assert owners == {"operator-key": DEFAULT_TENANT, "acme-1": "acme", "beta-1": "beta", "beta-2": "beta"}
    assert keyring.tenant("bearer acme-1 ") == "acme"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic acme-1", "Bearer acme", "acme-1", "Bearer # of beta"]
)
def test_what_is_no_known_key_is_nobodys(header: str | None, file: pathlib.Path) -> None:
    keyring = load_keyring(parse(CONFIG.replace("FILE", str(file))), {"ACME_KEY": "acme-1"})
    with pytest.raises(Unauthenticated):
        keyring.tenant(header)


def test_without_any_keys_everybody_is_the_default_tenant() -> None:
    assert load_keyring(parse("model: m\npools: {a: {role: unified}}"), {}).tenant(None) == DEFAULT_TENANT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", r"tenants\.beta\.key_files: .* holds no key, it must hold one a line"),
        ("two words\n", "a key of tenant beta must be at least 1 printable ASCII character without spaces"),
        ("secret-acme\n", "tenants acme and beta have the same key"),
    ],
)
def test_a_fault_names_the_tenant_and_never_the_key(text: str, expected: str, file: pathlib.Path) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected) as caught:
        load_keyring(parse(CONFIG.replace("FILE", str(file))), {"ACME_KEY": "secret-acme"})
    assert "secret" not in caught.value.message + str(caught.value.numbers)
    assert "two words" not in caught.value.message + str(caught.value.numbers)


def test_what_is_missing_is_named(file: pathlib.Path) -> None:
    config = parse(CONFIG.replace("FILE", str(file.parent / "nothing")))
    with pytest.raises(ConfigError, match=r"tenants\.acme\.key_env\[0\]: must name an environment variable that"):
        load_keyring(config, {})
    with pytest.raises(ConfigError, match=r"tenants\.beta\.key_files: cannot read .*nothing: No such file"):
        load_keyring(config, {"ACME_KEY": "x"})


def test_a_keyring_shows_no_key() -> None:
    keyring = Keyring({"acme": ["secret-1"]})
    assert "secret-1" not in repr(keyring) + repr(vars(keyring))


@pytest.mark.parametrize("pasted", ["secret-1", "SECRET_1"])
def test_a_key_that_was_pasted_where_a_variable_is_to_be_named_is_not_repeated(pasted: str) -> None:
    for written in (f"[{pasted}]", pasted, f"{{a: {pasted}}}"):
        with pytest.raises(ConfigError, match="key_env") as caught:
            load_keyring(
                parse(f"model: m\npools: {{a: {{role: unified}}}}\ntenants: {{t: {{key_env: {written}}}}}"), {}
            )
        assert pasted not in caught.value.message + str(caught.value.numbers)


def test_keys_that_are_written_wrong_are_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("model: m\npools: {a: {role: unified}}\nrouter: {api_keys: secret-1}")
    assert "router.api_keys" in caught.value.message
    assert "secret-1" not in caught.value.message + str(caught.value.numbers)
