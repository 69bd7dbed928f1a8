"""Certificates and kubeconfig files of the test cluster, made with the openssl program."""

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.programs import Unavailable


class Authority:
    """A certificate authority in a folder, with which it makes keys and certificates there."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            raise Unavailable("needs openssl: apt-get install openssl")
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}.crt"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.certificate.exists():
            self._request(name, f"/CN={name}", ["basicConstraints=critical,CA:TRUE"])

    def issue(
        self, name: str, user: str, groups: Sequence[str] = (), addresses: Sequence[str] = ()
    ) -> None:
        """Make NAME.crt and NAME.key, for a client and, with addresses, also for a server.

        Args:
            name: of the two files.
            user, groups: what the API server takes the client for.
            addresses: `DNS:name` or `IP:address`.
        """
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        extensions = [
            "basicConstraints=CA:FALSE",
            "keyUsage=digitalSignature",
            "extendedKeyUsage=clientAuth,serverAuth",
        ]
        if addresses:
            extensions.append("subjectAltName=" + ",".join(addresses))
        signed = ["-CA", str(self.certificate), "-CAkey", str(self.folder / f"{self.name}.key")]
        self._request(name, subject, extensions, signed)

    def kubeconfig(self, name: str, server: str) -> Path:
        """NAME.kubeconfig, which holds all of a client's certificate and needs no other file."""

        def content(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        user = {
            "client-certificate-data": content(self.folder / f"{name}.crt"),
            "client-key-data": content(self.folder / f"{name}.key"),
        }
        cluster = {
            "server": server,
            "certificate-authority-data": content(self.certificate),
        }
        path = self.folder / f"{name}.kubeconfig"
        # Each JSON text is YAML as well.
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path

    def _request(
        self, name: str, subject: str, extensions: Sequence[str], more: Sequence[str] = ()
    ) -> None:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
        files = ["-keyout", str(self.folder / f"{name}.key")]
        files += ["-out", str(self.folder / f"{name}.crt")]
        added = [word for extension in extensions for word in ("-addext", extension)]
        # Without -config the machine's own settings would add extensions of their own.
        empty = self.folder / "openssl.cnf"
        empty.write_text("[req]\ndistinguished_name = dn\n[dn]\n")
        subprocess.run(
            [
                "openssl", "req", "-x509", "-config", str(empty), "-days", "30", "-subj", subject,
                *curve, *added, *files, *more,
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
