"""Run a test on several real ranks: processes with gloo between them, kept between tests.

    @on_ranks(2)
    def test_gather(rank: int) -> None: ...

Each rank imports the test's file and calls the undecorated function. A rank that
fails, or does not answer in time, fails the test with its traceback (of all threads, if
it does not answer), and the ranks are started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import unittest.mock
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.one_piece import MANY, in_one_piece

_TESTS = str(Path(__file__).resolve().parent.parent)
_IMPORTED_FIRST = ["torch._inductor.compile_fx", "autoshard.backend"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # what the CPU says is so: no program is run to see
}

_SPAWNS = multiprocessing.get_context("spawn")
THREADS = 64  # of a rank: with more of them, left by groups that something holds, it ends
LIMIT_S = 240.0  # a test that hangs; as many tests as there are cores share these


def on_ranks(
    world: int = 2, *, timeout: float = LIMIT_S, compiles: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Call the test on `world` ranks, as `test(rank, **parameters)`; `timeout` in seconds.

    compiles: whether all that it compiles is compiled anew; see `support/compilations.py`.
    """

    def decorate(test: Callable[..., None]) -> Any:
        def run(**parameters: Any) -> None:
            what = test.__code__.co_filename, test.__name__, parameters, compiles
            _pool(world).call(what, timeout)

        functools.update_wrapper(run, test)
        run.__signature__ = _without_rank(test)  # type: ignore[attr-defined]
        return run

    return decorate


def _without_rank(test: Callable[..., None]) -> Any:
    import inspect

    signature = inspect.signature(test)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class _Pool:
    def __init__(self, world: int) -> None:
        # A copy has its original's hash seed. Of two ranks, one has another: it imports torch anew.
        contexts = [forks()] * world if world != 2 else [forks(), _SPAWNS]
        port = free_port()
        self._pipes, self._processes = [], []
        self._num_threads = 0
        self._has_groups = False  # a rank has more than the one over all ranks
        self._folder = tempfile.TemporaryDirectory()
        self._is_paused = False
        for rank, context in enumerate(contexts):
            here, there = context.Pipe()
            arguments = (rank, world, port, there, self._stack_file(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, what: tuple[str, str, dict[str, Any], bool], timeout: float) -> None:
        try:
            failures = self._call((*what, self._has_groups), timeout)
        except BaseException:  # a time limit of pytest's: answers would come to the next test
            self.stop()
            raise
        if failures or self._num_threads > THREADS:
            self.stop()
        if failures:
            raise AssertionError("\n".join(failures))

    def _call(self, what: tuple[Any, ...], timeout: float) -> list[str]:
        for pipe in self._pipes:
            pipe.send(what)
        self._has_groups = False
        failures = []
        waiting = dict(enumerate(self._pipes))
        end = time.monotonic() + timeout
        while waiting:
            # The first to fail leaves the others waiting for it: they get a short while.
            limit = 5.0 if failures else max(0.0, end - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting.values()), limit)
            for rank, pipe in list(waiting.items()):
                if ready and pipe not in ready:
                    continue
                del waiting[rank]
                try:
                    if ready:
                        failure, has_groups, num_threads = pipe.recv()
                        self._has_groups |= has_groups
                        self._num_threads = max(self._num_threads, num_threads)
                    else:
                        failure = f"no answer within {limit:.0f} s\n{self._stack_of(rank)}"
                except EOFError:
                    failure = "the process ended"
                if failure:
                    failures.append(f"rank {rank}: {failure}")
        return failures

    def pause(self) -> None:
        """Keep these ranks from running: threads of gloo's look for work also while none comes."""
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
        self._is_paused = True

    def go_on(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
        self._is_paused = False

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"{rank}.stack")

    def _stack_of(self, rank: int) -> str:
        """Where the threads of a rank that does not answer are."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        return Path(self._stack_file(rank)).read_text()

    def stop(self) -> None:
        _pools.pop(len(self._processes), None)
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_pools: dict[int, _Pool] = {}


def _pool(world: int) -> _Pool:
    """Ranks that run; those of pools of other sizes don't, until they are asked for again."""
    _pause_all_but(world)
    if world not in _pools:
        _pools[world] = _Pool(world)
    _pools[world].go_on()
    return _pools[world]


def _pause_all_but(world: int) -> None:
    for size, pool in _pools.items():
        if size != world:
            pool.pause()


def forks() -> Any:
    """Context of processes that a process which has imported torch starts.

    They are quick to start, and have its hash seed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.with_parent", *_IMPORTED_FIRST])
    with unittest.mock.patch.dict(os.environ, _ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def in_processes(
    rank_of: Callable[..., None],
    *arguments: Any,
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    limit_s: float = 90.0,
) -> list[Any]:
    """What each rank sends, as processes of their own, which may end; None for one that only ends.

    rank_of: called with its environment, `arguments`, and the pipe to send by.
    environments: what each has beside torchrun's.
    """
    _pause_all_but(0)
    context, port, world = forks(), str(free_port()), len(environments)
    pipes, processes = [], []
    for rank, more in enumerate(environments):
        number = str(rank)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        of_rank = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(world), **where, **more}
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=rank_of, args=(of_rank, *arguments, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return [_sent(pipe, limit_s) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _sent(pipe: Any, limit_s: float) -> Any:
    assert pipe.poll(limit_s), f"no end within {limit_s:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        return None


@atexit.register
def _stop_pools() -> None:
    for pool in list(_pools.values()):
        pool.stop()


@functools.partial(in_one_piece, values=MANY)
def _serve(rank: int, world: int, port: int, pipe: Any, stack_file: str) -> None:
    stacks = Path(stack_file).open("w")  # noqa: SIM115  # for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.update(
        _ENVIRONMENT,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path.insert(0, _TESTS)
    from support import with_parent

    with_parent.end()  # a rank that rests would not see that its pipe has
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    import torch
    import torch.distributed as dist

    gc.collect()
    gc.freeze()  # a million objects of torch's, which each collection would look at in vain
    torch._inductor.config.cpp.simdlen = 1  # kernels without vectors: less to write and to compile
    inductor = importlib.import_module("torch._inductor.codegen.common")
    # One object, which torch would fill with the same rules again for each op.
    inductor.DtypePropagationOpsHandler = functools.cache(inductor.DtypePropagationOpsHandler)
    torch.set_num_threads(1)
    from support import compilations, extras, patience

    from autoshard.runtime.ranks import exchange

    extras.leave_out()
    patience.shorten()
    _share_a_device()
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    modules: dict[str, ModuleType] = {}
    for number in itertools.count():
        try:
            file, name, parameters, compiles, is_new_group = pipe.recv()
        except EOFError:
            return
        gc.collect(1)  # models of the test before: what waits in them is to be nobody's concern
        try:
            torch._dynamo.reset()
            for sessions in exchange._local.sessions.values():
                sessions.by_mesh.clear()  # ranks may have gone apart in the test before
                sessions.own = uuid.uuid4().hex
            if is_new_group:
                renew_group(dist.PrefixStore(f"test {number}", store))
            torch.manual_seed(0)
            test = getattr(_load(file, modules), name)
            reuse = contextlib.nullcontext() if compiles else compilations.reused()
            with warnings.catch_warnings(), reuse:
                warnings.simplefilter("error", RuntimeWarning)  # ours say that something fell back
                getattr(test, "__wrapped__", test)(rank, **parameters)
            failure = None
        except BaseException:
            failure = traceback.format_exc()
        has_groups = len(dist.distributed_c10d._world.pg_map) > 1
        pipe.send((failure, has_groups, _num_threads()))


def _share_a_device() -> None:
    """Have all of gloo's groups in this process, from now on, share what each has of its own: a
    device, with a thread that looks for work a hundred times a second.

    It does not interrupt other threads (SCHED_BATCH). gloo's thread does so with a message, just as
    the thread that it interrupts holds a lock that it needs, and asks for that lock until its time
    is over: a sixth of the time of a rank that exchanges small messages.
    """
    from torch.distributed import ProcessGroupGloo

    with _without_interrupting():
        device = ProcessGroupGloo.create_default_device()
    make = ProcessGroupGloo.__init__

    def init(
        group: Any, store: Any, rank: int, size: int, timeout: Any = None, **more: Any
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [device]
        if timeout is not None:
            options._timeout = timeout
        for name, value in more.items():  # torch 2.15 has `enable_reconfigure`
            setattr(options, name, value)
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def _without_interrupting() -> Iterator[None]:
    """Have threads that begin in this context wait for those that run; where that can be had."""
    if not hasattr(os, "sched_setscheduler"):
        yield
        return
    before, none = os.sched_getscheduler(0), os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, none)
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, none)


def _num_threads() -> int:
    """Threads of this process, C++'s among them; 0 where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def renew_group(store: Any) -> None:
    """Make the process group over all ranks anew, and end those that the last test made.

    Each has threads of its own.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    rank, world = dist.get_rank(), dist.get_world_size()
    _clear_sharding_prop_cache()  # of meshes, which hold their groups
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _load(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    if file not in modules:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[file]  # dataclasses look themselves up there
        spec.loader.exec_module(modules[file])
        gc.collect()
        gc.freeze()  # what it has imported, transformers' objects above all
    return modules[file]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
