"""A real nginx that ends TLS on 443 in front of a hub or gateway, with an authority of its own.

The configuration is the shipped template, with the paths of the test in it.
"""

import contextlib
import datetime
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from linkcpp.common.resources import resource_folder
from tests.internet.network import Host, ending

_DOMAIN_OF_TEMPLATE = "hub.example"
_NGINX = shutil.which("nginx") or "/usr/sbin/nginx"


def certificates(folder: Path, domains: Sequence[str]) -> Path:
    """Make an authority and a certificate for all domains; returns the authority's file."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "An authority for tests")])

    def builder(name: x509.Name, owner: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(root_name)
            .public_key(owner.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    root = (
        builder(root_name, root_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root_key, hashes.SHA256())
    )
    leaf = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domains[0])]), key)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(domain) for domain in domains]),
            critical=False,
        )
        .sign(root_key, hashes.SHA256())
    )
    (folder / "authority.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "fullchain.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (folder / "privkey.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "authority.pem"


def nginx_configuration(folder: Path, certificate: Path, domain: str, target_port: int) -> str:
    """Return a whole ``nginx.conf`` around the shipped template."""
    site = (resource_folder("templates") / "hub" / "nginx.conf").read_text()
    site = site.replace(f"/etc/ssl/{_DOMAIN_OF_TEMPLATE}", str(certificate))
    site = site.replace(_DOMAIN_OF_TEMPLATE, domain)
    site = site.replace("127.0.0.1:8720", f"127.0.0.1:{target_port}")
    temporary = "".join(
        f"  {kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
        "worker_processes 1;\nevents { worker_connections 4096; }\n"
        f"http {{\n  access_log {folder}/access.log;\n{temporary}{site}}}\n"
    )


@contextlib.contextmanager
def nginx(host: Host, certificate: Path, domain: str, *, target_port: int) -> Iterator[None]:
    """Run nginx on a host while the block runs; ``certificate`` is the folder of its certificate.

    What comes to ``domain`` on 443 goes to a port of the host's loopback.
    """
    if not Path(_NGINX).exists():
        pytest.skip("nginx is not installed")
    folder = host.home / "nginx"
    folder.mkdir(parents=True)
    configuration = folder / "nginx.conf"
    configuration.write_text(nginx_configuration(folder, certificate, domain, target_port))
    process = host.start(_NGINX, "-p", str(folder), "-c", str(configuration))
    with ending(process):
        deadline = time.monotonic() + 20
        while not (folder / "nginx.pid").exists() or not (folder / "nginx.pid").read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nginx does not start"
            time.sleep(0.05)
        yield
