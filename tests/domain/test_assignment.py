"""domain/assignment.py: shares are fair, owners keep what they have, and no shard moves in vain."""

import random
from collections import Counter

import pytest

from noetl_core.domain.assignment import fair_share_max, moves
from noetl_core.domain.ids import RuntimeId, ShardId

Owners = dict[ShardId, RuntimeId | None]


def owned(*counts: int) -> Owners:
    """Member 1 holds the first so many shards, member 2 the next, ..."""
    holders = [RuntimeId(m) for m, count in enumerate(counts, 1) for _ in range(count)]
    return {ShardId(shard): holder for shard, holder in enumerate(holders)}


def members(count: int) -> list[RuntimeId]:
    return [RuntimeId(number) for number in range(1, count + 1)]


def after(owners: Owners, living: list[RuntimeId]) -> Owners:
    return owners | {move.shard_id: move.taker for move in moves(owners, living)}


def sizes(owners: Owners) -> list[int]:
    return sorted(Counter(owners.values()).values())


def random_case(random_: random.Random) -> tuple[Owners, list[RuntimeId]]:
    everyone = members(random_.randint(1, 9))
    owners: Owners = {
        ShardId(shard): random_.choice([*everyone, None])
        for shard in range(random_.randint(1, 130))
    }
    living = random_.sample(everyone, random_.randint(1, len(everyone)))
    return owners, living


@pytest.mark.parametrize("seed", range(300))
def test_every_shard_has_a_living_owner_and_shares_differ_by_one_at_most(seed: int) -> None:
    owners, living = random_case(random.Random(seed))

    result = after(owners, living)

    counts = Counter(result.values())
    assert set(counts) <= set(living)
    shares = [counts[member] for member in living]
    assert max(shares) - min(shares) <= 1
    assert max(shares) <= fair_share_max(shards=len(owners), members=len(living))


@pytest.mark.parametrize("seed", range(300))
def test_no_fair_assignment_moves_fewer_shards(seed: int) -> None:
    owners, living = random_case(random.Random(seed))
    share, left_over = divmod(len(owners), len(living))
    held = sorted((sum(o == m for o in owners.values()) for m in living), reverse=True)
    kept_at_most = sum(min(h, share + (i < left_over)) for i, h in enumerate(held))

    assert len(moves(owners, living)) == len(owners) - kept_at_most


@pytest.mark.parametrize("seed", range(100))
def test_what_is_fair_already_stays_and_the_order_of_names_does_not_matter(seed: int) -> None:
    random_ = random.Random(seed)
    owners, living = random_case(random_)
    shuffled = random_.sample(living, len(living))

    assert moves(owners, living) == moves(owners, shuffled)
    assert moves(after(owners, living), living) == ()


def test_only_who_holds_too_much_gives_and_only_to_who_has_too_little() -> None:
    found = moves(owned(6, 6, 4), members(4))

    assert Counter(move.giver for move in found) == {RuntimeId(1): 2, RuntimeId(2): 2}
    assert {move.taker for move in found} == {RuntimeId(4)}


def test_a_fourth_member_moves_its_fair_share_and_no_more() -> None:
    owners = owned(6, 5, 5)

    assert len(moves(owners, members(4))) == 4
    assert sizes(after(owners, members(4))) == [4, 4, 4, 4]


def test_the_shards_of_a_dead_member_are_shared_by_the_living_and_nothing_else_moves() -> None:
    owners = owned(4, 4, 4, 4)
    living = members(4)[:3]

    found = moves(owners, living)

    assert {move.giver for move in found} == {None}
    assert len(found) == 4


def test_without_a_living_member_nothing_can_be_assigned() -> None:
    assert moves(owned(3), []) == ()


def test_more_members_than_shards_leave_some_idle_and_nothing_moves() -> None:
    assert moves(owned(1, 1), members(5)) == ()
