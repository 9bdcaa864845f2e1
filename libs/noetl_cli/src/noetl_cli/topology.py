"""Shows who owns which shard, and sees a change of their number through."""

import asyncio
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from noetl_cli.failure import EXIT_FAILED, EXIT_TIMEOUT, CommandFailed
from noetl_cli.target import running_target
from noetl_cli.terminal import print_json
from noetl_core.wire.http import ResizeView, ShardsView, ShardView

_LOOK_SECONDS = 0.1


async def show_shards(*, as_json: bool) -> None:
    async with running_target() as target:
        view = await target.gateway.shards()
    if as_json:
        print_json(view)
        return
    console = Console()
    console.print(_headline(view), soft_wrap=True)
    table = Table(box=None)
    for heading in ("role", "shard", "owner", "epoch", "lease", "behind"):
        table.add_column(heading, no_wrap=True)
    for shard in view.shards:
        name = f"{shard.shard_id} (leaving)" if shard.is_leaving else str(shard.shard_id)
        owner = shard.instance or "nobody"
        table.add_row(shard.role, name, owner, str(shard.epoch), _lease(shard), _behind(shard))
    console.print(table)


async def resize_shards(count_from: int, count_to: int, *, seconds: float) -> None:
    async with running_target() as target:
        view = await target.gateway.resize_shards(shards_from=count_from, shards_to=count_to)
        try:
            async with asyncio.timeout(seconds):
                while not _is_done(view.resize):
                    await asyncio.sleep(_LOOK_SECONDS)
                    view = await target.gateway.shards()
        except TimeoutError:
            raise _late(view.resize, seconds) from None


def _is_done(resize: ResizeView | None) -> bool:
    if resize is not None and resize.refused:
        raise CommandFailed(f"it was refused: {resize.refused}", exit_code=EXIT_FAILED)
    return resize is not None and resize.drained_at is not None


def _late(resize: ResizeView | None, seconds: float) -> CommandFailed:
    if resize is None or resize.switched_at is None:
        reason = (
            f"the wish is stored, but no shard-manager has granted it for {seconds:g} s: "
            "see that one runs"
        )
    else:
        reason = (
            f"the count is changed, but a projection still reads events of before after "
            f"{seconds:g} s: see that projections run"
        )
    return CommandFailed(f"{reason}. Look again: noetl shards", exit_code=EXIT_TIMEOUT)


def _headline(view: ShardsView) -> str:
    resize = view.resize
    if resize is None:
        return f"{view.count} shards"
    change = f"from {resize.shards_from} to {resize.shards_to}"
    if resize.refused:
        return f"{view.count} shards; the change {change} was refused: {resize.refused}"
    if resize.switched_at is None:
        return f"{view.count} shards; a change {change} is wished for"
    if resize.drained_at is None:
        return f"{view.count} shards; changed {change}, events of before are still being projected"
    return f"{view.count} shards; changed {change} at {resize.switched_at:%Y-%m-%d %H:%M:%S}"


def _lease(shard: ShardView) -> str:
    if shard.instance is None or shard.leased_until is None:
        return "-"
    return f"{(shard.leased_until - datetime.now(UTC)).total_seconds():.0f} s"


def _behind(shard: ShardView) -> str:
    if shard.waiting is not None:
        return f"{shard.waiting} waiting" if shard.waiting else ""
    return "" if shard.lag_ms is None else f"{shard.lag_ms} ms"
