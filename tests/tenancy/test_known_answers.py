"""C02: published answers for the primitives that the formats stand on, asked through the ways in which we call them.

Sources. AES-256-GCM: McGrew and Viega, "The Galois/Counter Mode of Operation", appendix B, cases 13 to 16 (also in
NIST's CAVP set). HMAC-SHA-256: RFC 4231, cases 1, 2 and 6. BLAKE3 keyed: the official ``test_vectors.json``.
HKDF-Expand: RFC 5869, test case 1, for SHA-256; the RFC has none for SHA-512, so that one is compared with the RFC's
own definition, written out over HMAC.
"""

from __future__ import annotations

import hmac

import pytest
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st

from tenancy.keys.kdf import committing_key
from tenancy.keys.secret import SecretBytes

_KEY = "feffe9928665731c6d6a8f9467308308" * 2
_PLAIN = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525"
    "b16aedf5aa0de657ba637b391aafd255"
)
_CIPHER = (
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838"
    "c5f61e6393ba7a0abcc9f662898015ad"
)
# key, nonce, plaintext, associated data, ciphertext, tag
GCM = {
    13: ("00" * 32, "00" * 12, "", "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
    14: ("00" * 32, "00" * 12, "00" * 16, "", "cea7403d4d606b6e074ec5d3baf39d18", "d0d1c8a799996bf0265b98b5d48ab919"),
    15: (_KEY, "cafebabefacedbaddecaf888", _PLAIN, "", _CIPHER, "b094dac5d93471bdec1a502270e3cc6c"),
    16: (
        _KEY,
        "cafebabefacedbaddecaf888",
        _PLAIN[:120],
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        _CIPHER[:120],
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
}


@pytest.mark.parametrize("case", GCM)
def test_C02_aes_256_gcm(case: int) -> None:
    key, nonce, plain, associated, cipher, tag = (bytes.fromhex(text) for text in GCM[case])
    sealed, opened = memoryview(bytearray(len(plain) + 16)), memoryview(bytearray(len(plain)))
    AESGCM(key).encrypt_into(nonce, plain, associated, sealed)
    assert sealed == cipher + tag
    AESGCM(key).decrypt_into(nonce, sealed, associated, opened)
    assert opened == plain
    sealed[-1] ^= 1
    with pytest.raises(InvalidTag):
        AESGCM(key).decrypt_into(nonce, sealed, associated, opened)


@pytest.mark.parametrize(
    ("key", "message", "digest"),
    [
        (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (
            b"\xaa" * 131,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
    ],
)
def test_C02_hmac_sha_256(key: bytes, message: bytes, digest: str) -> None:
    assert hmac.digest(key, message, "sha256").hex() == digest


def test_C02_hkdf_expand_sha_256() -> None:
    pseudorandom_key = bytes.fromhex("077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5")
    okm = HKDFExpand(SHA256(), 42, bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")).derive(pseudorandom_key)
    assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=40), st.binary(min_size=32, max_size=32), st.binary())
def test_C02_hkdf_expand_sha_512_is_rfc_5869s(key: bytes, label: bytes, salt: bytes, rest: bytes) -> None:
    info = label + salt + rest
    first = hmac.digest(key, info + b"\x01", "sha512")
    okm = (first + hmac.digest(key, first + info + b"\x02", "sha512"))[:76]
    derived = committing_key(SecretBytes(key), label, salt, rest)
    assert derived.key + derived.nonce + derived.commitment == okm
    assert (len(derived.key), len(derived.nonce), len(derived.commitment)) == (32, 12, 32)


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        (0, "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"),
        (1, "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b"),
        (1024, "75c46f6f3d9eb4f55ecaaee480db732e6c2105546f1e675003687c31719c7ba4"),
        (8192 - 1023, "ed9b1a922c046fdb3d423ae34e143b05ca1bf28b710432857bf738bcedbfa511"),
    ],
)
def test_C02_blake3_keyed(length: int, digest: str) -> None:
    data = bytes(index % 251 for index in range(length))
    assert blake3(data, key=b"whats the Elvish word for friend").hexdigest() == digest
