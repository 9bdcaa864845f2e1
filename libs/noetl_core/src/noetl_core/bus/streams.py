"""The JetStream streams we need. They hold nothing authoritative: whoever misses one makes it."""

from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from noetl_core.wire.subjects import EVENT_STREAM, EVENT_STREAM_SUBJECTS

API_SECONDS_MAX = 2.0
MAX_AGE_SECONDS = 3600.0
_MAX_BYTES = 1 << 30


def event_stream(found: StreamConfig | None = None) -> StreamConfig:
    """Of one that is there, what we do not ask for stays: how often it is replicated, say."""
    return (found or StreamConfig()).evolve(
        name=EVENT_STREAM,
        subjects=list(EVENT_STREAM_SUBJECTS),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=MAX_AGE_SECONDS,
        max_bytes=_MAX_BYTES,
    )


async def ensure_streams(client: Client) -> None:
    """Make the streams that are missing, and correct those that were made otherwise."""
    jetstream = client.jetstream(timeout=API_SECONDS_MAX)
    try:
        await jetstream.add_stream(event_stream())
    except BadRequestError:
        # The name is in use with other settings: an older version of us made it, or somebody has
        # replicated it.
        there = await jetstream.stream_info(EVENT_STREAM)
        await jetstream.update_stream(event_stream(there.config))
