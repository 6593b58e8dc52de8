"""C01: the names of the format page; and that no two different things share one."""

from __future__ import annotations

import hashlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.kvformat import KVFormat, LayerGroup
from tenancy.keys.secret import SecretBytes
from tenancy.naming import NameKeys, entry_keys, format_fingerprint, label_mac, length_prefixed
from tests.tenancy.samples import FINGERPRINT, ID_KEY, NAMES

ENGINE_KEY = bytes.fromhex("7a7acef7ef73cbce02dd3dcc2636dc39a844bced021c289c9bf0e70278332bd5")


def test_c01_naming_keys() -> None:
    assert NAMES.chunk_id.reveal().hex() == "6434a42d6d90608de2ef048f7ff5204504048fb245910b56a4c5a37169e85821"
    assert NAMES.fingerprint.reveal().hex() == "abd96f1df84b2b4d606cf0e251444b6bab14746ce67b6bef2bc065f2d7da7d2d"
    assert NAMES.entry.reveal().hex() == "e23113d1899bf5159fa778332cb91358a66277d7869939959a08f3553028da6e"
    assert NAMES.label.reveal().hex() == "8591662e27c9ff86a3cbd8d7e3aa3427a21b9576d9c92912213992b4bf80c747"


def test_c01_names() -> None:
    vector = KVFormat(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        weights=hashlib.sha256(b"weights").digest(),
        tokenizer=hashlib.sha256(b"tokenizer").digest(),
        kv_dtype="float32",
        kv_quantisation=None,
        adapter=None,
        adapter_digest=None,
        positions=("kind", "rope", "theta", 100000.0),
        attention=(LayerGroup("mha", 30, kv_heads=3, head_dim=64),),
        layout="layer,kv,token,head,dim",
        tokens_per_chunk=256,
        engine="transformers",
        engine_abi="1",
        parallel=(1, 0, 1, 0, 1, 0),
        multimodal=None,
        extra=(),
    )
    assert format_fingerprint(NAMES.fingerprint, vector.canonical()) == FINGERPRINT
    (name,) = entry_keys(NAMES.entry, FINGERPRINT, [ENGINE_KEY])
    assert name.hex() == "1898a1391e5003bc3dfcb53ce317a5c9e520167bfa96dede11a821edd7919de6"
    mac = label_mac(NAMES.label, "user", "alice")
    assert mac.hex() == "091c0c5a1fc98343c9161f3d3055763f79f80d85e064f1fe374003b05ac4d9ec"


def test_entry_keys_keep_their_order_and_do_not_touch_each_other() -> None:
    engine_keys = [bytes([index]) * 32 for index in range(5)]
    names = entry_keys(NAMES.entry, FINGERPRINT, engine_keys)
    assert names == [entry_keys(NAMES.entry, FINGERPRINT, [key])[0] for key in engine_keys]
    assert len(set(names)) == 5
    assert entry_keys(NAMES.entry, FINGERPRINT, []) == []


def test_another_id_key_gives_other_names() -> None:
    other = NameKeys.derive(SecretBytes(bytes(32)))
    assert entry_keys(other.entry, FINGERPRINT, [ENGINE_KEY]) != entry_keys(NAMES.entry, FINGERPRINT, [ENGINE_KEY])
    assert format_fingerprint(other.fingerprint, b"x") != format_fingerprint(NAMES.fingerprint, b"x")
    assert label_mac(other.label, "user", "alice") != label_mac(NAMES.label, "user", "alice")


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_no_two_field_lists_share_an_encoding(left: list[bytes], right: list[bytes]) -> None:
    assert (length_prefixed(*left) == length_prefixed(*right)) == (left == right)


def test_a_boundary_between_fields_is_part_of_a_label() -> None:
    assert label_mac(NAMES.label, "use", "ralice") != label_mac(NAMES.label, "user", "alice")


def test_an_id_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="an id key has 32 bytes, not 31"):
        NameKeys.derive(SecretBytes(bytes(31)))


def test_c19_keys_do_not_show() -> None:
    for shown in (repr(NAMES), f"{NAMES}", repr(ID_KEY), f"{ID_KEY!s}"):
        assert "SecretBytes(32 bytes)" in shown
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(NAMES)
