"""A peer's own environment: ``.venv-bench-<peer>`` from ``requirements/bench-<peer>.lock``, over the developers' own.

What a peer needs of the system and is not there is taken from Debian packages, unpacked inside the environment: nothing
is installed, and root is not needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
INSTALL_SECONDS: Final = 240.0


class PeerAbsent(Exception):
    """A peer cannot be installed or does not run here; the sentence says why."""


@dataclass(frozen=True)
class Needs:
    """What a peer takes besides its lock file, with the Debian packages that hold it."""

    peer: str
    program: str = ""
    """Must be on PATH or in the packages."""
    library: str = ""
    """Must be known to the loader or in the packages."""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """A peer's interpreter, its program if it has one, and the variables that both need."""

    python: Path
    program: Path | None
    variables: dict[str, str]


def prepare(needs: Needs, root: Path = ROOT) -> Environment:
    """Build the environment if it is not there or older than its lock. Raises `PeerAbsent`."""
    folder, lock = root / f".venv-bench-{needs.peer}", root / "requirements" / f"bench-{needs.peer}.lock"
    stamp = folder / ".installed"
    python = folder / "bin" / "python"
    if not (python.exists() and stamp.exists()) or stamp.stat().st_mtime < lock.stat().st_mtime:
        _build(folder, lock)
        stamp.touch()
    unpacked = folder / "debian"
    program = shutil.which(needs.program) if needs.program else None
    there = program if needs.program else find_library(needs.library) if needs.library else "nothing"
    if there is not None:
        return Environment(python, Path(program) if program else None, {})
    if not (unpacked / ".unpacked").exists():
        _unpack(needs.packages, unpacked)
    found = unpacked / "usr" / "bin" / needs.program if needs.program else None
    if found is not None and not found.exists():
        raise PeerAbsent(f"the Debian packages {', '.join(needs.packages)} hold no program {needs.program}")
    libraries = sorted({str(path.parent) for path in unpacked.rglob("*.so*")})
    return Environment(python, found, {"LD_LIBRARY_PATH": ":".join(libraries)})


def _build(folder: Path, lock: Path) -> None:
    if not (folder / "bin" / "python").exists():
        _run(sys.executable, "-m", "venv", str(folder))
    # What an environment needs besides comes first on the path; the rest is the developers'.
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "developers.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(*pip, "--no-compile", "--no-deps", "-r", str(lock))


def _unpack(packages: tuple[str, ...], folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise PeerAbsent(f"it is not installed, and there is no apt-get to fetch {', '.join(packages)} with")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _run("apt-get", "download", "--quiet", *packages, folder=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(folder))
    (folder / ".unpacked").touch()


def _run(*command: str, folder: Path = ROOT) -> None:
    try:
        run = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=INSTALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerAbsent(f"{os.path.basename(command[0])} did not do its work: {error}") from error
    if run.returncode:
        said = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:] or ["nothing"]
        raise PeerAbsent(f"`{' '.join(command[:6])} …` ended with {run.returncode}; it said: {said[0]}")
