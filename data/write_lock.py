"""One writer per folder, without flock (which network file systems may not have).

The lock is a file made with O_EXCL: of two processes that try, exactly one makes it. It says who
holds it and its holder touches it every half minute. A lock is taken over when its holder is
certainly gone: its process no longer exists on this machine, or, from another machine, nobody
touched it for `STALE_AFTER_SECONDS`. Anything less certain is an error that says what to look at.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

LOCK_NAME = ".writer.lock"
HEARTBEAT_SECONDS = 30.0
STALE_AFTER_SECONDS = 900.0
"""Our choice: thirty missed heartbeats, far beyond the stalls of a busy network file system."""


@dataclass(frozen=True)
class LockHolder:
    """Content of a lock file."""

    token: str
    """Random name of this holding, so that a lock is never mistaken for its successor."""
    pid: int
    host: str
    process_start: int | None
    """Start time from /proc, in clock ticks since boot: a process id may be given out again."""
    since: str


def _process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in brackets, may itself hold spaces; field 22 is the 20th after it.
    return int(stat.rpartition(")")[2].split()[19])


def _is_alive(holder: LockHolder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It runs, as another user.
    return _process_start(holder.pid) == holder.process_start


def _read(path: Path) -> LockHolder | None:
    """The holder, or None when the file is gone or was cut short by a crash."""
    try:
        return LockHolder(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, TypeError):
        return None


def _create(path: Path, content: str) -> bool:
    """Makes the file unless there is one; True when this call made it."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(file, "w") as stream:
        stream.write(content)
    return True


class WriteLock:
    """Context manager: holds `folder` for writing.

    Raises:
        ValueError: when entered while another run writes there; or from `check`, when this run
            has lost the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._holder = LockHolder(
            token=secrets.token_hex(8),
            pid=os.getpid(),
            host=socket.gethostname(),
            process_start=_process_start(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        self._stop = Event()
        self._heartbeat = Thread(target=self._beat, daemon=True)

    def __enter__(self) -> WriteLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(asdict(self._holder))
        if not _create(self.path, content):
            self._remove_stale()
            if not _create(self.path, content):
                raise ValueError(self._refusal(_read(self.path)))
        self._heartbeat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._heartbeat.join()
        if _read(self.path) == self._holder:
            self.path.unlink()

    def check(self) -> None:
        """Stops a run that was suspended so long that another one took its lock over."""
        if _read(self.path) != self._holder:
            raise ValueError(
                f"{self.path} is no longer this run's: another run took the folder over, or the "
                "file was deleted. Let the other run finish; then run this command again."
            )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return  # `check` reports it.

    def _is_stale(self, holder: LockHolder | None) -> bool:
        if holder is not None and holder.host == socket.gethostname():
            return not _is_alive(holder)
        try:
            age = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return False
        return age > STALE_AFTER_SECONDS

    def _remove_stale(self) -> None:
        """Removes a dead holder's lock; raises when the holder may be at work."""
        holder = _read(self.path)
        if not self._is_stale(holder):
            raise ValueError(self._refusal(holder))
        # Only whoever makes this second file may remove that one lock, and looks again first:
        # two runs that both found the old lock stale must not remove each other's new one.
        name = holder.token if holder is not None else "unreadable"
        claim = self.path.with_name(f"{LOCK_NAME}.{name}")
        if not _create(claim, ""):
            raise ValueError(
                f"Another run is taking over {self.path} right now. Try again; if {claim} is still "
                "there then, delete both files."
            )
        try:
            if _read(self.path) == holder:
                self.path.unlink(missing_ok=True)
        finally:
            claim.unlink()

    def _refusal(self, holder: LockHolder | None) -> str:
        who = (
            f"process {holder.pid} on {holder.host} since {holder.since}"
            if holder is not None
            else "a run that has not signed its lock yet"
        )
        return (
            f"{self.path.parent} is being written by {who}. Wait for it, or stop it. If that run "
            f"is gone for certain, delete {self.path} and run this command again; what it finished "
            "is kept."
        )
