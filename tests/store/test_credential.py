"""Credentials: encrypted at rest, bound to their name, never listed with their data."""

import pytest

from noetl_core.process.secrets import Keyring, SecretsError, generate_key, load_keyring
from noetl_core.store import credential
from noetl_core.store.credential import Sealed
from noetl_core.store.postgres import Pool

DATA = {"dsn": "postgresql://u:hunter2@db/x", "nested": {"n": 1}}


@pytest.fixture
def keyring() -> Keyring:
    return load_keyring(generate_key())


async def test_what_was_stored_can_be_opened_again(pool: Pool, keyring: Keyring) -> None:
    await credential.upsert(pool, "pg", kind="postgres", sealed=keyring.encrypt("pg", DATA))

    row = await credential.load(pool, "pg")

    assert row is not None
    assert row.type == "postgres"
    assert keyring.decrypt("pg", row.sealed) == DATA
    assert await credential.load(pool, "other") is None


async def test_the_database_holds_nothing_of_the_plain_text(pool: Pool, keyring: Keyring) -> None:
    await credential.upsert(pool, "pg", kind="postgres", sealed=keyring.encrypt("pg", DATA))

    row = await pool.fetchval(
        "SELECT c::text || encode(ciphertext, 'escape') FROM noetl.credential c"
    )

    assert "hunter2" not in row


async def test_a_second_one_of_the_same_name_replaces_the_first(
    pool: Pool, keyring: Keyring
) -> None:
    first = await credential.upsert(pool, "a", kind="bearer", sealed=keyring.encrypt("a", {"n": 1}))
    second = await credential.upsert(pool, "a", kind="basic", sealed=keyring.encrypt("a", {"n": 2}))
    await credential.upsert(pool, "b", kind="basic", sealed=keyring.encrypt("b", {}))

    listed = await credential.list_entries(pool)

    assert [(entry.name, entry.type) for entry in listed] == [("a", "basic"), ("b", "basic")]
    assert second.created_at == first.created_at
    assert [e.name for e in await credential.list_entries(pool, after_name="a", limit=1)] == ["b"]


async def test_deleting_says_whether_there_was_one(pool: Pool, keyring: Keyring) -> None:
    await credential.upsert(pool, "a", kind="bearer", sealed=keyring.encrypt("a", {}))

    assert await credential.delete(pool, "a") is True
    assert await credential.delete(pool, "a") is False


def test_a_credential_cannot_be_passed_off_under_another_name(keyring: Keyring) -> None:
    sealed = keyring.encrypt("staging", DATA)

    with pytest.raises(SecretsError, match="damaged"):
        keyring.decrypt("production", sealed)


def test_a_changed_byte_is_noticed(keyring: Keyring) -> None:
    sealed = keyring.encrypt("pg", DATA)
    changed = bytes([sealed.ciphertext[0] ^ 1]) + sealed.ciphertext[1:]

    with pytest.raises(SecretsError):
        keyring.decrypt("pg", Sealed(sealed.key_id, sealed.nonce, changed))


def test_the_same_data_never_looks_the_same(keyring: Keyring) -> None:
    assert keyring.encrypt("pg", DATA) != keyring.encrypt("pg", DATA)


def test_an_old_key_still_opens_while_the_new_one_encrypts() -> None:
    old, new = generate_key(), generate_key()
    sealed = load_keyring(old).encrypt("pg", DATA)
    both = load_keyring(f"{new}, {old}")

    assert both.decrypt("pg", sealed) == DATA
    assert both.encrypt("pg", DATA).key_id == load_keyring(new).key_id
    with pytest.raises(SecretsError, match="not in NOETL_ENCRYPTION_KEY"):
        load_keyring(new).decrypt("pg", sealed)


@pytest.mark.parametrize("text", ["", "short", "bm90IDMyIGJ5dGVz", "!" * 44])
def test_a_wrong_key_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(SecretsError, match="NOETL_ENCRYPTION_KEY"):
        load_keyring(text)


def test_a_keyring_does_not_show_its_keys() -> None:
    key = generate_key()

    assert key not in repr(load_keyring(key))
