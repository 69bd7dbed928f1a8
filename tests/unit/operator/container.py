"""Containers of manifests as processes of this machine: the test plays the kubelet."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Container:
    """One container. What is another one here (folders, names, ports) is replaced in all that the
    manifest has it run; `fields` are the fields of its pod that the downward API gives it."""

    def __init__(
        self,
        container: Any,
        log: Path,
        replaced: Mapping[str, object],
        fields: Mapping[str, str] | None = None,
    ) -> None:
        self.container = container
        self.log = log
        self._replaced = replaced
        programs = Path(sys.executable).parent
        self._env = {"PATH": f"{programs}:{os.environ['PATH']}"}
        for variable in container.get("env", []):
            source = variable.get("valueFrom")
            value = (fields or {})[source["fieldRef"]["fieldPath"]] if source else variable["value"]
            self._env[variable["name"]] = self._here(value)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again)."""
        words = [self._expanded(w) for w in (*self.container["command"], *self.container["args"])]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self._here(word) for word in words],
                env={**os.environ, **self._env}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """End all of its processes at once."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.process.wait(60)

    def terminate(self) -> int:
        """SIGTERM, as at the end of a pod; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def exec(self, hook: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """What the kubelet runs in the container, such as a probe."""
        return subprocess.Popen([self._here(word) for word in hook["exec"]["command"]])

    def succeeds(self, probe: str) -> bool:
        """Whether a probe succeeds now."""
        return self.exec(self.container[probe]).wait(60) == 0

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def _here(self, text: str) -> str:
        for there, here in self._replaced.items():
            text = text.replace(there, str(here))
        return text

    def _expanded(self, word: str) -> str:
        """With $(NAME) as the kubelet fills it in; what it does not know it leaves."""
        return re.sub(r"\$\((\w+)\)", lambda m: self._env.get(m[1], m[0]), word)
