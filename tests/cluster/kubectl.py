"""Asking a cluster through kubectl."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.programs import tools_dir


class KubectlError(Exception):
    """kubectl refused; the text is what it said."""


class Kubectl:
    """kubectl of the tools' folder (or of PATH) with one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.env = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PATH": f"{tools_dir()}:{os.environ['PATH']}",
        }
        """What a program needs to reach this cluster, and to find kubectl and helm."""

    def __call__(self, *args: str, stdin: str | None = None, seconds: float = 60) -> str:
        """What `kubectl ARGS` prints; raises `KubectlError`."""
        done = subprocess.run(
            ["kubectl", *args],
            input=stdin,
            env=self.env,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *args: str) -> Any:
        """`kubectl get ARGS`, read: an object, or a list with `items`."""
        return json.loads(self("get", *args, "-o", "json"))

    def apply(self, *manifests: Mapping[str, Any] | Path, namespace: str | None = None) -> None:
        """Apply objects, or files and folders of them, by server-side apply.

        A server that started a second ago may not know its own types yet, so it is tried for 20 s.
        """
        command = ["apply", "--server-side", "--force-conflicts"]
        command += ["--namespace", namespace] if namespace else []
        files = [word for one in manifests if isinstance(one, Path) for word in ("-f", str(one))]
        objects = [one for one in manifests if not isinstance(one, Path)]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        files += ["-f", "-"] if objects else []
        limit = time.monotonic() + 20
        while True:
            try:
                self(*command, *files, stdin=text if objects else None)
                return
            except KubectlError as error:
                if "openapi" not in str(error).lower() and "no matches for kind" not in str(error):
                    raise
                if time.monotonic() > limit:
                    raise
                time.sleep(0.2)

    def set_status(self, kind: str, name: str, namespace: str, **status: Any) -> None:
        """Merge fields into an object's status: what a test does that plays a controller."""
        patch = f"--patch={json.dumps({'status': status})}"
        where = ["--namespace", namespace, "--subresource=status", "--type=merge"]
        self("patch", kind, name, *where, patch)

    def wait_for(
        self, what: str, condition: Callable[[], bool], seconds: float, show: str = ""
    ) -> None:
        """Ask again until `condition` holds; an error of kubectl counts as no.

        Raises `AssertionError` after `seconds`, with `kubectl get SHOW` and the events.
        """
        limit, last = time.monotonic() + seconds, ""
        while time.monotonic() < limit:
            try:
                if condition():
                    return
            except (KubectlError, LookupError, subprocess.TimeoutExpired) as error:
                last = str(error)
            time.sleep(0.1)
        shown = self._try("get", *show.split(), "-o", "wide") if show else ""
        events = self._try("get", "events", "-A", "--sort-by=.lastTimestamp")[-3000:]
        raise AssertionError(f"not within {seconds:.0f} seconds: {what}\n{last}\n{shown}\n{events}")

    def _try(self, *args: str) -> str:
        try:
            return self(*args)
        except (KubectlError, subprocess.TimeoutExpired) as error:
            return str(error)
