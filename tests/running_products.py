"""Reads the machine code of a kernel for writes to registers that a running warpgroup product still reads.

A product with its left operand in registers runs on after its instruction. The hardware does not protect the registers
until the program waits for the product. Triton 3.6 does not always wait before it reuses them.
"""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import triton

_NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
# Instructions without a result in a general register, or whose first operand is not the result.
_NO_RESULT = re.compile(
    r"(ST|BAR|BRA|SYNCS|[IF]SETP|PLOP3|WARP|LDGSTS|LDGDEPBAR|DEPBAR|U|R2UR|R2P|RED|EXIT|NOP|BS|HGMMA|QGMMA|VOTEU|MEMBAR|"
    r"ERRBAR|CCTL|ARRIVES|S2UR)"
)


@cache
def overwritten(cubin: bytes) -> list[str]:
    """Return the instructions of a kernel's inner loops that write the left operand of a running product."""
    return [instruction for body in _inner_loops(_disassemble(cubin)) for instruction in find_writes(body)]


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_NVDISASM, "-c", "-ndf", file.name]  # without its analysis of branches, which changes no line here
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _inner_loops(text: str) -> list[list[str]]:
    """Return the instructions of loops that have products and no smaller such loop."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            instructions.append(found[1])
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    loops = [loop for loop in loops if any("GMMA" in one for one in instructions[slice(*loop)])]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [instructions[slice(*loop)] for loop in inner]


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
