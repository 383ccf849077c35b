"""Compiles the kernels for NVIDIA GPUs, which needs none, and prints their PTX as JSON.

Usage: compiled.py CAPABILITY, as 90 for H100 and H200.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proofserve.protocol.device import kernels

SIGNATURES = {
    kernels._fill_normal: ("*bf16", "*i32", "i32", "i32", "constexpr"),
    kernels._hash_keys: ("*i32", "*i32", "*i32", "i32"),
    kernels._rotate: ("*fp32", "*fp32", "*fp32", "i32", "i32"),
}


def ptx(kernel: triton.JITFunction, types: tuple[str, ...], capability: int) -> str:
    """The types are those of all arguments but the last, the block; a constexpr is 1."""
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    constants = {name: 1 for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel, signature, {**constants, "block": 1024})
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
    return str(made.asm["ptx"])


if __name__ == "__main__":
    asked = int(sys.argv[1])
    print(json.dumps({k.__name__: ptx(k, types, asked) for k, types in SIGNATURES.items()}))
