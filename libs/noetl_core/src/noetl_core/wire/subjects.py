"""Every NATS subject, spelled once.

noetl.events.{shard}.batch           worker, reaper, other systems -> broker   (JetStream)
noetl.events.{shard}.{type}          the same, one message of that type
noetl.inbox.{shard}                  gateway -> broker: look into noetl.inbox now
noetl.epochs                         checkpointer -> brokers, projections: close these epochs
noetl.epochs.projected               projection -> checkpointer: closed epochs can be recorded
noetl.commands.{shard}.pool.{pool}   broker -> one idle worker of the pool: there is work
noetl.commands.{shard}.worker.{id}   broker -> that worker
noetl.shards.{role}                  shard-manager, owners -> owners: look who shall have what
noetl.topology                       shard-manager -> whoever looks: who owns what, who is alive
noetl.resize                         gateway -> shard-manager: another shard count is wished for
noetl.log.{shard}                    broker -> projection: the log has grown (LOG_ENDED: to an end)
noetl.executions.ended               projection -> gateways: these can be read as ended now
"""

from noetl_core.domain.ids import ShardId, WorkerId

EVENT_STREAM = "NOETL_EVENTS"
EVENT_STREAM_SUBJECTS = ("noetl.events.>",)

ANY_INBOX_WAKE = "noetl.inbox.*"
EPOCHS_CLOSE = "noetl.epochs"
EPOCHS_PROJECTED = "noetl.epochs.projected"
EXECUTIONS_ENDED = "noetl.executions.ended"
RESIZE_WISHED = "noetl.resize"
TOPOLOGY = "noetl.topology"

LOG_ENDED = b"end"
"""Body of a log wake-up when an execution ended: somebody may be waiting, do not dawdle."""


def event_batch(shard: ShardId) -> str:
    return f"noetl.events.{shard}.batch"


def shard_events(shard: ShardId) -> str:
    return f"noetl.events.{shard}.>"


def event_consumer(shard: ShardId, opening: str = "") -> str:
    """The consumer that whoever owns the shard reads from; every opening makes one of its own."""
    return f"broker-{shard}-{opening}"


def inbox_wake(shard: ShardId) -> str:
    return f"noetl.inbox.{shard}"


def pool_wake(shard: ShardId, pool: str) -> str:
    return f"noetl.commands.{shard}.pool.{pool}"


def any_pool_wake(pool: str) -> str:
    return f"noetl.commands.*.pool.{pool}"


def worker_wake(shard: ShardId, worker_id: WorkerId) -> str:
    return f"noetl.commands.{shard}.worker.{worker_id}"


def any_worker_wake(worker_id: WorkerId) -> str:
    return f"noetl.commands.*.worker.{worker_id}"


def shards_wake(role: str) -> str:
    return f"noetl.shards.{role}"


def log_wake(shard: ShardId) -> str:
    return f"noetl.log.{shard}"
