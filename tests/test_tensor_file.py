"""Files written tensor by tensor are what the safetensors package reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from trainer import tensor_file
from trainer.tensor_file import file_checksum, write_tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    ),
    chunk=st.sampled_from([3, 64, 2**24]),
)
def test_every_tensor_is_read_back(tmp_path_factory, parts, chunk):
    path = tmp_path_factory.mktemp("t") / "a.safetensors"
    tensors = {f"t{i}": (torch.rand(s) * 100).to(d) for i, (d, s) in enumerate(parts)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_CHUNK_BYTES", chunk)
        checksum = write_tensors(path, tensors)
        assert checksum == file_checksum(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_tensors_may_be_rounded_transposed_and_described(tmp_path):
    path = tmp_path / "a.safetensors"
    tensor = torch.randn(5, 7)
    write_tensors(path, {"a": tensor.T}, dtype=torch.bfloat16, metadata={"format": "pt"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("a"), tensor.T.bfloat16())


def test_a_changed_byte_changes_the_checksum(tmp_path):
    path = tmp_path / "a.safetensors"
    checksum = write_tensors(path, {"a": torch.zeros(100)})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert file_checksum(path) != checksum
