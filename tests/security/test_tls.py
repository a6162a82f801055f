"""S10: the way to MongoDB. A real server with TLS; certificates of a CA that is made here."""

from __future__ import annotations

import contextlib
import datetime
import gc
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from pymongo import MongoClient
from tests.support.mongod import Mongod, quick_server

from holdfast import App
from holdfast.errors import ConfigurationError, HoldfastError, StoreUnavailable
from holdfast.settings import Settings
from holdfast.store.mongo.connection import tls_advice
from holdfast.web.reading.diagnosis import of_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

CANARY = "c4n4ry-p4ssw0rd"
HASTY = "serverSelectionTimeoutMS=300&connectTimeoutMS=2000&serverMonitoringMode=poll"
DAY = datetime.timedelta(days=1)
Signer = tuple[x509.Certificate, EllipticCurvePrivateKey]


def signed(name: str, signer: Signer | None = None, *, days: tuple[int, int] = (-1, 10)) -> Signer:
    """Return a certificate for 127.0.0.1 and its key; without a signer, that of a CA."""
    key = generate_private_key(SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=signer[0].subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    )
    if signer is not None:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return builder.sign(signer[1] if signer else key, hashes.SHA256()), key


def write(path: Path, signed: Signer) -> Path:
    certificate, key = signed
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(certificate.public_bytes(Encoding.PEM) + secret)
    return path


@pytest.fixture(scope="module")
def authority() -> Signer:
    return signed("authority")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, authority: Signer) -> Path:
    """The files: two CAs, and the certificates of servers."""
    folder = tmp_path_factory.mktemp("tls")
    write(folder / "ca.pem", authority)
    write(folder / "other.pem", signed("other authority"))
    write(folder / "server.pem", signed("server", authority))
    write(folder / "expired.pem", signed("server", authority, days=(-10, -1)))
    write(folder / "early.pem", signed("server", authority, days=(1, 10)))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Mongod]:
    """A server that takes TLS on its port, and plain connections: those are for the harness."""
    files = ("--tlsCertificateKeyFile", str(folder / "server.pem"), "--tlsCAFile", str(folder / "ca.pem"))
    with quick_server(
        options=("--tlsMode", "preferTLS", "--tlsAllowConnectionsWithoutCertificates", *files, "--auth")
    ) as server:
        with server.client() as client:
            client.admin.command("createUser", "root", pwd=CANARY, roles=["root"])
        yield server


@contextlib.contextmanager
def greeting(certificate: Path) -> Iterator[int]:
    """A server that shows a certificate which no mongod starts with. Its port is all that there is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.settimeout(2)
                with connection, contextlib.suppress(OSError):
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture(scope="module", autouse=True)
def untidy_driver() -> Iterator[None]:
    """The driver forgets a socket if its handshake fails. It shall be found here, not in another test."""
    yield
    gc.collect()


def url_of(port: int, options: str, host: str = "127.0.0.1") -> str:
    return f"mongodb://root:{CANARY}@{host}:{port}/shop?directConnection=true&authSource=admin&{HASTY}{options}"


@pytest.fixture
def refusal(caplog: pytest.LogCaptureFixture) -> Callable[[str], str]:
    """Return what is said of a URL that does not work, which has no password in it."""
    caplog.set_level(logging.DEBUG)

    def refused(url: str) -> str:
        with (
            App(url, max_retries=1, retry_base_delay=0.001) as app,
            pytest.raises((StoreUnavailable, ConfigurationError)) as caught,
        ):
            app.invocations()
        causes, error = [], caught.value
        while error is not None:
            causes.append(repr(error))
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        assert CANARY not in "\n".join([*causes, caplog.text])
        return str(caught.value)

    return refused


def test_a_server_of_the_right_authority_is_used(
    server: Mongod, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of(server.port, f"&tls=true&tlsCAFile={folder}/ca.pem")
    with App(url, name="shop") as app:
        echo = app.task(name="echo")(repr)
        with app.runner(concurrency=1):
            assert echo.submit(1).result(timeout=60) == "1"
    assert "not checked" not in caplog.text
    with MongoClient[dict[str, Any]](url_of(server.port, "")) as client:  # itself without TLS
        used = client.admin.command("serverStatus")["transportSecurity"]
    assert sum(int(used[version]) for version in ("1.2", "1.3")) > 0


def test_a_server_of_another_authority_is_refused(server: Mongod, folder: Path, refusal: Callable[[str], str]) -> None:
    said = refusal(url_of(server.port, f"&tls=true&tlsCAFile={folder}/other.pem"))
    assert "certificate verify failed" in said
    assert said.endswith("Name the CA of the server's certificate in the URL: tlsCAFile=….")
    assert "configured timeouts" not in said
    said = refusal(url_of(server.port, "&tls=true"))
    assert said.endswith("tlsCAFile=….")


def test_a_certificate_for_another_host_is_refused(server: Mongod, folder: Path, refusal: Callable[[str], str]) -> None:
    said = refusal(url_of(server.port, f"&tls=true&tlsCAFile={folder}/ca.pem", host="localhost"))
    assert "certificate is not valid for 'localhost'" in said
    assert "is for another host" in said


@pytest.mark.parametrize(("file", "advice"), [("expired", "has expired: renew it"), ("early", "is not valid yet")])
def test_a_certificate_that_is_not_valid_now_is_refused(
    folder: Path, refusal: Callable[[str], str], file: str, advice: str
) -> None:
    with greeting(folder / f"{file}.pem") as port:
        said = refusal(url_of(port, f"&tls=true&tlsCAFile={folder}/ca.pem"))
    assert advice in said


def test_a_server_without_tls_is_no_server_with_tls(standalone: str, refusal: Callable[[str], str]) -> None:
    port = int(standalone.partition("?")[0].rpartition(":")[2].partition("/")[0])
    assert "may have no TLS" in refusal(url_of(port, "&tls=true"))


def test_a_file_that_is_not_there_is_named(server: Mongod, refusal: Callable[[str], str]) -> None:
    assert "No such file or directory: /none" in refusal(url_of(server.port, "&tls=true&tlsCAFile=/none"))


@pytest.mark.parametrize("option", ["tlsInsecure", "tlsAllowInvalidCertificates", "tlsallowinvalidhostnames"])
def test_a_certificate_that_is_not_checked_is_warned_of(
    server: Mongod, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    url = url_of(server.port, f"&tls=true&{option}=true")
    with contextlib.suppress(HoldfastError), App(url, max_retries=0) as app:
        app.invocations()
        assert app.invocations() == []
    lines = [record.getMessage() for record in caplog.records if "not checked" in record.getMessage()]
    if option != "tlsallowinvalidhostnames":  # that one still wants a CA that is known
        assert len(lines) == 1, "once, when the store is opened"
        assert option in lines[0]
    (found,) = of_settings(Settings(), url)
    assert (found.subject, found.state) == ("url", "wrong")
    assert option.lower() in found.detail.lower()
    assert CANARY not in str(found)
    assert of_settings(Settings(), url.replace(f"{option}=true", f"{option}=false"))[0].state == "ok"


def test_other_errors_get_no_advice_about_certificates() -> None:
    assert tls_advice("certificate verify failed: CA signature digest algorithm too weak") == ""
    assert tls_advice("the lease has expired") == ""
