"""What the files of router.tls may hold, and when they are looked at again."""

import logging
import os
import pathlib
import shutil
import ssl
import time

import pytest

from headrace.clock import ManualClock
from headrace.config import TlsConfig
from headrace.errors import ConfigError
from headrace.tls import LOOK_SECONDS
from router.__main__ import main
from router.edge.tls import Certificates, read
from tests.certificates import Pair, authority, signed
from tests.e2e.routers import write_config


class Made:
    """A CA, two certificates of its, an expired one, and one for clients alone."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.ca = authority(folder, "ca")
        self.one, self.two = signed(folder, "one", self.ca), signed(folder, "two", self.ca)
        self.expired = signed(folder, "expired", self.ca, days=-1)
        self.clients = signed(folder, "clients", self.ca, "extendedKeyUsage=clientAuth")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("certificates"))


def config(pair: Pair, **other: object) -> TlsConfig:
    return TlsConfig(**{"cert_file": str(pair.cert), "key_file": str(pair.key), **other})  # type: ignore[arg-type]


def test_what_is_wrong_with_a_file_is_said_with_its_key(made: Made, tmp_path: pathlib.Path) -> None:
    broken, locked = tmp_path / "broken", tmp_path / "locked"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    os.system(f"openssl ec -in {made.one.key} -aes128 -passout pass:secret -out {locked} 2>/dev/null")
    for wrong, said in (
        ({"cert_file": str(tmp_path / "none")}, "router.tls.cert_file: .*none cannot be read: No such file"),
        ({"key_file": str(tmp_path)}, "router.tls.key_file: .* cannot be read: Is a directory"),
        ({"cert_file": str(made.one.key)}, "router.tls.cert_file: .* holds no certificate in PEM"),
        ({"cert_file": str(broken)}, "router.tls.key_file: .*broken is broken"),
        ({"key_file": str(made.one.cert)}, "router.tls.key_file: .*one.crt holds no key in PEM"),
        ({"key_file": str(made.two.key)}, "router.tls.key_file: .*two.key is not the key of .*one.crt"),
        ({"key_file": str(locked)}, "router.tls.key_file: the key is encrypted"),
        ({"client_ca_file": str(made.one.key)}, "router.tls.client_ca_file: .* holds no certificate in PEM"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(config(made.one, **wrong))
    with pytest.raises(ConfigError, match=r"router.tls.cert_file: .*expired.crt no client would take it: .* expired"):
        read(config(made.expired))
    with pytest.raises(ConfigError, match=r"no client would take it: .*purpose"):
        read(config(made.clients))
    assert read(config(made.one, client_ca_file=str(made.ca.cert))).context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_router_with_wrong_files_ends_before_it_loads_a_model(
    made: Made, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tls = config(made.one, key_file=str(made.two.key)).model_dump()
    write_config(tmp_path / "no-model", tmp_path / "h.yaml", tls=tls)
    assert main([str(tmp_path / "h.yaml")]) == 1
    assert "router: router.tls.key_file" in capsys.readouterr().err


def test_files_are_looked_at_again_once_a_second_and_wrong_ones_change_nothing(
    made: Made, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    used, clock = Pair(tmp_path / "tls.crt", tmp_path / "tls.key"), ManualClock()

    def put(cert: Pair, key: Pair) -> None:
        for source, target in ((cert.cert, used.cert), (key.key, used.key)):
            shutil.copy(source, tmp_path / "new")
            os.replace(tmp_path / "new", target)

    put(made.one, made.one)
    certificates = Certificates(config(used), clock)
    first = certificates.current()
    put(made.two, made.one)
    assert certificates.current() is first
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.advance(LOOK_SECONDS)
            assert certificates.current() is first
    (record,) = caplog.records
    assert "the certificate of before stays: router.tls.key_file" in record.getMessage()
    put(made.two, made.two)
    clock.advance(LOOK_SECONDS)
    second = certificates.current()
    assert second is not first
    days_left = (second.ends_at - time.time()) / 86400
    assert 0.9 < days_left <= 1
    used.key.unlink()
    clock.advance(LOOK_SECONDS)
    assert certificates.current() is second
