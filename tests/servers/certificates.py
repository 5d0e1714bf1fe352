"""Certificates for servers that speak TLS, with all that a strict client (Python from 3.13 on) asks of them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AUTHORITY = """\
[req]
distinguished_name = name
x509_extensions = authority
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_SIGNED = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1
"""


def make_certificates(folder: Path) -> None:
    """A private authority (ca.pem), a certificate for a server on 127.0.0.1 and one for a client, and their keys."""

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    (folder / "authority.cnf").write_text(_AUTHORITY)
    (folder / "signed.cnf").write_text(_SIGNED)
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", "authority.cnf")
    run(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tests")
    for name in ("server", "client"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        run(*sign, "-out", f"{name}.pem", "-days", "2", "-extfile", "signed.cnf")
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o644)  # for the server's user, too


@contextmanager
def certificates_for_all() -> Iterator[Path]:
    """A folder with them that servers of another user may read, too: pytest keeps its own folders closed."""
    folder = Path(tempfile.mkdtemp(prefix="dibs-certificates-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        make_certificates(folder)
        yield folder
    finally:
        shutil.rmtree(folder)
