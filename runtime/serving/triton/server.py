"""TritonServer: a local Triton Inference Server, the binary inside the nvidia-pytriton wheel. Needs no GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ....models.errors import EngineError
from ....plugins.installation import install

INSTALL = install("triton")
STUB = "triton_python_backend_stub"
BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.05
LOG_LINES = 30  # lines of the server's log in an error


class Distribution(NamedTuple):
    """Parts of the installed nvidia-pytriton wheel."""

    server: Path
    libraries: Path
    stub: Path

    @classmethod
    def find(cls) -> Distribution:
        """Find the wheel without importing it. Raises EngineError if it is missing or for another Python."""
        found = importlib.util.find_spec("pytriton")
        if found is None or not found.submodule_search_locations:
            raise EngineError(f"Triton Inference Server is not installed: {INSTALL}")
        package = Path(next(iter(found.submodule_search_locations)))
        server, libraries = package / "tritonserver", package.parent / "nvidia_pytriton.libs"
        stubs = server / "python_backend_stubs"
        stub = stubs / f"{sys.version_info.major}.{sys.version_info.minor}" / STUB
        if not stub.is_file():
            offered = ", ".join(sorted((folder.name for folder in stubs.glob("3.*")), key=lambda name: int(name[2:])))
            raise EngineError(
                f"the installed nvidia-pytriton runs models under Python {offered or 'unknown'}, and this is "
                f"{sys.version_info.major}.{sys.version_info.minor}: use one of those, or another release of the wheel"
            )
        check_numpy()
        return cls(server, libraries, stub)


def check_numpy() -> None:
    """Raises EngineError for a numpy that would kill the model's process at its first request."""
    from numpy import __version__ as version

    if int(version.split(".")[0]) >= 2:
        raise EngineError(
            f"numpy {version} crashes the Python backend of Triton 24.10, the release inside nvidia-pytriton (its "
            "pybind11 2.10 cannot read numpy 2 arrays): pip install 'numpy<2' in this environment"
        )


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a server."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Three currently free ports; Triton itself cannot choose free ports."""
        sockets = [socket.socket() for _ in range(3)]
        try:
            for opened in sockets:
                opened.bind(("127.0.0.1", 0))
            return cls(*(opened.getsockname()[1] for opened in sockets))
        finally:
            for opened in sockets:
                opened.close()


class TritonServer:
    """A tritonserver process with a model repository. `with` waits until it is ready, and at the end stops it."""

    def __init__(
        self,
        repository: Path,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        models: Sequence[str] | None = None,
        ready_timeout: float = 120.0,
        exit_timeout: int = 5,
        log: Path | None = None,
    ) -> None:
        """ports: None takes free ports. models: load these models and allow loading and unloading while the server
        runs; None loads all. ready_timeout: seconds until `start` gives up. exit_timeout: seconds for running requests
        to end. log: file for the server's output; None shows the output only in errors.

        Raises EngineError if the server is not installed.
        """
        self.repository = repository.resolve()
        self.ports = ports or Ports.free()
        self.host = host
        self._distribution = Distribution.find()
        self._models = models
        self._ready_timeout, self._exit_timeout = ready_timeout, exit_timeout
        self._folder = Path(tempfile.mkdtemp(prefix="draftwood-triton-"))
        self.log = log or self._folder / "tritonserver.log"
        self._memory_prefix = f"draftwood_{os.getpid()}_{self.ports.http}_"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http(self) -> str:
        return f"{self.host}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def metrics(self) -> str:
        return f"http://{self.host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start, and wait until every model is loaded. Raises EngineError with the end of the server's log."""
        backends = self._install_backend()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(backends),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # allows ending the server and the model processes together
            )
        deadline = time.monotonic() + self._ready_timeout
        while not self._is_ready():
            code = self._process.poll()
            if code is not None:
                self.stop()
                raise EngineError(f"tritonserver ended with exit code {code}; its last words:\n{self.last_words()}")
            if time.monotonic() > deadline:
                self.stop()
                waited = f"tritonserver was not ready within {self._ready_timeout:g} s"
                raise EngineError(f"{waited}; its last words:\n{self.last_words()}")
            time.sleep(POLL_SECONDS)

    def wait(self) -> int:
        """Wait until the server ends by itself. Returns its exit code."""
        assert self._process is not None, "wait() before start()"
        return self._process.wait()

    def last_words(self) -> str:
        """The end of the server's log, without the tables after the errors."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line and line[0] not in "+|"][-LOG_LINES:])

    def stop(self) -> None:
        """End the server and its model processes. Model processes that remain, as after a crash, are killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(self._exit_timeout + 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for region in SHARED_MEMORY.glob(self._memory_prefix + "*"):
            region.unlink(missing_ok=True)

    def __enter__(self) -> TritonServer:
        try:
            self.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _install_backend(self) -> Path:
        """Make a backend folder with the stub of this Python, because the server does not find the wheel's stubs."""
        backend = self._folder / "backends" / "python"
        backend.mkdir(parents=True)
        for name in BACKEND_FILES:
            shutil.copy2(self._distribution.server / "backends" / "python" / name, backend)
        shutil.copy2(self._distribution.stub, backend)
        (backend / STUB).chmod(0o755)
        return backend.parent

    def _command(self, backends: Path) -> list[str]:
        # With setpriv, the kernel ends the server if this process is killed.
        guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [
            *guard,
            str(self._distribution.server / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._memory_prefix}",
            "--disable-auto-complete-config",  # the configuration is complete, and completing it would take two seconds
            f"--exit-timeout-secs={self._exit_timeout}",
            "--allow-gpu-metrics=false",
        ]
        for name in ("http", "grpc", "metrics"):
            command += [f"--{name}-address={self.host}", f"--{name}-port={getattr(self.ports, name)}"]
        if self._models is not None:
            command += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in self._models)]
        return command

    def _environment(self) -> dict[str, str]:
        """This process's environment, changed so that the stub runs the same Python.

        Without the wheel's libraries the stub cannot start, and the server waits for it for ever. The stub embeds
        libpython: ours must come first, or an older one of the system is taken. The stub uses the packages of the first
        python on PATH.
        """
        own = [str(sysconfig.get_config_var("LIBDIR"))] if sysconfig.get_config_var("Py_ENABLE_SHARED") else []
        inherited = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
        libraries = os.pathsep.join([*own, str(self._distribution.libraries), *inherited])
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return os.environ | {"LD_LIBRARY_PATH": libraries, "PATH": path}

    def _is_ready(self) -> bool:
        """Whether every model is loaded and metrics are there: their address opens last."""
        try:
            for address in (f"http://{self.http}/v2/health/ready", self.metrics):
                urllib.request.urlopen(address, timeout=1).close()
        except OSError:
            return False
        return True
