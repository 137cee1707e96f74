"""Runs the PTX of `inline_asm_elementwise` on tiles: the instructions that decode weights, and waits for copies."""

import re
from typing import Any

import torch
from torch import Tensor

from gluon_interpreter import machine
from gluon_interpreter.tiles import Hazard, Value

_MASK = 0xFFFFFFFF


def run(code: Any, constraints: str, arguments: list[Value], types: Any, is_pure: bool, pack: int) -> Any:
    """Return the outputs $0, $1, ... as bfloat16 tiles, or as float8 tiles if the argument has bytes.

    Return None if there is only one output: waits and fences have one, but no kernel uses it.
    """
    registers: dict[str, Tensor] = {}
    outputs = constraints.count("=")
    for index, argument in enumerate(arguments):
        bits = argument.data.element_size() * 8
        registers[f"${outputs + index}"] = argument.data.long() & (1 << bits) - 1
    body = getattr(code, "value", code).strip().removeprefix("{").removesuffix("}")
    for instruction in filter(None, (re.sub(r"\s+", " ", part).strip() for part in body.split(";"))):
        name, _, rest = instruction.partition(" ")
        if name not in (".reg", "//", "fence.acq_rel.gpu", "fence.proxy.async.global"):
            _execute(name, re.findall(r"{[^}]*}|[^,\s]+", rest), registers)
    halves = [registers.get(f"${i}") for i in range(outputs)]
    if outputs == 1:
        return None
    if arguments[0].dtype == torch.uint8:  # four bytes in a register, one at a time here
        return tuple(Value(byte.to(torch.uint8).view(torch.float8_e4m3fn), arguments[0].layout) for byte in halves)
    return tuple(Value(_floats(half), arguments[0].layout).to(torch.bfloat16) for half in halves)


def _execute(name: str, operands: list[str], registers: dict[str, Tensor]) -> None:
    if name == "cp.async.wait_group":
        return machine.wait_group(int(operands[0]))
    if name == "fence.proxy.async.shared::cta":
        return machine.fence_async_shared()
    target, *sources = operands
    values = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in sources]
    kind = name.split(".")[0]
    if target.startswith("{"):  # two halves of a register
        low, high = re.findall(r"\$\d+", target)
        registers[low], registers[high] = values[0] & 0xFFFF, values[0] >> 16
    elif kind in ("mov", "cvt"):
        registers[target] = values[0]
    elif kind == "and":
        registers[target] = values[0] & values[1]
    elif kind == "shr":
        registers[target] = values[0] >> values[1]
    elif kind == "prmt" and sources[0] == sources[1]:
        chosen = (values[0] >> 8 * (int(values[2]) >> 4 * i & 3) & 0xFF for i in range(4))
        registers[target] = sum(byte << 8 * i for i, byte in enumerate(chosen))
    elif name == "fma.rn.bf16x2":
        registers[target] = sum(_fma(*(value >> shift & 0xFFFF for value in values)) << shift for shift in (0, 16))
    else:
        raise Hazard(f"{name} {operands} is not simulated")
    return None


def _floats(bits: Tensor) -> Tensor:
    """Return bfloat16 bits as float64."""
    return (bits << 16 & _MASK).to(torch.int64).to(torch.uint32).view(torch.float32).double()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the bits of a * b + c, rounded once: float64 holds the sum exactly for the values that occur here."""
    exact = _floats(a) * _floats(b) + _floats(c)
    return exact.bfloat16().view(torch.int16).long() & 0xFFFF
