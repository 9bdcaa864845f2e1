"""Which shard an execution belongs to. `noetl.vnode()` in the schema is the same function in SQL.

A vnode never changes; the shard is `vnode % shard_count`, so the count can change without touching
a row. The hash is a 32-bit finaliser whose products stay below 2**63, because bigint arithmetic in
Postgres raises on overflow where Python would go on.
"""

from noetl_core.domain.ids import ExecutionId, ShardId, VnodeId

VNODE_COUNT = 1024
SHARD_COUNT_DEFAULT = 16

_MULTIPLIER = 73_244_475
_MASK_32 = 0xFFFFFFFF


def vnode_of(execution_id: ExecutionId) -> VnodeId:
    mixed = ((execution_id & _MASK_32) ^ (execution_id >> 32)) & _MASK_32
    mixed = (mixed * _MULTIPLIER) & _MASK_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER) & _MASK_32
    return VnodeId((mixed ^ (mixed >> 16)) % VNODE_COUNT)


def shard_of(execution_id: ExecutionId, *, shard_count: int) -> ShardId:
    return ShardId(vnode_of(execution_id) % shard_count)
