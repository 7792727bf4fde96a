"""The store: records survive everything, each run is worked on once, and nothing is ever half-written."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equinorm.errors import UserError
from equinorm.lab.training import store
from equinorm.lab.training.runs import Data, Method, Model, Optim, Run
from equinorm.lab.training.schedules import Step
from equinorm.lab.training.store import DamagedError, Record, Store, dumps, parse

RUN = Run(Data("cifar10"), Model("fc", {"hidden": 3}), Method("enorm", {"c": 1.2}), Optim(lr=0.05), epochs=2)


def record(run: Run = RUN, accuracy: float = 54.5, epochs: int = 2) -> Record:
    lines = tuple({"epoch": i + 1, "train_loss": 1 / (i + 1)} for i in range(epochs))
    return Record(run, "finished", lines, {"test_accuracy": accuracy, "seconds": 1.5}, {"hardware": "CPU"})


def other(seed: int) -> Run:
    return replace(RUN, seed=seed)


# -- the format --------------------------------------------------------------------------------------------------------

# any character that a string may hold, line separators and lone surrogates among them
names = st.text(st.characters(exclude_categories=()), max_size=8)
numbers = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats()
values = st.recursive(
    numbers | names, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)
metrics = st.dictionaries(names, values, max_size=4)
records = st.builds(
    Record,
    st.builds(
        replace,
        st.just(RUN),
        seed=st.integers(0, 9),
        label=names,
        optim=st.builds(Optim, lr=st.floats(0, 1), schedule=st.just(Step(milestones=(0.3, 0.6)))),
        model=st.builds(
            Model, st.just("fc"), st.dictionaries(names, st.integers() | st.lists(st.integers(), max_size=2))
        ),
    ),
    st.sampled_from(["finished", "diverged"]),
    st.lists(metrics, max_size=3).map(tuple),
    metrics,
    metrics,
)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if value != value or value in (math.inf, -math.inf) else value


@given(records)
def test_a_record_comes_back_as_it_was_with_null_for_what_is_not_a_number(written: Record) -> None:
    text = dumps(written)
    found = parse(text, Path("x"))
    assert found.run.key == written.run.key
    assert found.run.label == written.run.label
    assert found.status == written.status
    assert [*found.epochs] == without_nan([*written.epochs])
    assert found.final == without_nan(written.final)
    assert found.about == without_nan(written.about)
    assert len(text.splitlines()) == len(written.epochs) + 2


@given(records, st.data())
def test_no_part_of_a_file_passes_for_a_record(written: Record, data: st.DataObject) -> None:
    text = dumps(written)
    cut = data.draw(st.integers(0, len(text) - 1))
    for damaged in (text[:cut], text + "x"):
        with pytest.raises(DamagedError):
            parse(damaged, Path("x"))


def test_tensors_arrays_and_objects_can_be_recorded(tmp_path: Path) -> None:
    final = {"a": torch.tensor([1.0, math.nan]), "b": np.float32(0.5), "c": Path("x"), "d": np.int64(3), "e": (1, 2)}
    Store(tmp_path).write(replace(record(), final=final))
    found = Store(tmp_path).get(RUN)
    assert found is not None
    assert found.final == {"a": [1.0, None], "b": 0.5, "c": "x", "d": 3, "e": [1, 2]}


# -- reading and writing -----------------------------------------------------------------------------------------------


def test_a_run_is_found_by_what_it_is(tmp_path: Path) -> None:
    """Not by its file's name; and a field that is new, with a default, does not change what it is."""
    here = Store(tmp_path)
    assert here.get(RUN) is None
    path = here.write(record())
    assert path == tmp_path / "runs" / "cifar10-fc" / f"{RUN.key}.jsonl"
    assert here.get(replace(RUN, label="another name")) == record()
    assert here.get(other(1)) is None
    header, rest = path.read_text().split("\n", 1)
    config = json.loads(header)
    del config["run"]["record"], config["run"]["data"]["manifold"]  # as if they had been added since
    renamed = path.with_name("cifar10-fc-old-name.jsonl")
    renamed.write_text(json.dumps(config) + "\n" + rest)
    path.unlink()
    assert here.get(RUN) == Store(tmp_path).get(RUN) == record()
    assert here.path(RUN) == renamed
    assert here.write(record(accuracy=1.0)) == renamed
    assert [r.run.key for r in here.records()] == [RUN.key]


def test_the_first_record_stays(tmp_path: Path) -> None:
    Store(tmp_path).write(record(accuracy=1.0))
    Store(tmp_path).write(record(accuracy=2.0))
    found = Store(tmp_path).get(RUN)
    assert found is not None
    assert found.final["test_accuracy"] == 1.0


@pytest.mark.parametrize("damage", ["torn", "empty", "binary", "newer", "list", "epochs", "schedule"])
def test_a_damaged_file_is_named_and_may_be_run_again(tmp_path: Path, damage: str) -> None:
    here = Store(tmp_path)
    here.write(record(other(1)))
    path = here.write(record())
    text = path.read_text()
    content = {
        "torn": text[:-20],
        "empty": "",
        "binary": "\x00\x01",
        "newer": text.replace('"seed": 0', '"seed": 0, "from_the_future": 1'),
        "list": text.replace('"data": {', '"data": 3, "x": {', 1),
        "epochs": text.replace('{"epoch": 2', '{"epoch": 2}\n{"epoch": 3'),
        "schedule": text.replace('"Linear"', '"Spiral"'),
    }[damage]
    path.write_bytes(b"\xff\xfe" if damage == "binary" else content.encode())
    fresh = Store(tmp_path)
    for reader in (here, fresh):
        assert reader.get(RUN) is None
        assert reader.path(RUN) is None
        scan = reader.scan()
        assert list(scan.records) == [other(1).key]
        assert list(scan.damaged) == [path]
        assert path.name in scan.damaged[path]
    with fresh.lock(RUN) as lock:  # type: ignore[union-attr]
        assert lock.beat()
        fresh.write(record(accuracy=7.0))
    assert fresh.get(RUN) == Store(tmp_path).get(RUN) == record(accuracy=7.0)
    assert not fresh.scan().damaged


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    here = Store(tmp_path / "results")
    here.write(record(other(1)))
    before = files_in(tmp_path)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if call == "open":
            patched.setattr(store, "open", full, raising=False)
        else:
            patched.setattr(os, call, full)
            if call == "link":
                patched.setattr(os, "replace", full)
        with pytest.raises(UserError, match=r"results.*No space left on device"):
            here.write(record())
    assert files_in(tmp_path) == before
    assert here.get(RUN) is None
    here.write(record())
    assert here.get(RUN) == record()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(UserError, match="results"):
        Store(tmp_path / "results").write(record())


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unknown)
    here = Store(tmp_path)
    lock = here.lock(RUN)
    assert lock is not None
    assert here.lock(RUN) is None
    here.write(record(accuracy=1.0))
    assert not here._put(here._usual_path(RUN), "x")
    lock.release()
    assert files_in(tmp_path / "unfinished") == [".gitignore", "guard"]


def test_the_checkpoint_goes_when_the_run_has_ended(tmp_path: Path) -> None:
    here = Store(tmp_path)
    here.checkpoint(RUN).write_bytes(b"half a net")
    assert (tmp_path / "unfinished" / ".gitignore").read_text() == "*\n"
    here.write(record())
    assert not here.checkpoint(RUN).exists()


def test_computed_results(tmp_path: Path) -> None:
    here = Store(tmp_path)
    assert here.computed("stock2019/table1") is None
    here.write_computed("stock2019/table1", {"a": [1, math.inf]}, about={"hardware": "CPU"})
    here.write_computed("stock2019/table1", {"a": "toy"}, toy=True)
    found = here.computed("stock2019/table1")
    assert found is not None
    assert (found.data, found.about, found.toy) == ({"a": [1, None]}, {"hardware": "CPU"}, False)
    toy = here.computed("stock2019/table1", toy=True)
    assert toy is not None
    assert toy.data == {"a": "toy"}
    (tmp_path / "computed" / "stock2019-table1.json").write_text('{"name"')
    assert here.computed("stock2019/table1") is None


def test_merging_what_another_machine_measured(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    here.write(record(other(0), accuracy=1.0))
    for seed in range(3):
        path = there.write(record(other(seed), accuracy=2.0))
    path.write_text(path.read_text()[:-5])
    there.write_computed("stock2019/table1", {"a": 1})
    merged = here.merge(tmp_path / "there")
    assert merged.added == (other(1).key, "stock2019-table1")
    assert merged.present == (other(0).key,)
    assert list(merged.damaged) == [path]
    accuracies = {r.run.seed: r.final["test_accuracy"] for r in here.records()}
    assert accuracies == {0: 1.0, 1: 2.0}
    assert here.computed("stock2019/table1") is not None
    assert here.merge(tmp_path / "there").added == ()
    with pytest.raises(UserError, match="nowhere"):
        here.merge(tmp_path / "nowhere")


# -- locks -------------------------------------------------------------------------------------------------------------


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    here = Store(tmp_path)
    with here.lock(RUN) as lock:  # type: ignore[union-attr]
        assert Store(tmp_path).lock(RUN) is None
        another = here.lock(other(1))
        assert another is not None
        another.release()
        assert lock.beat()
    assert not lock.beat()
    again = here.lock(RUN)
    assert again is not None
    lock.release()  # a second time, when another has it: nothing happens
    assert again.beat()
    here.write(record())
    again.release()
    assert here.lock(RUN) is None  # it has ended


def test_a_run_that_ends_while_it_is_locked_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the record and releases its lock between our look at the store and our lock."""
    here = Store(tmp_path)
    put = here._put

    def put_after_the_other(*arguments: Any, **options: Any) -> bool:
        monkeypatch.setattr(here, "_put", put)
        Store(tmp_path).write(record())
        return put(*arguments, **options)

    monkeypatch.setattr(here, "_put", put_after_the_other)
    assert here.lock(RUN) is None
    assert not list((tmp_path / "unfinished").glob("*.lock"))


def rewrite(lock: Path, age: float = 0.0, **changes: Any) -> None:
    lock.write_text(json.dumps(json.loads(lock.read_text()) | changes))
    os.utime(lock, (time.time() - age, time.time() - age))


@pytest.mark.parametrize(
    ("changes", "age", "free"),
    [
        ({"machine": "elsewhere"}, 5.0, False),
        ({"machine": "elsewhere"}, 500.0, True),
        ({}, 500.0, False),  # here it is the process that counts, not its silence
        ({"born": "1"}, 0.0, True),  # the process's number belongs to another one by now
        ({"pid": 2**22 + 1}, 0.0, True),
    ],
)
def test_which_locks_count(tmp_path: Path, changes: dict[str, Any], age: float, free: bool) -> None:
    here = Store(tmp_path)
    first = here.lock(RUN, patience=1000.0)  # no heartbeat in the meantime
    assert first is not None
    (lock,) = (tmp_path / "unfinished").glob("*.lock")
    rewrite(lock, age, **changes)
    second = here.lock(RUN, patience=100.0)
    assert (second is not None) == free
    if second is not None:
        assert not first.beat()
        first.release()  # must not remove the lock of the one that took over
        assert second.beat()
        second.release()
    assert lock.exists() == (not free)


def test_a_torn_lock_is_taken_over_when_it_is_old(tmp_path: Path) -> None:
    here = Store(tmp_path)
    file = here._unfinished() / f"{RUN.key}.lock"
    file.write_text('{"machi')
    assert here.lock(RUN) is None
    os.utime(file, (1.0, 1.0))
    lock = here.lock(RUN)
    assert lock is not None
    lock.release()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"[]", b"[" * 5000, b'{"machine": 3}', b'{"machine": "HERE", "pid": "1"}', None]
)
def test_a_damaged_lock_is_no_traceback(tmp_path: Path, content: bytes | None) -> None:
    """Nor is a folder in its place, which is set aside."""
    here = Store(tmp_path)
    file = here._unfinished() / f"{RUN.key}.lock"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content.replace(b"HERE", store._machine().encode()))
    assert here.lock(RUN) is None
    os.utime(file, (1.0, 1.0))
    lock = here.lock(RUN)
    assert lock is not None
    lock.release()
    assert (content is None) == file.with_name(f"{file.name}.damaged").exists()


def test_the_heartbeat(tmp_path: Path) -> None:
    lock = Store(tmp_path).lock(RUN, patience=0.08)
    assert lock is not None
    (file,) = (tmp_path / "unfinished").glob("*.lock")
    os.utime(file, (1.0, 1.0))
    assert eventually(lambda: file.stat().st_mtime > 1.0)
    lock.release()


def in_threads(action: Callable[[int], Any], count: int = 8) -> list[Any]:
    """What `action` returns in threads that start at the same moment."""
    start = threading.Barrier(count)
    results: list[Any] = []

    def act(i: int) -> None:
        start.wait()
        results.append(action(i))

    threads = [threading.Thread(target=act, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    return results


@pytest.mark.parametrize("abandoned", [False, True])
def test_of_many_that_want_a_run_one_gets_it(tmp_path: Path, abandoned: bool) -> None:
    for seed in range(10):
        run = other(seed)
        if abandoned:
            (Store(tmp_path)._unfinished() / f"{run.key}.lock").write_text(
                json.dumps({"machine": store._machine(), "pid": 2**22 + 1, "born": "1", "token": "old"})
            )
        locks = [lock for lock in in_threads(lambda _, run=run: Store(tmp_path).lock(run)) if lock is not None]
        assert len(locks) == 1
        assert locks[0].beat()
        locks[0].release()


def test_of_many_that_write_a_run_the_first_one_stays(tmp_path: Path) -> None:
    for seed in range(10):
        run = other(seed)

        def write_and_read(i: int, run: Run = run) -> float:
            Store(tmp_path).write(record(run, accuracy=i, epochs=100))
            found = Store(tmp_path).get(run)
            assert found is not None
            return float(found.final["test_accuracy"])

        assert len(set(in_threads(write_and_read))) == 1
    assert files_in(tmp_path / "unfinished") == [".gitignore"]


# -- processes that are killed -----------------------------------------------------------------------------------------

RUNS = 30


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def work(folder: str, worker: int) -> None:
    """Go through all runs until each has a record; say so in a log before each is written."""
    here = Store(folder)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while any(here.get(other(seed)) is None for seed in range(RUNS)):
        for seed in range(RUNS):
            lock = here.lock(other(seed))
            if lock is not None:
                with lock:
                    time.sleep(0.005)
                    here.write(record(other(seed), accuracy=worker, epochs=200))
                    os.write(log, f"{worker} {seed}\n".encode())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_grid_shared_by_processes_of_which_one_is_killed(tmp_path: Path) -> None:
    """Every run is finished once, whichever process dies when; what it was at is taken over at once."""
    fork = multiprocessing.get_context("fork")  # which need not import torch again
    workers = [fork.Process(target=work, args=(str(tmp_path), i)) for i in range(2)]
    for worker in workers:
        worker.start()
    try:
        assert eventually(lambda: len(list(tmp_path.glob("runs/*/*.jsonl"))) >= RUNS // 3)
        time.sleep(random.random() * 0.02)
        os.kill(workers[0].pid or 0, signal.SIGKILL)
        workers[1].join(60)
        assert workers[1].exitcode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    scan = Store(tmp_path).scan()
    assert len(scan.records) == RUNS
    assert not scan.damaged
    lines = (tmp_path / "log").read_text().split("\n")[:-1]
    # whoever wrote the record is the one who logged it; a process killed between the two logged nothing
    assert len(lines) == len(set(lines))
    seeds = [int(line.split()[1]) for line in lines]
    assert len(seeds) == len(set(seeds)) >= RUNS - 1
    written = {r.run.seed: r.final["test_accuracy"] for r in scan.records.values()}
    assert all(written[int(seed)] == int(worker) for worker, seed in (line.split() for line in lines))
