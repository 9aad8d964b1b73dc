"""Runs one program and makes sure that it never outlives its supervisor.

A resident of a few megabytes, started by ``process.py`` as a script of its own that
imports little of the standard library and nothing of linkcpp. Its three standard streams are all
that the supervisor sees:

- stdin is the life line. Nothing is ever written to it; when it ends, because the supervisor
  closed it or was killed in whatever way, the program is stopped: SIGTERM to its process group,
  and SIGKILL once the grace time is over. A keeper that a signal stopped is woken for that, on
  Linux also by the supervisor's death.
- stdout relays the program's output. The log file has all of it; a supervisor that does not read
  loses lines, but never slows the program down.
- stderr reports: ``started PID``, ``failed ERRNO``, ``exited CODE``, ``killed SIGNAL``.

The program writes to a pseudo-terminal, since stock programs buffer their output for minutes when
it is a pipe. The terminal controls the program's session, so the program gets SIGHUP when its
keeper dies; on Linux it also gets SIGKILL (PR_SET_PDEATHSIG). SIGPIPE is ignored in the program:
ggml-rpc-server would die of it.

Arguments: log file, most bytes of it, grace seconds, folders of libraries (joined as in PATH, or
empty), then the program and its arguments.
"""

import contextlib
import fcntl
import os
import resource
import select
import signal
import sys
import termios
import time
from collections.abc import Callable

_READ_BYTES = 1 << 16
_BACKLOG_BYTES = 1 << 18
_FLUSH_SECONDS = 2.0
_KILL_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_LIFE, _RELAY, _REPORT = 0, 1, 2


class Log:
    """The log file and its predecessor (``.1``), each at most ``max_bytes`` long."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max(max_bytes, _READ_BYTES)
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size_bytes = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append; a full disk costs lines of the log, not the program."""
        with contextlib.suppress(OSError):
            if self._size_bytes + len(data) > self._max_bytes:
                with contextlib.suppress(FileNotFoundError):  # somebody removed it
                    os.replace(self._path, f"{self._path}.1")  # noqa: PTH105
                os.close(self._descriptor)
                self._open()
            os.write(self._descriptor, data)
            self._size_bytes += len(data)


class Relay:
    """Output on its way to the supervisor. If that does not read, the oldest lines are lost."""

    def __init__(self) -> None:
        os.set_blocking(_RELAY, False)
        self.backlog = bytearray()
        self._is_inside_line = False
        self._is_closed = False

    def add(self, data: bytes) -> None:
        """Queue output; drop whole lines from the front where too much waits already."""
        if self._is_closed:
            return
        self.backlog += data
        if len(self.backlog) > _BACKLOG_BYTES:
            half = len(self.backlog) - _BACKLOG_BYTES // 2
            line_end = self.backlog.find(b"\n", half)
            kept_from = half if line_end < 0 else line_end + 1
            self.backlog[:kept_from] = b"\n" if self._is_inside_line else b""

    def send(self) -> None:
        """Write what the pipe takes now."""
        try:
            sent = os.write(_RELAY, self.backlog)
        except BlockingIOError:
            return
        except OSError:
            self._is_closed = True
            self.backlog.clear()
            return
        if sent:
            self._is_inside_line = self.backlog[sent - 1] != ord("\n")
            del self.backlog[:sent]


class Keeper:
    """One program from its start to its end."""

    def __init__(self, log: Log, grace_seconds: float) -> None:
        self._log = log
        self._relay = Relay()
        self._grace_seconds = grace_seconds
        self._pid = 0
        self._terminal, self._program_end = os.openpty()
        os.set_blocking(self._terminal, False)
        self._stop_at: float | None = None
        self._wakeup, wakeup_write = os.pipe()
        for descriptor in (self._wakeup, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)

    def run(self, argv: list[str], environment: dict[str, str]) -> int:
        """Run the program and return its wait status."""
        self._pid = _spawn(argv, environment, self._program_end)
        try:
            status = self._watch()
        except BaseException:
            self._signal_group(signal.SIGKILL)
            raise
        # What the program itself started shares its process group and must not stay either.
        self._signal_group(signal.SIGKILL)
        self._drain()
        return status

    def _watch(self) -> int:
        life_ended = False
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return status
            wanted = [self._terminal, self._wakeup] + ([] if life_ended else [_LIFE])
            writers = [_RELAY] if self._relay.backlog else []
            readable, writable, _ = select.select(wanted, writers, [], self._wait_seconds())
            if self._terminal in readable:
                self._read_output()
            if writable:
                self._relay.send()
            if _LIFE in readable and not _read(_LIFE):
                life_ended = True
                self._begin_stop()
            if self._wakeup in readable and signal.SIGTERM in _read(self._wakeup):
                self._begin_stop()

    def _wait_seconds(self) -> float | None:
        if self._stop_at is None:
            return None
        left = self._stop_at - time.monotonic()
        if left <= 0:
            self._signal_group(signal.SIGKILL)
            self._stop_at = time.monotonic() + _KILL_SECONDS
            return _KILL_SECONDS
        return left

    def _begin_stop(self) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._grace_seconds
            # Whoever is stopped hears nothing until it goes on.
            for number in (signal.SIGTERM, signal.SIGCONT):
                self._signal_group(number)
                with contextlib.suppress(ProcessLookupError):
                    # A program that has only just been forked has no group yet.
                    os.kill(self._pid, number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _read_output(self) -> bool:
        data = _read(self._terminal)
        self._log.write(data)
        self._relay.add(data)
        return bool(data)

    def _drain(self) -> None:
        give_up_at = time.monotonic() + _FLUSH_SECONDS
        while self._read_output() and time.monotonic() < give_up_at:
            self._relay.send()
        while self._relay.backlog and (left := give_up_at - time.monotonic()) > 0:
            select.select([], [_RELAY], [], left)
            self._relay.send()


def _read(descriptor: int) -> bytes:
    """Return what is there, or nothing at the end, on an error, and when there is nothing yet."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError:
        return b""


def _report(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_REPORT, f"{line}\n".encode())


def _spawn(argv: list[str], environment: dict[str, str], terminal: int) -> int:
    """Start the program in a session of its own, with ``terminal`` as output and control.

    Returns once the program itself runs, or has failed to.
    """
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)
    prctl = _parent_death_call()
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
    keeper = os.getpid()
    # Closed by a successful exec, so its end tells success.
    outcome, outcome_write = os.pipe()
    # A SIGTERM between fork and exec must wait for the program, not meet this script's handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(outcome_write)
        failure = _read(outcome)
        _report(f"failed {failure.decode()}" if failure else f"started {pid}")
        return pid
    try:
        os.setsid()
        with contextlib.suppress(OSError):
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != keeper:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for standard, descriptor in enumerate((null, terminal, terminal)):
            os.dup2(descriptor, standard)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - running programs is its purpose
    except OSError as error:
        os.write(outcome_write, str(error.errno).encode())
    finally:
        # Whatever happened, the forked copy of the keeper must not go on as a second keeper.
        os._exit(127)


def _parent_death_call() -> Callable[[int, int], int] | None:
    """Return Linux's ``prctl``; it is looked up before the fork, as a fork should do little."""
    if sys.platform not in ("linux", "android"):
        return None
    # Not imported elsewhere: it costs a megabyte.
    import ctypes  # noqa: PLC0415

    prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return prctl


def _main() -> None:
    log_path, max_bytes, grace_seconds, libraries, *argv = sys.argv[1:]
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for heard in (signal.SIGTERM, signal.SIGCHLD):
        # A handler, even an empty one, is what makes the wake-up descriptor ring.
        signal.signal(heard, lambda *_: None)
    environment = dict(os.environ)
    if libraries:
        name = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
        before = environment.get(name)
        environment[name] = f"{libraries}{os.pathsep}{before}" if before else libraries
    status = Keeper(Log(log_path, int(max_bytes)), float(grace_seconds)).run(argv, environment)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _report(f"killed {number}")
        # Die of the same signal, so that the exit status is the program's, but leave no core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _report(f"exited {os.WEXITSTATUS(status)}")
    sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    _main()
