"""A real etcd and kube-apiserver for one test session: the whole API, and nobody who acts on it.

    with ApiServer() as api:                      # ready after about 4 seconds
        api.kubectl.apply(Path("crd.yaml"))
        run_operator(env=api.kubectl.env)         # KUBECONFIG and PATH
        api.kubectl.get("pods", "--namespace=a")  # parsed JSON

There is no node, no scheduler and no controller: the test plays them by writing status. So a
namespace that is deleted stays Terminating, children outlive their owners, and finalizers of a
foreground deletion stay. `ApiServer(controllers=["garbage-collector-controller", ...])` runs the
real ones (`["*"]`: all that kube-controller-manager runs by default).

`requests()` reads the audit log: who wrote what, and what service accounts read. `server` and
`etcd` can be stopped and started again. Needs openssl and the programs of `make cluster-tools`;
else it raises `Unavailable`.
"""

import json
import shutil
import signal
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pki import Authority
from tests.cluster.programs import API_SERVER, Program, find, free_ports
from tests.support import wait_until

SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE = "10.96.0.1"
_WRITES = ("create", "update", "patch", "delete", "deletecollection")
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "Metadata", "verbs": list(_WRITES)},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the audit log has it."""

    verb: str
    resource: str
    """Plural, with a subresource as `pods/status`."""
    namespace: str
    name: str
    user: str
    """Such as `system:serviceaccount:NAMESPACE:NAME`."""
    code: int

    @property
    def writes(self) -> bool:
        """Whether it may have changed something."""
        return self.verb in _WRITES


class ApiServer:
    """etcd and kube-apiserver on this machine, with all they need in a folder of their own.

    Args:
        folder: for data, keys and logs. A temporary one that goes at the end if None.
        address: where the API server listens.
        controllers: those that kube-controller-manager runs; it does not run if there are none.
        flags, controller_flags: further flags of the two programs.
        detached, record: whether the programs outlive this process, and where their ids are kept.
    """

    def __init__(
        self,
        folder: Path | None = None,
        address: str = "127.0.0.1",
        controllers: Sequence[str] = (),
        flags: Sequence[str] = (),
        controller_flags: Sequence[str] = (),
        detached: bool = False,
        record: Path | None = None,
    ) -> None:
        tools = find(*API_SERVER)
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="apiserver-"))
        self.pki = Authority(self.folder / "pki")
        client, peer, secure, manager = free_ports(4)
        self.url = f"https://{address}:{secure}"
        self._make_certificates(address)
        self.kubeconfig = self.pki.kubeconfig("admin", self.url)
        """Of a user who may do everything."""
        self.kubectl = Kubectl(self.kubeconfig)
        self.audit_log = self.folder / "audit.log"
        pki = self.pki.folder
        etcd_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"

        def program(name: str, *arguments: str) -> Program:
            log = self.folder / f"{name}.log"
            return Program([tools[name], *arguments], log, detached, record)

        self.etcd = program(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        (self.folder / "audit-policy.json").write_text(json.dumps(_AUDIT))
        self.server = program(
            "kube-apiserver",
            f"--etcd-servers={etcd_url}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={secure}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--client-ca-file={self.pki.certificate}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--kubelet-certificate-authority={self.pki.certificate}",
            f"--kubelet-client-certificate={pki / 'admin.crt'}",
            f"--kubelet-client-key={pki / 'admin.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki / 'serviceaccounts.crt'}",
            f"--service-account-signing-key-file={pki / 'serviceaccounts.key'}",
            f"--requestheader-client-ca-file={self.pki.certificate}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--audit-policy-file={self.folder / 'audit-policy.json'}",
            f"--audit-log-path={self.audit_log}",
            # Nobody makes the default ServiceAccount that this plugin wants of each pod.
            *([] if controllers else ["--disable-admission-plugins=ServiceAccount"]),
            *flags,
        )
        self.controllers: Program | None = None
        if controllers:
            self.controllers = program(
                "kube-controller-manager",
                f"--kubeconfig={self.kubeconfig}",
                f"--controllers={','.join(controllers)}",
                f"--root-ca-file={self.pki.certificate}",
                f"--service-account-private-key-file={pki / 'serviceaccounts.key'}",
                f"--cluster-signing-cert-file={self.pki.certificate}",
                f"--cluster-signing-key-file={pki / 'ca.key'}",
                f"--secure-port={manager}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                "--kube-api-qps=300",
                "--kube-api-burst=600",
                *controller_flags,
            )

    def start(self) -> None:
        """Start all of it, and wait until the API server is ready; raises `AssertionError`."""
        self.etcd.start()
        self.server.start()
        wait_until(self.ready, 60, lambda: f"{self.etcd.tail()}\n{self.server.tail()}")
        if self.controllers is not None:
            # Earlier it would find no role that lets it read its own configuration, and exit.
            self.controllers.start()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End all of it by a signal; the folder stays."""
        for program in (self.controllers, self.server, self.etcd):
            if program is not None:
                program.stop(number)

    def ready(self) -> bool:
        """Whether the API server says so; raises `AssertionError` if it has ended."""
        for program in (self.etcd, self.server):
            if not program.runs():
                raise AssertionError(f"has ended: {program.tail()}")
        trust = ssl.create_default_context(cafile=str(self.pki.certificate))
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def writes(self, namespace: str | None = None) -> list[Request]:
        """All requests so far that changed something, in their order."""
        found = (one for one in self.requests() if one.writes)
        return [one for one in found if namespace in (None, one.namespace)]

    def requests(self) -> Iterator[Request]:
        """Writes of all users, and whatever service accounts asked for; watches once they end."""
        with self.audit_log.open() as lines:
            for line in lines:
                event: dict[str, Any] = json.loads(line)
                of = event.get("objectRef", {})
                yield Request(
                    verb=event["verb"],
                    resource="/".join(filter(None, [of.get("resource"), of.get("subresource")])),
                    namespace=of.get("namespace", ""),
                    name=of.get("name", ""),
                    user=event["user"]["username"],
                    code=event.get("responseStatus", {}).get("code", 0),
                )

    def __enter__(self) -> "ApiServer":
        try:
            self.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self.stop(signal.SIGKILL if self._temporary else signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_certificates(self, address: str) -> None:
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        addresses = [f"DNS:{name}" for name in names]
        addresses += [f"IP:{one}" for one in {KUBERNETES_SERVICE, "127.0.0.1", address}]
        self.pki.issue("apiserver", "kube-apiserver", addresses=addresses)
        self.pki.issue("admin", "admin", groups=["system:masters"])
        self.pki.issue("front-proxy", "front-proxy")
        self.pki.issue("serviceaccounts", "serviceaccounts")
