"""Dtypes of their own, names that a family translates, and tables of whole numbers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from models.errors import ModelError
from models.loader.dummy import DummyReader
from models.loader.filling import WeightFilling
from models.loader.safetensors import SafetensorsReader
from models.weight_plan import Piece, WeightPlan


def fill(plan, reader):
    with ThreadPoolExecutor(1) as pool:
        return WeightFilling(plan, reader, pool, lambda size: torch.empty(size, dtype=torch.bfloat16)).result()


@pytest.fixture
def plan():
    plan = WeightPlan()
    plan.add_whole("matrix", "a.weight", (4, 6))
    plan.add_rows("decay", [("a.log", 4, 2, 4)], (), torch.float32)
    plan.add_whole("table", "a.table", (5, 2), torch.int64)
    return plan


@pytest.fixture
def tensors():
    return {"a.weight": torch.randn(4, 6), "a.log": torch.randn(4), "a.table": torch.arange(10).view(5, 2)}


def test_a_tensor_has_the_dtype_that_the_plan_gives_it(plan, tensors, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    weights = fill(plan, SafetensorsReader((tmp_path / "x.safetensors",)))
    assert torch.equal(weights["matrix"], tensors["a.weight"].bfloat16())
    assert torch.equal(weights["decay"], tensors["a.log"][2:])
    assert torch.equal(weights["table"], tensors["a.table"])


def test_floats_are_no_table(plan, tensors, tmp_path):
    save_file({**tensors, "a.table": torch.ones(5, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=r"a\.table has dtype F32"):
        fill(plan, SafetensorsReader((tmp_path / "x.safetensors",)))


def test_names_are_translated_and_unused_tensors_left_out(plan, tensors, tmp_path):
    stored = {name.replace("a.", "b."): tensor for name, tensor in tensors.items()}
    save_file({**stored, "draft.weight": torch.ones(1)}, tmp_path / "x.safetensors")

    def rename(name):
        return None if name.startswith("draft.") else name.replace("b.", "a.")

    reader = SafetensorsReader((tmp_path / "x.safetensors",), rename=rename)
    assert set(reader.shapes()) == set(tensors)
    assert torch.equal(fill(plan, reader)["decay"], tensors["a.log"][2:])


def test_dummy_tables_hold_columns_and_convolutions_are_filled():
    plan = WeightPlan()
    plan.add_whole("table", "table", (5, 3), torch.int64)
    plan.add_rows("conv", [("conv", 8, 2, 6)], (1, 4))
    weights = fill(plan, DummyReader(plan, 0))
    assert torch.equal(weights["table"], torch.arange(3).expand(5, 3))
    whole = torch.empty(8, 1, 4)
    DummyReader(plan, 0).read(Piece("conv", (8, 1, 4), 0, 0, 8), whole)
    assert torch.equal(weights["conv"], whole[2:6].bfloat16())
