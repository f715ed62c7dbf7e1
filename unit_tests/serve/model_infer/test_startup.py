"""What keeps a worker from starting is one line that names it, whatever it is."""

import dataclasses
import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from models.config import load_model_config
from models.parallel import SingleRank
from models.source import resolve_model
from serve.config import ResolvedConfig, ServeConfig
from serve.ipc.child import ChildContext, StartError
from serve.ipc.messages import Message, Progress
from serve.model_infer.startup import _largest_page, _ProgressReporter, start_worker
from unit_tests.models.builders import hf_model, save
from unit_tests.models.gguf_builders import write_gguf
from unit_tests.serve.model_infer.builders import CPU
from unit_tests.serve.model_infer.tiny_llama import model_dir


class Parent:
    """The launcher's end of the line."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def make_context(directory: Path, run_dir: Path, data_type: str = "float32", **flags: object) -> ChildContext:
    source = resolve_model(str(directory), "auto", offline=True)
    model = {
        "config": load_model_config(source).to_dict(),
        "source": msgspec.to_builtins(source, enc_hook=str),
    }
    config = ResolvedConfig(
        serve=ServeConfig(model="tiny", running_max_req_size=4, **flags),  # type: ignore[arg-type]
        model_path=directory,
        model_name="tiny",
        run_dir=run_dir,
        device="cpu",
        data_type=data_type,  # type: ignore[arg-type]
        threads_per_worker=1,
        max_req_total_len=128,
        batch_max_tokens=64,
        chunked_prefill_size=64,
        page_size=16,
        num_slots=4,
    )
    return ChildContext("worker", 0, 1, config, model, run_dir, {}, Parent())  # type: ignore[arg-type]


def failure_of(context: ChildContext) -> str:
    """The line of a start that must fail, before anything was allocated that would have to be given back."""
    num_threads = torch.get_num_threads()
    try:
        with pytest.raises(StartError) as caught:
            start_worker(context)
    finally:
        torch.set_num_threads(num_threads)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir(), tmp_path / "model"))


@pytest.mark.parametrize("head_dim", [6, 24])
def test_a_head_dimension_without_a_kernel(tmp_path: Path, head_dim: int) -> None:
    directory = save(hf_model("llama", head_dim=head_dim), tmp_path / "odd")
    line = failure_of(make_context(directory, tmp_path))
    assert "needs a head_dim and a page size in multiples of 16, and at most 96 query heads a kv head" in line
    assert line.endswith(f"the model has {head_dim}, 16 and 2")


def test_more_query_heads_a_kv_head_than_the_kernel_takes(tmp_path: Path) -> None:
    changes = {"num_attention_heads": 128, "num_key_value_heads": 1, "hidden_size": 128}
    directory = save(hf_model("llama", **changes), tmp_path / "odd")
    assert failure_of(make_context(directory, tmp_path)).endswith("has 16, 16 and 128")


@pytest.mark.parametrize("size", [0, 5, 1000, -100])
def test_a_truncated_checkpoint(copied: Path, tmp_path: Path, size: int) -> None:
    context = make_context(copied, tmp_path)
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors: truncated or corrupt safetensors file" in failure_of(context)


def test_a_checkpoint_that_has_gone(copied: Path, tmp_path: Path) -> None:
    context = make_context(copied, tmp_path)
    (copied / "model.safetensors").unlink()
    assert "model.safetensors" in failure_of(context)


def test_a_checkpoint_of_other_shapes(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert "tensors have the wrong shape: model.layers.0.mlp" in failure_of(make_context(copied, tmp_path))


def test_a_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(hf_model("llama"), "llama", path)
    context = make_context(path, tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    assert "truncated: tensor" in failure_of(context)


def test_a_pool_that_cannot_hold_one_request(tmp_path: Path) -> None:
    context = make_context(model_dir(), tmp_path, max_total_token_num=64, max_req_total_len=128)
    expected = "--max_total_token_num 64 cannot hold one request of --max_req_total_len 128 (needs 129)"
    assert failure_of(context) == expected
    context = make_context(model_dir(), tmp_path, mem_fraction=1e-9)
    assert "lower --max_req_total_len or raise --mem_fraction" in failure_of(context)


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    context = make_context(model_dir(), tmp_path, tp=2)
    on_gpus = dataclasses.replace(context, index=1, config=context.config.model_copy(update={"device": "cuda"}))
    assert failure_of(on_gpus) == "--tp 2 needs as many GPUs; there are 1"


def test_a_config_that_is_not_one(tmp_path: Path) -> None:
    context = make_context(model_dir(), tmp_path)
    broken = dataclasses.replace(context, model=context.model | {"config": {"family": 5}})
    assert failure_of(broken).startswith("model config: ")


def test_progress_is_thinned_out(tmp_path: Path) -> None:
    context = make_context(model_dir(), tmp_path)
    report = _ProgressReporter(context)
    for done in range(1001):
        report("weights", done, 1000)
    report("digest", 0, 0)
    messages = context.parent.messages  # type: ignore[attr-defined]
    assert all(isinstance(message, Progress) for message in messages)
    assert [message.done for message in messages[:3]] == [0, 20, 40]
    assert (len(messages), messages[-2].done, messages[-1].phase) == (52, 1000, "digest")


def test_the_largest_page_of_one_rank_is_its_own() -> None:
    assert _largest_page(SingleRank(), 4096, CPU) == 4096
