"""Where runs are kept: one JSON-lines file per run, written whole when the run ends and never changed after that.

    store = Store("results")
    with store.lock(run) as lock:              # None if it is finished, or another live process is at it
        ...                                    # train; keep what is unfinished at store.checkpoint(run)
        store.write(Record(run, "finished", epochs, final, about))
    store.get(run).final["test_accuracy"]

A file has a header line (the run, and about it: versions, hardware, commit, command), a line per epoch, and a last line
with the final metrics. A run is found by its own description, not by the name of its file, so that a `Run` may get new
fields, with defaults, without losing what was measured before.

    results/runs/cifar10-fc/KEY.jsonl          what is committed
    results/computed/stock2019-table1.json     results that need no training
    results/unfinished/                        checkpoints, locks, temporary files; git ignores it

Files appear whole or not at all, also with kill -9, a full disk or two processes that finish the same run (the first
one wins). Locks are taken over when their process is gone: on this machine at once, from another one (a shared file
system) when its heartbeat is older than `PATIENCE`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from ...errors import UserError
from ...files import set_aside, to_disk
from .runs import Run

__all__ = ["PATIENCE", "Computed", "DamagedError", "Lock", "Merged", "Record", "Scan", "Store", "dumps", "unpacked"]

PATIENCE = 120.0  # seconds without a heartbeat after which another machine's lock counts as abandoned
_BEATS = 8  # heartbeats in that time


@dataclass(frozen=True)
class Record:
    """A run that has ended, and all that was measured on the way."""

    run: Run
    status: Literal["finished", "diverged"]
    epochs: tuple[dict[str, Any], ...]
    final: dict[str, Any]  # test_accuracy (%), test_loss, train_loss, seconds; the reason of a divergence
    about: dict[str, Any] = field(default_factory=dict)  # versions, hardware, commit, command, started

    @property
    def together(self) -> float:
        """How many runs shared the device while this one was trained; where it was not measured, how many might."""
        if "device_seconds" in self.final:
            return float(self.final["seconds"] / self.final["device_seconds"])
        return float(self.about.get("side_by_side", 1))


@dataclass(frozen=True)
class Computed:
    """What the function of a `Compute` artifact returned."""

    name: str
    data: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    toy: bool = False


@dataclass(frozen=True)
class Scan:
    """All that a store holds: intact records and their files by the run's key, and the files that cannot be used."""

    records: dict[str, Record]
    paths: dict[str, Path]
    damaged: dict[Path, str]


@dataclass(frozen=True)
class Merged:
    """What `Store.merge` did: keys that are new here, keys that were here already, files that were refused."""

    added: tuple[str, ...]
    present: tuple[str, ...]
    damaged: dict[Path, str]


class DamagedError(Exception):
    """A file that is not a whole record: torn by a crash or a copy, or written by a newer version."""


class Store:
    """The runs in a folder. Any number of processes and machines may use one at the same time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._keys: dict[Path, str] = {}  # of the headers read so far

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, run: Run) -> Record | None:
        """The run's record; None if it has not ended, or its file is damaged."""
        for path in self._files_of(run):
            with suppress(DamagedError):
                return read(path)
        return None

    def path(self, run: Run) -> Path | None:
        """The file that holds the run's record."""
        return next((path for path in self._files_of(run) if _is_whole(path)), None)

    def records(self) -> Iterator[Record]:
        """Every intact record, each run once."""
        yield from self.scan().records.values()

    def scan(self) -> Scan:
        """Read everything once."""
        scan = Scan({}, {}, {})
        for path in self._files():
            try:
                record = read(path)
            except DamagedError as error:
                scan.damaged[path] = str(error)
                continue
            scan.records.setdefault(record.run.key, record)
            scan.paths.setdefault(record.run.key, path)
        return scan

    def _files(self) -> list[Path]:
        return sorted(self._runs.glob("*/*.jsonl"))

    def _files_of(self, run: Run) -> Iterator[Path]:
        usual = self._usual_path(run)
        if self._key(usual) == run.key:
            yield usual
        for path in self._files():
            if path != usual and self._key(path) == run.key:
                yield path

    def _key(self, path: Path) -> str | None:
        """The key of the run in a file, from its header alone; None if there is no such file or no header in it."""
        if path not in self._keys:
            try:
                with open(path, encoding="utf-8") as file:
                    self._keys[path] = _run_of(json.loads(file.readline())).key
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._keys[path]

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, record: Record) -> Path:
        """Keep a record; if the run has one already, that one stays. The run's checkpoint is removed."""
        text = dumps(record)
        path = self.path(record.run)
        if path is None:
            path = self._usual_path(record.run)
            # a file that is not whole is in the way of nobody but us
            if not self._put(path, text) and not _is_whole(path):
                self._put(path, text, over=True)
            self._keys.pop(path, None)
        with suppress(OSError):
            self.checkpoint(record.run).unlink()
        return path

    def checkpoint(self, run: Run) -> Path:
        """Where the trainer may keep an unfinished run."""
        return self._unfinished() / f"{_file_name(run.key)}.pt"

    def computed(self, name: str, toy: bool = False) -> Computed | None:
        """What was computed for an artifact; None if nothing was, or the file is damaged."""
        try:
            found = json.loads(self._computed_path(name, toy).read_text(encoding="utf-8"))
            return Computed(found["name"], found["data"], found["about"], found["toy"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_computed(
        self, name: str, data: Mapping[str, Any], toy: bool = False, about: Mapping[str, Any] | None = None
    ) -> Path:
        """Keep the result of a `Compute` artifact, in place of an earlier one."""
        path = self._computed_path(name, toy)
        content = {"name": name, "toy": toy, "about": dict(about or {}), "data": dict(data)}
        self._put(path, _json(content) + "\n", over=True)
        return path

    def merge(self, other: str | Path) -> Merged:
        """Take over the runs and computed results that another machine brought back; what is here already stays.

        `other` is a folder, or a file of many records one after the other (`pack`). Files that are torn or not
        understood are refused and named in the result.
        """
        if Path(other).is_file():
            return self._merge_pack(Path(other))
        source = Store(other)
        if not source._runs.is_dir() and not source._computed.is_dir():
            raise UserError(f"{other} holds no runs: expected a folder with {source._runs.name}/ in it")
        added: list[str] = []
        present: list[str] = []
        damaged: dict[Path, str] = {}
        for path in source._files():
            try:
                record = read(path)
            except DamagedError as error:
                damaged[path] = str(error)
                continue
            here = self.path(record.run)
            (added if here is None else present).append(record.run.key)
            if here is None:
                self.write(record)
        for path in sorted(source._computed.glob("*.json")):
            if not (self._computed / path.name).exists():
                try:
                    content = json.loads(path.read_text(encoding="utf-8"))
                    name, data, toy, about = (content[key] for key in ("name", "data", "toy", "about"))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    damaged[path] = f"{path} is not a computed result: {error}"
                    continue
                self.write_computed(name, data, toy, about)
                added.append(path.stem)
        return Merged(tuple(added), tuple(present), damaged)

    def _merge_pack(self, pack: Path) -> Merged:
        added: list[str] = []
        present: list[str] = []
        damaged: dict[Path, str] = {}
        for number, text in enumerate(unpacked(pack.read_text(encoding="utf-8"))):
            try:
                record = parse(text, pack)
            except DamagedError as error:
                damaged[Path(f"{pack}#{number}")] = str(error)
                continue
            here = self.path(record.run)
            (added if here is None else present).append(record.run.key)
            if here is None:
                self.write(record)
        return Merged(tuple(added), tuple(present), damaged)

    def _put(self, path: Path, text: str, over: bool = False) -> bool:
        """Put a whole file there or none; False if one is there already (unless it goes `over` it)."""
        temporary = self._unfinished() / f"{path.name}.{uuid4().hex}.tmp"
        with self._named_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "x", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                done = _replace(temporary, path) if over else _link(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
        with suppress(OSError):  # some file systems cannot sync a folder; the file itself is safe by now
            to_disk(path.parent)
        return done

    # -- who works on what ---------------------------------------------------------------------------------------------

    def lock(self, run: Run, patience: float = PATIENCE) -> Lock | None:
        """The right to work on a run; None if it has ended, or another live process works on it.

        `with store.lock(run) as lock:` gives it back at the end. A thread sends the heartbeat; `lock.beat()` sends
        one more and says whether the lock still holds. After kill -9 or a lost node it is free to be taken over.
        """
        if self.get(run) is not None:
            return None
        path = self._unfinished() / f"{_file_name(run.key)}.lock"
        me = {"machine": _machine(), "pid": os.getpid(), "born": _born(os.getpid()), "token": uuid4().hex}
        with self._guarded() as now:
            held = path.exists()
            if held and _is_alive(path, now, patience):
                return None
            if path.is_dir():
                set_aside(path)
            if not self._put(path, json.dumps(me), over=held):
                return None
        lock = Lock(self, path, str(me["token"]), patience / _BEATS)
        if self.get(run) is not None:  # it ended between the first look and the lock
            lock.release()
            return None
        return lock

    @contextmanager
    def _guarded(self) -> Iterator[float]:
        """Alone among the processes that look at locks, for a few system calls; gives the file system's own clock.

        Clocks of two machines differ, so the age of a heartbeat is measured against a file that was touched just now.
        """
        with self._named_errors(), open(self._unfinished() / "guard", "a") as file:
            with suppress(OSError):  # no flock on this file system: two machines might take over one lock
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                os.utime(file.fileno())
                yield os.fstat(file.fileno()).st_mtime
            finally:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # not left to close(): a forked child may hold the file open

    # -- places --------------------------------------------------------------------------------------------------------

    @property
    def _runs(self) -> Path:
        return self.folder / "runs"

    @property
    def _computed(self) -> Path:
        return self.folder / "computed"

    def _usual_path(self, run: Run) -> Path:
        return self._runs / _file_name(f"{run.data.name}-{run.model.name}") / f"{_file_name(run.key)}.jsonl"

    def _computed_path(self, name: str, toy: bool) -> Path:
        return self._computed / f"{_file_name(name.replace('/', '-'))}{'-toy' if toy else ''}.json"

    def _unfinished(self) -> Path:
        """The folder for what is on the way, made when it is needed. It tells git to ignore it."""
        folder = self.folder / "unfinished"
        ignore = folder / ".gitignore"
        if not ignore.exists():
            with self._named_errors():
                folder.mkdir(parents=True, exist_ok=True)
                ignore.write_text("*\n")
        return folder

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"cannot write to {self.folder}: {why}. Nothing was left half-written; make room or mend the "
                "permissions, and run the same command again"
            ) from error


class Lock:
    """The right of this process to work on a run, until `release` (or the end of a `with` block)."""

    def __init__(self, store: Store, path: Path, token: str, every: float) -> None:
        self._store, self._path, self._token = store, path, token
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, args=(every,), daemon=True, name="lock")
        self._thread.start()

    def beat(self) -> bool:
        """Say that this process is alive. False if the lock is lost: released, or taken over after a long silence."""
        if self._end.is_set() or _holder(self._path).get("token") != self._token:
            return False
        with suppress(OSError):  # the next beat may succeed
            os.utime(self._path)
        return True

    def release(self) -> None:
        """Let others have the run. Does nothing if the lock was lost, or in a forked child."""
        if self._end.is_set() or os.getpid() != self._pid:
            return
        self._end.set()
        with suppress(UserError), self._store._guarded():  # a lock that cannot be removed is taken over later
            if _holder(self._path).get("token") == self._token:
                self._path.unlink()

    def _keep_beating(self, every: float) -> None:
        while not self._end.wait(every) and self.beat():
            pass

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# -- the format --------------------------------------------------------------------------------------------------------


def dumps(record: Record) -> str:
    """The text of a record's file."""
    header = {"run": record.run.to_dict(), "about": record.about}
    last = {"status": record.status, "epochs": len(record.epochs), "final": record.final}
    return "".join(_json(line) + "\n" for line in (header, *record.epochs, last))


def unpacked(text: str) -> Iterator[str]:
    """The texts of the records in a file of many: each begins with a line that says what was run."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith('{"run":') and lines:
            yield "".join(lines)
            lines = []
        lines.append(line)
    if lines:
        yield "".join(lines)


def read(path: Path) -> Record:
    """The record in a file; `DamagedError` if it is not whole."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error


def parse(text: str, path: Path) -> Record:
    """The record in the text of a file."""
    *lines, rest = text.split("\n")  # not splitlines(), which also splits at characters that JSON leaves alone
    if rest or len(lines) < 2:
        raise DamagedError(f"{path} is torn: its last line is missing or not whole")
    try:
        header, *epochs, last = (json.loads(line) for line in lines)
        run, about = _run_of(header), header["about"]
        status, final, count = last["status"], last["final"], last["epochs"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is not a record: {type(error).__name__}: {error}") from error
    if count != len(epochs) or status not in ("finished", "diverged"):
        raise DamagedError(f"{path} is torn: it has {len(epochs)} of {count} epochs, status {status!r}")
    return Record(run, status, tuple(epochs), final, about)


def _run_of(header: Any) -> Run:
    try:
        return Run.from_dict(header["run"])
    except AttributeError as error:  # something else than a dictionary inside
        raise ValueError(str(error)) from error


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except DamagedError:
        return False
    return True


def _json(content: Any) -> str:
    # A run is not lost at its end because of something odd in it: objects become text, and a command line that is not
    # valid UTF-8 can be written since everything but ASCII is escaped.
    return json.dumps(_plain(content), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    """What JSON knows: tensors and arrays as numbers and lists; it has no NaN and no infinity, which become null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]", "_", text)


# -- files and processes -----------------------------------------------------------------------------------------------


def _replace(temporary: Path, path: Path) -> bool:
    os.replace(temporary, path)
    return True


def _link(temporary: Path, path: Path) -> bool:
    """Give a finished file its name, unless that name is taken: one step, so that the first of two writers wins."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return temporary.stat().st_nlink > 1  # NFS may answer a repeated request with "exists" when it did succeed
    except OSError:  # a file system without hard links, or a real error, which comes again
        if path.exists():
            return False
        return _replace(temporary, path)
    return True


def _holder(lock: Path) -> dict[str, Any]:
    """What a lock says about its process; empty if it is gone or damaged."""
    try:
        found = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kinds = {"machine": str, "pid": int, "born": str, "token": str}
    whole = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    return found if whole else {}


def _is_alive(lock: Path, now: float, patience: float) -> bool:
    holder = _holder(lock)
    if holder.get("machine") == _machine():
        born = _born(holder["pid"])
        return born is not None and born == holder["born"]
    try:
        return now - lock.stat().st_mtime < patience
    except FileNotFoundError:
        return False


@cache
def _machine() -> str:
    """Where a process number means something: the host since it was started, and the container on it."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _born(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's count; None if it is gone (or a zombie).

    Process numbers are used again; together with this they are not.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]
