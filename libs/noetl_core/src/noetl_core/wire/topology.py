"""Who owns which shard and who is alive, as the shard-manager publishes it on NATS (JSON).

For people, dashboards and gateways. Nobody decides by it: who may write a shard is proved by the
epoch in the writer's own transaction.
"""

import msgspec

from noetl_core.domain.ids import ShardId


class ShardOwnership(msgspec.Struct, frozen=True, kw_only=True):
    """`instance` is None while nobody holds the lease."""

    role: str
    shard_id: ShardId
    instance: str | None
    epoch: int


class RuntimeMember(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    name: str
    status: str


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    shard_count: int
    shards: tuple[ShardOwnership, ...]
    members: tuple[RuntimeMember, ...]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Topology).decode


def encode_topology(topology: Topology) -> bytes:
    return _encode(topology)


def decode_topology(body: bytes) -> Topology:
    return _decode(body)
