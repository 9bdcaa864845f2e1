"""What runs in a data directory right now, written by its supervisor, read by everyone else."""

import msgspec

from noetl_cli.stack.data_dir import DataDir, write_atomically
from noetl_cli.stack.processes import ProcessRecord, is_alive


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    dsn: str
    nats_url: str
    data_dir: str
    supervisor: ProcessRecord
    parts: tuple[ProcessRecord, ...] = ()
    metrics: dict[str, str] = {}
    """Where they are, by the name of the part."""
    is_ready: bool = False


def write_state(data_dir: DataDir, state: StackState) -> None:
    write_atomically(data_dir.state_file, msgspec.json.encode(state).decode())


def read_state(data_dir: DataDir) -> StackState | None:
    """None if there is none, or it cannot be read: the file is a hint, never a truth."""
    try:
        return msgspec.json.decode(data_dir.state_file.read_bytes(), type=StackState)
    except (OSError, msgspec.MsgspecError):
        return None


def read_running(data_dir: DataDir) -> StackState | None:
    """The state of the stack, if its supervisor is alive."""
    state = read_state(data_dir)
    return state if state is not None and is_alive(state.supervisor) else None
