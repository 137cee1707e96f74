"""Runs the source of a Gluon kernel on CPU tensors: the part of Gluon for Hopper that the kernels use.

Triton's interpreter does not know Gluon. `load` executes a module with these functions in place of Triton. `machine`
describes what is simulated, and which errors it detects that a GPU may not show.
"""

import builtins
import functools
import importlib.util
import inspect
import itertools
import linecache
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Names
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from gluon_interpreter import machine, ptx, tiles
from gluon_interpreter.tiles import Hazard, Value, elementwise, int32

__all__ = ["Hazard", "load"]

_loads = itertools.count()
_SHARED = ("dgemma_kernels.ops.hopper", "dgemma_kernels.ops.persistent")
_ELEMENTWISE = ("maximum", "minimum", "exp", "exp2", "rsqrt", "log2")


def load(name: str, *, seed: int = 0, edits: dict[str, str] | None = None) -> Any:
    """Load the module of that name, interpreted, with `_SHARED` and the modules that it imports from its package.

    `seed` draws the order of operations that a GPU does not order; `edits` maps passages of these sources to
    replacements.

    Example: `load("dgemma_kernels.ops.attention.hopper", seed=3).attend(...)`.
    """
    counts = dict.fromkeys(edits or {}, 0)
    module = _load(name, seed, edits or {}, counts)
    for passage, count in counts.items():
        assert count == 1, f"{name} and its imports must contain {passage!r} once, got {count} times"
    return module


def _load(name: str, seed: int, edits: dict[str, str], counts: dict[str, int]) -> Any:
    path = Path(importlib.util.find_spec(name).origin)
    source = path.read_text(encoding="utf-8")
    for old, new in edits.items():
        counts[old] += source.count(old)
        source = source.replace(old, new)

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return Jitted(function, seed) if function else jit

    triton = _triton(jit)

    def import_(wanted: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        if wanted.split(".")[0] == "triton":
            return functools.reduce(getattr, wanted.split(".")[1:] if names else [], triton)
        if wanted.startswith(name.rpartition(".")[0] + ".") or wanted in _SHARED:
            return _load(wanted, seed, edits, counts)
        return builtins.__import__(wanted, scope, local, names, level)

    module = ModuleType(name)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_, "range": _range}
    filename = f"{path}, interpreted {next(_loads)}"  # unique, so that errors show the edited lines
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)
    for key, value in vars(module).items():
        if isinstance(value, JITFunction):  # of another package: on a GPU, only a compiled kernel can call it
            setattr(module, key, value.fn)
    return module


class Jitted:
    """A jitted function: other jitted functions call it, or the host launches it as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self.function, self.signature, self.seed = function, inspect.signature(function), seed

    def __call__(self, *arguments: Any) -> Any:
        for name, argument in self.signature.bind(*arguments).arguments.items():
            parts = argument if isinstance(argument, tuple) else (argument,)
            if self._is_constant(name) and any(isinstance(part, Value) for part in parts):
                raise TypeError(f"{name} must be known when the kernel is compiled")
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *arguments: Any, num_warps: int, maxnreg: int | None = None, **constants: Any
    ) -> None:
        bound = self.signature.bind(*arguments, **constants).arguments
        for name, argument in bound.items():
            if isinstance(argument, Tensor):
                bound[name] = tiles.Pointer(argument, Value(torch.tensor(0)))
            elif isinstance(argument, int) and not self._is_constant(name):
                bound[name] = int32(argument)
        order = random.Random(self.seed)
        for program in itertools.product(*map(range, grid)):
            machine.run_block(program, grid, order, functools.partial(self, *bound.values()))

    def _is_constant(self, name: str) -> bool:
        return self.signature.parameters[name].annotation is _Constexpr


class _Constexpr(int):
    """A number known at compile time; plain Python numbers and layouts also count as constants."""

    value = property(int)

    def __new__(cls, value: Any) -> Any:
        return super().__new__(cls, value) if isinstance(value, int) else value


def _range(*bounds: Any) -> Any:
    """Return a range of run-time numbers if a bound is known only at run time, else a plain range."""
    numbers = range(*map(tiles.number, bounds))
    return map(int32, numbers) if any(isinstance(bound, Value) for bound in bounds) else numbers


def _load_global(pointer: tiles.Pointer, mask: Value | None = None, other: float = 0, volatile: bool = False) -> Value:
    """Load from global memory. A volatile load first lets another partition run, because loops wait for its store."""
    if volatile:
        machine.block.pause()
    return pointer.load(mask, other)


def _triton(jit: Callable[..., Any]) -> Names:
    """Return the replacement of `triton`; the languages of Triton and Gluon are the same object."""
    language = Names(
        constexpr=_Constexpr,
        tensor=Value,
        tuple=tuple,
        uint8=torch.uint8,
        int16=torch.int16,
        bfloat16=torch.bfloat16,
        float8e4nv=torch.float8_e4m3fn,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        **{name: layout for name, layout in vars(tiles).items() if name.endswith("Layout")},
        program_id=lambda axis: int32(machine.block.program[axis]),
        num_programs=lambda axis: int32(machine.block.grid[axis]),
        static_range=range,
        cdiv=lambda x, y: (x + y - 1) // y,
        arange=lambda begin, end, layout: Value(torch.arange(begin, end, dtype=torch.int32), layout),
        full=lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype), layout),
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype), layout),
        zeros_like=lambda tile: Value(torch.zeros_like(tile.data), tile.layout),
        where=tiles.where,
        **{name: functools.partial(elementwise, getattr(torch, name)) for name in _ELEMENTWISE},
        max=functools.partial(tiles.reduce, torch.amax),
        sum=functools.partial(tiles.reduce, torch.sum),
        expand_dims=tiles.expand_dims,
        broadcast=tiles.broadcast,
        join=tiles.join,
        convert_layout=lambda tile, layout, assert_trivial=False: Value(tile.data, layout),
        inline_asm_elementwise=ptx.run,
        load=_load_global,
        store=tiles.Pointer.store,
        atomic_add=tiles.Pointer.atomic_add,
        thread_barrier=machine.thread_barrier,
        allocate_shared_memory=machine.Allocation,
        warp_specialize=machine.warp_specialize,
    )
    language.nvidia = Names(
        hopper=Names(
            fence_async_shared=machine.fence_async_shared,
            warpgroup_mma=machine.warpgroup_mma,
            warpgroup_mma_wait=machine.warpgroup_mma_wait,
            async_copy=Names(
                async_copy_global_to_shared=machine.copy_by_threads,
                commit_group=machine.commit_group,
                mbarrier_arrive=machine.arrive_after_copies,
                wait_group=machine.wait_group,
            ),
            mbarrier=machine.Barrier,
            tma=Names(
                async_copy_global_to_shared=machine.copy_to_shared,
                async_copy_shared_to_global=machine.copy_to_global,
                store_wait=machine.store_wait,
            ),
        )
    )
    descriptors = Names(hopper=Names(TensorDescriptor=tiles.TensorDescriptor))
    gluon = Names(jit=jit, constexpr_function=lambda function: function, language=language, nvidia=descriptors)
    return Names(jit=jit, cdiv=language.cdiv, language=language, experimental=Names(gluon=gluon))
