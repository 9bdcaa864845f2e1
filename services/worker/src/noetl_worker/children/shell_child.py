"""Runs one command for the `shell` tool and leaves nothing of it behind.

Runs as a file, not as a module, and imports next to nothing, because every command waits for it:

    python shell_child.py MEMORY_MB CPU_SECONDS DIRECTORY -- PROGRAM ARGUMENT ...

worker ── stdin, held open ──> this process ── fork ──> the command, in a session of its own

The worker never writes to our stdin: it ends when the worker closes it or dies, and then so does
the command. Whatever the command has left running when it ends, even under another session, becomes
our child and is killed. We end the way the command did.
"""

import os
import resource
import select
import signal
import sys

CANNOT_RUN = 126
NOT_FOUND = 127
_SET_CHILD_SUBREAPER = 36
_SET_DEATH_SIGNAL = 1


def main(arguments: list[str]) -> None:
    memory_mb, cpu_seconds, directory, _, *command = arguments
    _control_process(_SET_CHILD_SUBREAPER, 1)
    ended = _pipe_of_ended_children()
    child = os.fork()
    if child == 0:
        _become(command, directory, memory_mb=int(memory_mb), cpu_seconds=int(cpu_seconds))
    _let_go_of_output()
    _wait(child, ended)
    # Not reaped before its group is killed: until then nobody else can get its number.
    _kill_group(child)
    _, status = os.waitpid(child, 0)
    _kill_orphans()
    _end_like(status)


def _pipe_of_ended_children() -> int:
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable)
    return readable


def _become(command: list[str], directory: str, *, memory_mb: int, cpu_seconds: int) -> None:
    os.setsid()
    _control_process(_SET_DEATH_SIGNAL, signal.SIGKILL)
    _take_nothing_from_us()
    _limit(resource.RLIMIT_CORE, 0, 0)
    if memory_mb:
        _limit(resource.RLIMIT_AS, memory_mb * 1024 * 1024, memory_mb * 1024 * 1024)
    if cpu_seconds:
        # The first limit sends SIGXCPU, which says what happened; the second one SIGKILL.
        _limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)  # noqa: S606 - this process exists to do that
    except OSError as error:
        os.write(2, f"{error.filename or command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN)


def _take_nothing_from_us() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Python ignores the first two, and a program inherits that: `yes | head` would never end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _let_go_of_output() -> None:
    """The worker reads until nobody can write any more; we must not be the one who could."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _wait(child: int, ended: int) -> None:
    """Until the command has ended, or the worker wants no more of it."""
    while True:
        readable, _, _ = select.select([0, ended], [], [])
        if 0 in readable:
            return
        os.read(ended, 4096)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return


def _kill_orphans() -> None:
    """Whoever has come to us because its parent is gone, until there is nobody left."""
    while True:
        for orphan in _children():
            _kill_group(orphan)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - fewer imports
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _kill_group(pid: int) -> None:
    """The process, and the group it leads if it does."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0, 0)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _limit(which: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(which)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(which, (soft, hard))


def _control_process(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - not needed elsewhere

        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
