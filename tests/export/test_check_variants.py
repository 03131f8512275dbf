"""Variants in exports: which are taken; the CPU reference of the check, built without CUDA, is the float64 one."""

import subprocess

import kernels
import numpy as np
import pytest
import torch

from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.export.check import END, HEADERS, _constants, export_source
from evoattn.export.recorded import Recorded
from evoattn.families.includes import resolve
from evoattn.model.launch import KernelLaunch
from evoattn.model.named_problems import parse_shape
from evoattn.model.paths import TEMPLATES
from evoattn.storage import StorageError

MAIN = """
template <typename T> void put(const T& bytes) { std::fwrite(bytes.data(), 1, bytes.size(), stdout); }

int main() {
  const Bytes q = random_tensor(BUFFER_BYTES[Q] / ELEMENT_BYTES, 1),
              k = random_tensor(BUFFER_BYTES[K] / ELEMENT_BYTES, 2),
              v = random_tensor(BUFFER_BYTES[V] / ELEMENT_BYTES, 3);
  const Terms terms = random_terms();
  std::vector<Row> rows = choose_rows();
  const Allowed allowed = reference(rows, q, k, v, terms);
  put(q), put(k), put(v), put(terms.sinks), put(terms.slopes), put(terms.bias);
  for (const Row& row : rows) {
    std::fwrite(row.exact.data(), 8, row.exact.size(), stdout);
    std::fwrite(&row.lse, 8, 1, stdout);
  }
  std::fwrite(&allowed, sizeof allowed, 1, stdout);
}
"""
LAUNCH = KernelLaunch("kernel", (1, 1, 1), (32, 1, 1), 0, ())
SHAPES = [
    "mask=full,scale=0.3",
    "mask=causal_lower_right,window=9:0,sink=1",
    "mask=full,window=3:5,softcap=2",
    "mask=causal_upper_left,alibi=1,sink=1",
    "mask=full,bias=hs",
    "mask=causal_upper_left,bias=bs,softcap=3",
    "mask=full,window=0:0,alibi=1",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_float64_one(tmp_path, shape):
    problem = parse_shape(f"B=2,H=4,Hkv=2,Sq=37,Sk=24,D=16,dtype=bf16,lse=1,{shape}")
    includes = "".join(f"#include <{header}>\n" for header in HEADERS if not header.startswith("cuda"))
    reference = resolve((TEMPLATES / "export/check/reference.cuh").read_text(), TEMPLATES)
    (tmp_path / "reference.cpp").write_text(includes + _constants(problem, 80, (LAUNCH,), {}) + reference + MAIN)
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Werror", "reference.cpp", "-o", "reference"]
    subprocess.run(command, cwd=tmp_path, check=True)
    memory = subprocess.run([tmp_path / "reference"], capture_output=True, check=True).stdout

    def taken(shape, dtype):
        nonlocal memory
        count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
        values, memory = torch.frombuffer(bytearray(memory[:count]), dtype=dtype), memory[count:]
        return values.reshape(shape)

    q, k, v = (taken(problem.shape(name), torch.bfloat16) for name in "qkv")
    kinds = {"sinks": torch.bfloat16, "slopes": torch.float32, "bias": torch.bfloat16}
    others = {
        name: taken(problem.term_shapes[name], dtype) for name, dtype in kinds.items() if name in problem.term_shapes
    }
    rows = taken((*problem.shape("o")[:3], problem.head_dim + 1), torch.float64)
    expected = exact_attention(problem, q, k, v, torch.float64, others=others)
    lse = exact_lse(problem, q, k, others=others)
    torch.testing.assert_close(rows[..., :-1], expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(rows[..., -1], lse, atol=1e-9, rtol=1e-9)
    largest, rms = taken((2,), torch.float64).tolist()
    assert not memory and 0 < rms < largest < 0.2


SINKS = dict(window="9:0", mask="causal_upper_left", sink=True, softcap=3.0)


def test_terms_of_scores_are_buffers_of_the_check(database):
    text = export_source(database, kernels.record(database, "flash_mma", "a100", **SINKS)).split(END)[1]
    assert "constexpr long PAST = 9, AHEAD = 0;" in text and "SOFTCAP = 3.0;" in text
    assert "constexpr int SINKS = 4, SLOPES = -1, BIAS = -1;" in text and "&buffer[4]" in text


@pytest.mark.parametrize("fields, name", [(dict(seqused="3:9"), "seqused"), (dict(varlen="3:9"), "varlen")])
def test_variants_of_keys_cannot_be_exported(database, fields, name):
    with pytest.raises(StorageError, match=f"This export does not know {name}; call the kernel by `evoattn.load`"):
        export_source(database, kernels.record(database, "flash_mma", "a100", **fields))


def test_a_header_takes_any_scale_and_no_variant(database):
    assert Recorded.read(database, kernels.record(database, "flash_mma", "a100", scale=0.3)).problem.scale == 0.3
    with pytest.raises(StorageError, match="does not know window, softcap, sink;"):
        Recorded.read(database, kernels.record(database, "flash_mma", "a100", **SINKS))
