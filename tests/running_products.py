"""Reads the machine code of a kernel for writes to registers that a running warpgroup product still reads.

A product with its left operand in registers runs on after its instruction. The hardware does not protect the registers
until the program waits for the product. Triton 3.6 does not always wait before it reuses them.
"""

import re
import subprocess
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from struct import unpack_from

import triton

_NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_WIDTH = 16  # bytes of an instruction
# Instructions without a result in a general register, or whose first operand is not the result.
_NO_RESULT = re.compile(
    r"(ST|BAR|BRA|SYNCS|[IF]SETP|PLOP3|WARP|LDGSTS|LDGDEPBAR|DEPBAR|U|R2UR|R2P|RED|EXIT|NOP|BS|HGMMA|QGMMA|VOTEU|MEMBAR|"
    r"ERRBAR|CCTL|ARRIVES|S2UR)"
)


def overwritten(cubins: list[bytes]) -> list[list[str]]:
    """Return, for each kernel, the instructions of its inner loops that write the left operand of a running product.

    One process disassembles all kernels one after the other, because it takes half a second to start.
    """
    codes = [_machine_code(cubin) for cubin in cubins]
    instructions = _disassemble(b"".join(codes))
    loops = _inner_loops(instructions)
    ends = list(accumulate(len(code) // _WIDTH for code in codes))
    return [
        [write for loop in loops if begin <= loop.start < end for write in find_writes(instructions[loop])]
        for begin, end in pairwise([0, *ends])
    ]


def _machine_code(cubin: bytes) -> bytes:
    """Return the executable sections of a cubin, which is an ELF file."""
    (table,), (width, number) = unpack_from("<Q", cubin, 40), unpack_from("<HH", cubin, 58)
    sections = [unpack_from("<IIQQQQ", cubin, table + i * width) for i in range(number)]
    return b"".join(cubin[start : start + size] for _, _, flags, _, start, size in sections if flags & 4)


def _disassemble(code: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [_NVDISASM, "--binary", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text, re.MULTILINE)
    assert len(instructions) * _WIDTH == len(code)
    return instructions


def _inner_loops(instructions: list[str]) -> list[slice]:
    """Return the loops that have products and no smaller such loop."""
    loops = []
    for i, instruction in enumerate(instructions):
        target = re.match(r"BRA.* 0x([0-9a-f]+)", instruction)
        if target and (begin := int(target[1], 16) // _WIDTH) <= i:
            loops.append(slice(begin, i + 1))
    loops = [loop for loop in loops if any("GMMA" in one for one in instructions[loop])]
    return [a for a in loops if not any(a != b and a.start <= b.start and b.stop <= a.stop for b in loops)]


def find_writes(body: list[str]) -> list[str]:
    """Return the instructions of a loop, over two iterations, that write the left operand of a running product."""
    groups: list[list[range]] = []  # left operands of committed groups of products, oldest first
    group: list[range] = []
    found = []
    for instruction in body * 2:
        if "GMMA" in instruction:
            left = re.match(r"\S+ R\d+, R(\d+)", instruction)
            if left:
                group.append(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in instruction:
                groups.append(group)
                group = []
        elif wait := re.match(r"WARPGROUP\.DEPBAR\S* gsb0, 0x([0-9a-f]+)", instruction):
            groups = groups[len(groups) - int(wait[1], 16) :] if int(wait[1], 16) else []
        elif any(set(_result(instruction)) & set(left) for one in (*groups, group) for left in one):
            found.append(instruction)
    return found


def _result(instruction: str) -> range:
    operation, _, operands = instruction.partition(" ")
    first = re.match(r"\s*R(\d+)", operands)
    if _NO_RESULT.match(operation) or not first:
        return range(0)
    pair = ".64" in operation or "WIDE" in operation or (operation.startswith("CS2R") and ".32" not in operation)
    return range(int(first[1]), int(first[1]) + (4 if ".128" in operation else 2 if pair else 1))
