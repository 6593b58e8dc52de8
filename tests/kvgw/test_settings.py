"""Settings: whatever is unknown or wrong stops the start and is named; no sentence holds a secret."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvgw.server.listeners import tcp_endpoint
from kvgw.settings import S3Settings, Settings, SettingsError, default_data_dir, load
from kvgw.wiring.tiers import s3_options
from storage.errors import StorageError

SECTIONS = {name: kind for name, kind in Settings.__annotations__.items() if name != "node"}
FIELDS = [
    (section, field.encode_name)
    for section in SECTIONS
    for field in msgspec.structs.fields(type(getattr(Settings(), section)))
]
SERVICE_LINKS = {
    "KVGW_PORT": "tcp://10.0.0.7:8470",
    "KVGW_SERVICE_HOST": "10.0.0.7",
    "KVGW_SERVICE_PORT": "8470",
    "KVGW_SERVICE_PORT_HTTP": "8470",
    "KVGW_PORT_8470_TCP": "tcp://10.0.0.7:8470",
    "KVGW_PORT_8470_TCP_PROTO": "tcp",
    "KVGW_PORT_8470_TCP_ADDR": "10.0.0.7",
    "KVGW_BLUE_SERVICE_PORT_ADMIN": "8471",
}
SECRET = "s3cr3t-Value/9"

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["C"]), max_size=12),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.integers(), max_size=2),
)


def written(folder: Path, text: str) -> Path:
    file = folder / "kvgw.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_is_needed() -> None:
    assert load(None, {}) == (Settings(), [])
    assert load(None, {"PATH": "/bin", "HOME": "/", "AWS_SECRET_ACCESS_KEY": SECRET}) == (Settings(), [])


def test_a_file_and_variables_over_it(tmp_path: Path) -> None:
    file = written(tmp_path, "node = 'n1'\n[staging]\nbytes = 33554432\n[server]\nhttp = ''\nlisten = '127.0.0.1:1'\n")
    found, notes = load(
        file,
        {
            "KVGW__SERVER__LISTEN": "127.0.0.1:2",
            "KVGW__SERVER__ALLOW_PLAINTEXT": "TRUE",
            "KVGW__NVME__ENABLED": "false",
            "KVGW__STAGING__TENANTS": "7",
            "KVGW__S3__REQUEST_SECONDS": "2.5",
            "KVGW_TOKEN": SECRET,
            "KVGW_DATA": "/data",
        },
    )
    assert notes == []
    assert (found.node, found.staging.bytes, found.staging.tenants) == ("n1", 33554432, 7)
    assert (found.server.listen, found.server.http, found.server.allow_plaintext) == ("127.0.0.1:2", "", True)
    assert (found.nvme.enabled, found.s3.request_seconds) == (False, 2.5)


@pytest.mark.parametrize("text", ["true", "False", "null", "12", "1e3"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert load(None, {"KVGW__NODE": text})[0].node == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nlisen = 'x'", "lisen"),
        ("[sever]\nlisten = 'x'", "sever"),
        ("bytes = 1", "bytes"),
        ("[staging]\nbytes = 'many'", "staging.bytes"),
        ("[staging]\nbytes = -1", "staging.bytes"),
        ("[staging]\nbytes = 1024", "staging.bytes"),
        ("[staging]\nbytes = 1.5", "staging.bytes"),
        ("[staging]\ntenants = 0", "staging.tenants"),
        ("[nvme]\nenabled = 'perhaps'", "nvme.enabled"),
        ("[nvme]\ncapacity_bytes = -5", "nvme.capacity_bytes"),
        ("[nvme]\nmin_free_bytes = -5", "nvme.min_free_bytes"),
        ("[defaults]\ndurability = 'ssd'", "defaults.durability"),
        ("[defaults]\nttl_seconds = 0", "defaults.ttl_seconds"),
        ("[defaults]\nttl_seconds = 100\nmax_ttl_seconds = 99", "defaults.ttl_seconds 100"),
        ("[s3]\nrequest_seconds = 0", "s3.request_seconds"),
        ("[s3]\naddressing = 'both'", "s3.addressing"),
        ("server = 'x'", "server"),
        ("[server\n", "not TOML"),
        ("node = '" + "n" * 65 + "'", "node"),
    ],
)
def test_F08_what_is_unknown_or_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as refusal:
        load(written(tmp_path, text), {})
    assert str(tmp_path / "kvgw.toml") in str(refusal.value) or "defaults." in str(refusal.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read"):
        load(tmp_path / "none.toml", {})
    (tmp_path / "latin.toml").write_bytes(b"node = '\xff'")
    with pytest.raises(SettingsError, match="not TOML"):
        load(tmp_path / "latin.toml", {})


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("KVGW_LISTNE", "KVGW_LISTNE"),
        ("KVGW_STAGING_BYTES", "KVGW_STAGING_BYTES"),
        ("KVGW__SERVER__LISTNE", "listne"),
        ("KVGW__SEVER__LISTEN", "sever"),
        ("KVGW__STAGING__BYTES", "staging.bytes"),
        ("KVGW__SERVER__LISTEN__MORE", "server.listen"),
        ("KVGW__NODE__MORE", "node"),
        ("KVGW__", "unknown field ``"),
    ],
)
def test_F08_a_wrong_variable_stops_the_start_and_its_value_is_not_shown(variable: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as refusal:
        load(None, {variable: SECRET})
    assert SECRET not in str(refusal.value)


def test_a_variable_inside_a_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="KVGW__NODE__MORE"):
        load(written(tmp_path, "node = 'n'"), {"KVGW__NODE__MORE": "x"})


def test_R37_service_links_are_ignored_with_a_note_each() -> None:
    found, notes = load(None, SERVICE_LINKS)
    assert found == Settings(), "R37: no port is ever read out of tcp://"
    assert len(notes) == len(SERVICE_LINKS)
    for name in SERVICE_LINKS:
        assert any(note.startswith(name + " ") and "enableServiceLinks" in note for note in notes), name
    with pytest.raises(SettingsError, match="KVGW_LISTNE"):
        load(None, {**SERVICE_LINKS, "KVGW_LISTNE": "x"})


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(FIELDS), scalars)
@example(("s3", "secret_access_key"), SECRET)
@example(("staging", "bytes"), 10**30)
def test_F08_any_value_of_any_key_is_taken_or_refused_by_name(
    tmp_path: Path, field: tuple[str, str], value: object
) -> None:
    section, key = field
    file = written(tmp_path, f"[{section}]\n{key} = {as_toml(value)}\n")
    try:
        found, _ = load(file, {})
    except SettingsError as error:
        assert key in str(error)
        assert SECRET not in str(error)
    else:
        assert isinstance(found, Settings)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("Infinity", "inf")


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20), st.text(max_size=20))
def test_F08_any_variable_of_ours_is_taken_noted_or_refused(name: str, value: str) -> None:
    try:
        found, notes = load(None, {f"KVGW_{name}": value})
    except SettingsError:
        return
    assert isinstance(found, Settings)
    assert notes or name.startswith("_") or name in ("TOKEN", "ENDPOINT", "CONFIG", "DATA")


@pytest.mark.parametrize(
    "endpoint",
    [
        "file:///etc/passwd",
        "gopher://127.0.0.1:70",
        f"https://user:{SECRET}@s3.example",
        f"https://{SECRET}@s3.example",
        f"https://s3.example/?key={SECRET}",
        "s3.example",
        "https://",
        "http://s3.example",
        "http://169.254.169.254",
        "https://s3.example:99999",
    ],
)
def test_F08_an_s3_endpoint_to_which_no_signed_request_may_go_is_refused(tmp_path: Path, endpoint: str) -> None:
    key_file = tmp_path / "secret"
    key_file.write_text(SECRET)
    chosen = S3Settings(bucket="bucket", endpoint=endpoint, access_key_id="AKIA", secret_access_key_file=str(key_file))
    with pytest.raises((StorageError, SettingsError)) as refusal:
        s3_options(chosen)
    assert SECRET not in str(refusal.value)
    assert "endpoint" in str(refusal.value)


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=str(tmp_path / "none")):
        s3_options(S3Settings(bucket="b", access_key_id="a", secret_access_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("address", ["", "8470", "host:", ":8470", "127.0.0.1:tcp", "127.0.0.1:65536", "127.0.0.1:-1",
                                     "127.0.0.1:٣", "tcp://10.0.0.7:8470"])  # fmt: skip
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"address|beyond this host"):
        tcp_endpoint(address, allow_plaintext=False)


@pytest.mark.parametrize("address", ["0.0.0.0:8470", "[::]:8470", "10.0.0.7:8470", "gateway.example:8470"])
def test_beyond_this_host_only_when_told_so(address: str) -> None:
    with pytest.raises(SettingsError, match="beyond this host"):
        tcp_endpoint(address, allow_plaintext=False)
    assert tcp_endpoint(address, allow_plaintext=True).port == 8470
    assert tcp_endpoint("[::1]:1", allow_plaintext=False).host == "::1"
    assert tcp_endpoint("localhost:1", allow_plaintext=False).host == "localhost"


def test_where_the_data_folder_is() -> None:
    assert default_data_dir({"KVGW_DATA": "/d", "XDG_DATA_HOME": "/x", "HOME": "/h"}) == Path("/d")
    assert default_data_dir({"XDG_DATA_HOME": "/x", "HOME": "/h"}) == Path("/x/kvgw")
    assert default_data_dir({"HOME": "/h"}) == Path("/h/.local/share/kvgw")
