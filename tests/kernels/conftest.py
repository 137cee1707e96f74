"""Kernels run natively where there is a GPU, else in Triton's interpreter. Uninitialised memory is filled with NaN.

A newer GPU can run the code of an older one. With `TRITON_OVERRIDE_ARCH=sm80` Triton lowers every kernel as for an
A100, and only the assembler targets this GPU.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

# Bytes per block by compute capability: CUDA C++ Programming Guide, "Technical Specifications".
SHARED_MEMORY = {"sm75": 65_536, "sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm120": 101_376}


def take_for(architecture: str) -> None:
    """Make torch report another architecture, and limit shared memory per block to that of this architecture."""
    from triton.compiler import compiler
    from triton.runtime import driver

    driver.active.get_current_target()  # Triton reads the real target from torch before the patches below
    if architecture not in SHARED_MEMORY:
        raise pytest.UsageError(f"TRITON_OVERRIDE_ARCH must be one of {', '.join(SHARED_MEMORY)}, got {architecture}.")
    capability = divmod(int(architecture.removeprefix("sm")), 10)
    torch.cuda.get_device_capability = lambda device=None: capability
    compiler.max_shared_mem = lambda device: SHARED_MEMORY[architecture]


if torch.cuda.is_available() and "TRITON_OVERRIDE_ARCH" in os.environ:
    take_for(os.environ["TRITON_OVERRIDE_ARCH"])


def interpret_quickly() -> None:
    """Spare Triton's interpreter the work that it repeats at every operation. Only the order of a reduction changes.

    It patches `triton.language` once, not again at every launch and call of a device function. It does not compute
    tests for overflow whose assertions are off. It builds each type and shape of a block once, and each constant of a
    type and shape. It does not convert operands that have one type, and fills a block with a scalar directly. It does
    not check the widths of arrays that it made itself. It reduces a block by combining its halves, as a GPU does, and
    not one element after another.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_lang, patched_modules = interpreter._patch_lang, set()

    @functools.cache
    def visible_modules(fn: Callable) -> set[ModuleType]:
        return {value for value in fn.__globals__.values() if value is tl or value is tl.core}

    def patch_once(fn: Callable) -> interpreter._LangPatchScope:
        if not visible_modules(fn) <= patched_modules:
            patched_modules.update(visible_modules(fn))
            patch_lang(fn)
        return interpreter._LangPatchScope()  # has nothing to restore at the end of the launch

    np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def remembered_np_dtype(dtype: tl.dtype) -> np.dtype:  # Triton builds its table of types at every call
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype.scalar)
        return np_dtypes[name]

    def reduce_by_halves(self: interpreter.ReduceOps, blocks: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        types, rank = [block.dtype for block in blocks], len(blocks[0].shape)
        blocks, axis = self.unravel(blocks, self.axis)
        arrays = [block.handle.data for block in blocks]
        while arrays[0].shape[axis] > 1:
            halves = zip(*(np.split(array, 2, axis) for array in arrays), strict=True)
            tensors = [self.to_tensor(*pair) for half in halves for pair in zip(half, types, strict=True)]
            combined = self.combine_fn.fn(*tensors)
            arrays = [block.handle.data for block in (combined if isinstance(combined, tuple) else (combined,))]
        if not self.keep_dims:
            arrays = [array.squeeze(axis) for array in arrays]
        elif self.axis is None:
            arrays = [array.reshape((1,) * rank) for array in arrays]
        return [self.to_tensor(*pair) for pair in zip(arrays, types, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce_by_halves

    def give_semantic(owner: object, name: str, member: Callable, builder: object, scope: object) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that `_semantic` was given

        def call(*arguments: object, _semantic: object = None, **options: object) -> object:
            return function(*arguments, **options, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = give_semantic
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = remembered_np_dtype

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)

    make_type, make_tensor, types, shapes = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def remembered_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def remembered_shape(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        fields = type.__dict__.get("fields_of_tensors")
        if fields is None:
            make_tensor(self, handle, type)
            key = tuple(type.shape) if type.is_block() else ()
            shape = shapes.setdefault(key, {"shape": self.shape, "numel": self.numel})
            fields = type.__dict__["fields_of_tensors"] = {"dtype": type.scalar} | shape
        self.__dict__ = {"handle": handle, "type": type, **fields}

    def hold(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    with_element_ty, other_types = tl.block_type.with_element_ty, {}

    def remembered_with_element_ty(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        # Equal types share one `__dict__`, which `types` keeps alive. So its id can be a key.
        key = (id(self.__dict__), scalar_ty.name, getattr(scalar_ty, "address_space", None))
        if key not in other_types:
            other_types[key] = with_element_ty(self, scalar_ty)
        return other_types[key]

    interpreter.TensorHandle.__init__, tl.block_type.with_element_ty = hold, remembered_with_element_ty

    def fill(scalar: tl.tensor, block: tl.tensor) -> tl.tensor:
        data = np.empty(block.handle.data.shape, interpreter._get_np_dtype(scalar.dtype))
        data.fill(scalar.handle.data.item())
        return tl.tensor(interpreter.TensorHandle(data, scalar.dtype), block.type.with_element_ty(scalar.dtype))

    def broadcast_if_needed(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if left.shape is right.shape:
            return left, right
        if left.type.is_block() and not right.type.is_block():
            return left, fill(right, left)
        if right.type.is_block() and not left.type.is_block():
            return fill(left, right), right
        return broadcast(self, left, right)

    unwrap, bare = tl.core._unwrap_if_constexpr, frozenset({tl.tensor, tl.dtype, int, float, bool, str, type(None)})

    def unwrap_if_needed(value: object) -> object:
        return value if type(value) in bare else unwrap(value)

    convert, constants = TritonSemantic.binary_op_type_checking_impl, {}
    # Two operands of one of these types need no conversion.
    of_one_type = {"fp32", "fp64", "int1", "int8", "int32", "int64", "uint32"}

    def convert_if_needed(
        self: TritonSemantic, left: object, right: object, *rules: bool, **named: bool
    ) -> tuple[tl.tensor, tl.tensor]:
        if type(left) is tl.tensor and not named:
            if type(right) is tl.tensor and (
                (left.dtype is right.dtype and left.dtype.name in of_one_type)
                or (rules == (True, True) and left.dtype.is_ptr() and right.dtype.is_int())  # a pointer plus an offset
            ):
                return self.broadcast_impl_value(left, right)
            if isinstance(right, int | float):
                key = (left.dtype.name, id(left.shape), repr(right), rules)
                if key in constants:
                    return left, constants[key]
                converted, constant = convert(self, left, right, *rules)
                if converted is left:
                    constants[key] = constant
                return converted, constant
        elif type(right) is tl.tensor and not named and isinstance(left, int | float):
            key = (repr(left), right.dtype.name, id(right.shape), rules)
            if key in constants:
                return constants[key], right
            constant, converted = convert(self, left, right, *rules)
            if converted is right:
                constants[key] = constant
            return constant, converted
        return convert(self, left, right, *rules, **named)

    cast = TritonSemantic.cast

    def cast_if_needed(
        self: TritonSemantic, value: tl.tensor, dtype: tl.dtype, fp_downcast_rounding: str | None = None
    ) -> tl.tensor:
        return value if value.dtype is dtype.scalar else cast(self, value, dtype, fp_downcast_rounding)

    TritonSemantic.cast = cast_if_needed
    tl.block_type.__init__, tl.tensor.__init__ = remembered_type, remembered_shape
    broadcast, TritonSemantic.broadcast_impl_value = TritonSemantic.broadcast_impl_value, broadcast_if_needed
    TritonSemantic.binary_op_type_checking_impl = convert_if_needed
    tl.core._unwrap_if_constexpr = unwrap_if_needed


if os.environ.get("TRITON_INTERPRET") == "1":
    interpret_quickly()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects lanes
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip float8 on GPUs without it, and put interpreted float16 cases into the slow lane.

    In the interpreter float32 runs the same code with a smaller tolerance.
    """
    without_float8 = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
    for item in items:
        if without_float8 and "fp8" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a GPU with float8, compute capability 8.9"))
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_float16 = any(value is torch.float16 for value in values)
        if is_float16 and "tests/kernels" in item.nodeid and not torch.cuda.is_available():
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill every `torch.empty` with NaN, or the largest integer, so that tests detect elements that no kernel wrote."""
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would import torch's compiler
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def _default_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the default tiles, so that a test is the same on every GPU. float32 would not fit larger tiles."""
    from dgemma_kernels.ops import configs

    monkeypatch.setattr(configs, "gpu_name", lambda device: "default")


@pytest.fixture(autouse=True)
def _short_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward read 4 or 8 tokens per row, because the interpreter takes as long for padding as for tokens."""
    from dgemma_kernels.engine import reading

    if not torch.cuda.is_available():
        monkeypatch.setattr(reading, "_SIZES", (4, 8, *reading._SIZES))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use three chunks of a vocabulary of 40 tokens, so that their results are merged."""
    from dgemma_kernels.ops.vocabulary import kernel

    monkeypatch.setattr(kernel, "CHUNK", 16)


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def described(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let kernels load weights through pointers, or through tensor descriptors."""
    from dgemma_kernels.ops import configs

    monkeypatch.setattr(configs, "TENSOR_DESCRIPTORS", {"default"} if request.param else set())
    return request.param
