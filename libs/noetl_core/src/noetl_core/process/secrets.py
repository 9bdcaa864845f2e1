"""Encryption of credentials at rest: AES-256-GCM, bound to the name of the credential.

`NOETL_ENCRYPTION_KEY` holds 32 bytes in base64, or several such keys with commas between them: the
first encrypts, all of them decrypt, so a key can be changed without a moment without one. The name
is authenticated with the data, so a row cannot be copied under another name.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from noetl_core.domain.errors import RejectedError
from noetl_core.store.credential import Sealed

KEY_BYTES = 32
NONCE_BYTES = 12


class SecretsError(RejectedError):
    """A key is missing or wrong, or what it should open was tampered with."""


class Keyring:
    """The keys of this process. Never printed."""

    def __init__(self, keys: list[bytes]) -> None:
        assert keys, "a keyring has at least one key"
        self._ciphers = {key_id_of(key): AESGCM(key) for key in keys}
        self.key_id = key_id_of(keys[0])

    def encrypt(self, name: str, data: Mapping[str, Any]) -> Sealed:
        nonce = os.urandom(NONCE_BYTES)
        body = msgspec.json.encode(dict(data))
        ciphertext = self._ciphers[self.key_id].encrypt(nonce, body, name.encode())
        return Sealed(self.key_id, nonce, ciphertext)

    def decrypt(self, name: str, sealed: Sealed) -> dict[str, Any]:
        cipher = self._ciphers.get(sealed.key_id)
        if cipher is None:
            raise SecretsError(
                f"credential {name!r} was encrypted with key {sealed.key_id}, which is not in "
                "NOETL_ENCRYPTION_KEY"
            )
        try:
            body = cipher.decrypt(sealed.nonce, sealed.ciphertext, name.encode())
        except InvalidTag:
            raise SecretsError(
                f"credential {name!r} is damaged, or not the one of this name"
            ) from None
        data: dict[str, Any] = msgspec.json.decode(body)
        return data

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._ciphers)})"


def load_keyring(text: str) -> Keyring:
    """From the value of NOETL_ENCRYPTION_KEY."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise SecretsError("NOETL_ENCRYPTION_KEY is not set: credentials cannot be used")
    return Keyring([_key(part) for part in parts])


def generate_key() -> str:
    """A fresh value for NOETL_ENCRYPTION_KEY."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


def key_id_of(key: bytes) -> str:
    """Names a key without telling anything about it."""
    return hashlib.sha256(b"noetl key id " + key).hexdigest()[:12]


def _key(text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SecretsError(f"NOETL_ENCRYPTION_KEY must be {KEY_BYTES} bytes in base64")
    return key
