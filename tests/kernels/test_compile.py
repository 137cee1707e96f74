"""Every kernel compiled for Hopper at production shapes, without a GPU; add cases in a `compile_cases_*.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from running_products import find_writes

pytestmark = pytest.mark.compile
SHARED_MEMORY_OF_A_BLOCK = 232_448  # bytes, compute capability 9.0


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    switches = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_sm90.py")
    tables = os.environ.get("COMPILE_TABLES", "").split()  # such as "fp8 packed"; all if empty
    done = subprocess.run(
        [sys.executable, script, *tables], capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    missing = [table for table in tables if not any(f"compile_cases_{table}:" in row["case"] for row in rows)]
    assert rows, "no table was compiled"
    assert not missing, f"COMPILE_TABLES must name compile_cases_*.py files, got {missing}"
    return rows


def test_every_table_of_cases_compiles_some_kernel(compiled):
    tables = {path.stem for path in Path(__file__).parent.glob("compile_cases_*.py")}
    assert tables
    assert {row["case"].split(":")[0] for row in compiled} == tables


def test_no_kernel_spills_registers(compiled):
    # Tiles of float8 and packed weights and the Hopper attention kernel were tuned with Triton 3.6, which spills none.
    # Triton 3.9 spills 8 bytes for float8, 24 for the head of a single token, 80 to 120 for packed weights, and 0 to 48
    # for attention. Packed weights times float32, a slow path, spill 560 to 896. The sort of choices spills 2,640.
    few = {
        "compile_cases_fp8": 32,
        "compile_cases_decode: float8 head": 32,
        "compile_cases_packed": 128,
        "packed times float32": 1024,
        "_attention_hopper_kernel": 64,
        "_place_choices_kernel": 4096,
    }
    # Four programs of gate_up share a multiprocessor only if each uses at most 128 registers per thread. With that
    # limit they spill, but they were faster than fewer programs that do not spill. In the kernel of both products,
    # values needed at the end of a block spill, but outside of the loops over planes. Attention spills values that it
    # needs before or after its loop over the keys. In the experts for many tokens and in the products of training, the
    # copying warps spill a few values between the loops over the depth.
    limits = {
        "compile_cases_fourbit": 32,
        "_experts_hopper_kernel": 96,
        "_experts_many_kernel": 16,
        "_multiply_tokens_hopper_kernel": 16,
        "_attention_hopper_kernel": 8,
        "_attention_hopper_shared_kernel": 24,
        "_attention_hopper_float8_kernel": 16,
    }
    if not triton.__version__.startswith("3.6."):
        limits |= few

    def spills(row: dict) -> bool:
        allowed = max((limit for part, limit in limits.items() if part in row["case"]), default=0)
        return row["stack"] > allowed or row["local"] > 0

    assert [row for row in compiled if spills(row)] == []


def test_every_kernel_fits_shared_memory(compiled):
    assert [row for row in compiled if row["shared"] > SHARED_MEMORY_OF_A_BLOCK] == []


def test_default_tiles_fit_consumer_gpus(compiled):
    # A block has 99 KiB on compute capability 8.6 and 8.9. Kernels are compiled for 9.0, where Triton uses one more
    # buffer.
    shared = [row["shared"] for row in compiled if ": default, " in row["case"]]
    assert shared
    assert max(shared) <= 99 * 1024


def test_matrix_products_use_warpgroup_instructions(compiled):
    assert [row for row in compiled if row["wants_wgmma"] and not row["wgmma"]] == []


def test_products_of_float8_are_not_widened_first(compiled):
    used = [row["wgmma"] for row in compiled if "compile_cases_fp8" in row["case"] and row["wants_wgmma"]]
    assert used
    assert all(name.endswith("k32.f32.e4m3.e4m3") for names in used for name in names)


def test_decoded_weights_are_multiplied_from_registers(compiled):
    decoded = ("compile_cases_packed", "compile_cases_fourbit")
    used = [row for row in compiled if row["case"].startswith(decoded) and row["wants_wgmma"]]
    assert used
    assert all(row["left_in_registers"] for row in used)
    assert all(name.endswith("k16.f32.bf16.bf16") for row in used for name in row["wgmma"])
    plain = [
        row for row in compiled if "compile_cases_moe" in row["case"] and row["case"].endswith("_expert_gate_up_kernel")
    ]
    assert plain
    assert not any(row["left_in_registers"] for row in plain)  # plain weights come from shared memory


def test_no_loop_overwrites_registers_that_a_running_product_reads(compiled):
    assert [row for row in compiled if row["overwritten"]] == []


def test_a_write_to_the_left_operand_of_a_running_product_is_found():
    product, wait = "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    decode = ["LOP3.LUT R7, R8, 0xf000f, RZ, 0xc0, !PT", "HFMA2.BF16 R8, R7, R9, R10"]
    assert find_writes([*decode, product, wait]) == []
    assert find_writes([*decode, product]) == [decode[0]]  # in the second iteration
    assert find_writes([product, "LDS.128 R0, [R60]", "LDS.128 R4, [R60]", wait]) == ["LDS.128 R4, [R60]"] * 2
