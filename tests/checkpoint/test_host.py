"""Test the copies of tensors in host memory. Copies from a GPU are tested in tests/test_cuda.py."""

from __future__ import annotations

import torch

from dapo.checkpoint import host
from dapo.checkpoint.host import HostMemory


def test_copies_keep_values_and_ties_and_do_not_follow_the_originals():
    shared = torch.randn(5, 3)
    files = {
        "model": {"embed": shared, "head": shared, "norm": torch.randn(7).bfloat16(), "mask": torch.tensor([True])},
        "optimizer": {"step": torch.tensor(3.0), "moment": torch.arange(12.0).view(3, 4).T, "none": torch.empty(0)},
    }
    before = {name: {key: value.clone() for key, value in tensors.items()} for name, tensors in files.items()}
    memory = HostMemory()
    copied = memory.copy(files)
    for tensors in files.values():
        for tensor in tensors.values():
            tensor.zero_()
    for name, tensors in before.items():
        for key, tensor in tensors.items():
            assert copied[name][key].dtype == tensor.dtype
            assert torch.equal(copied[name][key], tensor), key
    assert copied["model"]["embed"].data_ptr() == copied["model"]["head"].data_ptr()
    again = memory.copy(files)
    assert again["optimizer"]["moment"].data_ptr() == copied["optimizer"]["moment"].data_ptr(), "memory is used again"
    assert not again["optimizer"]["moment"].any()


def test_a_copy_that_would_take_over_half_of_the_free_memory_is_refused(monkeypatch):
    files = {"model": {"a": torch.zeros(1000)}}
    monkeypatch.setattr(host, "memory", lambda: (100_000, 8_200))
    memory = HostMemory()
    assert memory.shortage(files) is None
    monkeypatch.setattr(host, "memory", lambda: (100_000, 7_900))
    assert memory.shortage(files) == "takes 4 kB, but only 8 kB of memory are free"
    memory.copy(files)
    assert memory.shortage(files) is None, "memory that it has needs not be free"


def test_parts_fill_slots_without_overlap(monkeypatch):
    monkeypatch.setattr(host, "_SLOT", 100)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (30, 250, 64, 1, 100)]
    offsets, end = host._layout({"x": {str(index): source for index, source in enumerate(sources)}})
    placed = [(offsets[host._identity(source)], source) for source in sources]
    whole = torch.zeros(end, dtype=torch.uint8)
    for number, start, part in host._parts(placed):
        assert start + len(part) <= 100
        whole[number * 100 + start :][: len(part)] = part
    for offset, source in placed:
        assert torch.equal(whole[offset : offset + len(source)], source)
