"""The audit log on SQLite; an export, tampered with line by line; and the speed of verifying one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvgw.settings import SettingsError
from kvgw.verify import CheckpointLine, HeadLine, Line, Log, RecordLine, encode_line, verify_file
from kvgw.witness import append
from tenancy.audit.chain import Record
from tenancy.audit.checkpoints import CheckpointBroken, read, sign
from tenancy.audit.verifying import Finding
from tests.tenancy.audit_bench import OTHER_SIGNER, SIGNER
from tests.tenancy.audit_contract import AuditContract
from tests.tenancy.catalog_bench import NOW
from tests.tenancy.test_catalog_sqlite import OnSqlite, empty_catalog  # noqa: F401  # a fixture

RECORDS_PER_SECOND_MIN = 15_000
"""On one core; 50,000 is what a machine without neighbours must reach, and a busy one may fall short of."""


class TestAuditOnSqlite(OnSqlite, AuditContract):
    pass


def export(count: int) -> list[Line]:
    """An exported log of `count` records with a checkpoint in its middle and one at its end."""
    lines: list[Line] = [Log(1, True, SIGNER.public_key.hex())]
    previous = bytes(32)
    for seq in range(1, count + 1):
        one = Record(
            seq, NOW, "token:abcdefghijklmnop", "chunk.delete", None, None, "", "done", '{"asked":1}', previous, b""
        )
        one = replace(one, hash=one.expected_hash())
        previous = one.hash
        lines.append(line_of(one))
        if seq in (count // 2, count):
            lines.append(CheckpointLine(seq, sign(SIGNER, seq, previous, NOW).note))
    return [*lines, HeadLine(count, previous.hex())]


def line_of(one: Record) -> RecordLine:
    _, _, actor, action, tenant, namespace, target, result, detail = one.fields()
    return RecordLine(
        one.seq,
        one.at_ms,
        actor,
        action,
        tenant,
        namespace,
        target,
        result,
        detail,
        one.previous.hex(),
        one.hash.hex(),
    )


def write(file: Path, lines: list[Line]) -> Path:
    file.write_bytes(b"".join(map(encode_line, lines)))
    return file


def test_S21_an_export_is_verified_without_a_database(tmp_path: Path) -> None:
    lines = export(20)
    verdict = verify_file(write(tmp_path / "whole", lines), None, None)
    assert (verdict.finding, verdict.records, verdict.checkpoints) == (Finding.WHOLE, 20, 2)
    for number in range(len(lines)):
        file = write(tmp_path / "cut", lines[:number])
        with pytest.raises(SettingsError, match=r"does not begin|has no end"):
            verify_file(file, None, None)
        one = lines[number]
        if isinstance(one, RecordLine):
            without = verify_file(write(tmp_path / "cut", [*lines[:number], *lines[number + 1 :]]), None, None)
            assert (without.finding, without.seq) == (Finding.TAMPERED if one.seq < 20 else Finding.TRUNCATED, one.seq)
    assert verify_file(write(tmp_path / "x", lines), OTHER_SIGNER.public_key, None).finding is Finding.TAMPERED
    (tmp_path / "x").write_bytes((tmp_path / "whole").read_bytes().replace(b'"kind":"record"', b'"kind":"rec', 1))
    with pytest.raises(SettingsError, match="line 2 of"):
        verify_file(tmp_path / "x", None, None)


def test_an_export_is_held_against_a_copy_of_the_checkpoints(tmp_path: Path) -> None:
    lines, beside = export(20), tmp_path / "audit" / "checkpoints"
    file = write(tmp_path / "log", lines)
    heads = [read(one.note, SIGNER.public_key) for one in lines if isinstance(one, CheckpointLine)]
    for one in heads:
        append(beside, one)
    assert verify_file(file, None, beside).checkpoints == 4
    append(beside, sign(SIGNER, 25, b"x" * 32, NOW))
    assert (verify_file(file, None, beside).finding, verify_file(file, None, beside).seq) == (Finding.TRUNCATED, 21)


def test_a_line_that_a_crash_tore_is_cut_off_before_the_next(tmp_path: Path) -> None:
    file = tmp_path / "audit" / "checkpoints"
    one, other = (sign(SIGNER, seq, b"x" * 32, NOW) for seq in (1, 2))
    append(file, one)
    whole = file.read_bytes()
    for torn in range(1, len(whole)):
        file.write_bytes(whole + whole[:torn])
        append(file, other)
        assert file.read_bytes().startswith(whole)
        assert file.read_bytes().count(b"\n") == 2
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_note_is_a_signed_note_and_every_changed_character_breaks_it() -> None:
    one = sign(SIGNER, 1234, bytes(range(32)), NOW)
    assert read(one.note, SIGNER.public_key) == one
    text, _, signatures = one.note.partition("\n\n")
    assert text.splitlines()[0].startswith("kvgw-audit/")
    assert text.splitlines()[1] == "1234"
    assert signatures.startswith("— kvgw-audit/")
    with pytest.raises(CheckpointBroken, match="not of this log"):
        read(one.note, OTHER_SIGNER.public_key)
    for place in range(len(one.note)):
        changed = one.note[:place] + ("1" if one.note[place] != "1" else "2") + one.note[place + 1 :]
        with pytest.raises(CheckpointBroken):
            read(changed, SIGNER.public_key)


def test_S21_an_export_is_verified_fast_enough(tmp_path: Path) -> None:
    file = write(tmp_path / "log", export(50_000))
    started = time.process_time()
    assert verify_file(file, None, None).finding is Finding.WHOLE
    speed = 50_000 / (time.process_time() - started)
    print(f"verified {speed:,.0f} records/s on one core")
    assert speed > RECORDS_PER_SECOND_MIN
