"""Times whole decode steps and prefills of a model's shape against the limits of this machine, in one run.

`python -m kernels.cpu.bench --batch 1 8 32 --prefill 512 1500`: random weights, real kernels, no sampling. The limits
are a read of memory by all threads and the fastest matmul, measured between the steps, so that a busy machine slows
both. Set GOMP_SPINCOUNT=0: torch's idle threads, which the probes wake, otherwise spin on the kernels' cores. A step's
limit is max(bytes / bandwidth, FLOPs / peak) over linear layers, plus the same of attention.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.memory import empty_huge
from kernels.interface import AttentionBatch


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a llama-like model; the default is SmolLM2-135M."""

    hidden: int = 576
    inner: int = 1536
    num_layers: int = 30
    num_q_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    page_size: int = 64

    @property
    def qkv_rows(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        attention = self.qkv_rows * self.hidden + self.num_q_heads * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.inner


class BenchModel:
    """The kernel calls of a llama-like model over random weights."""

    def __init__(self, backend: CpuBackend, shape: ModelShape, dtype: torch.dtype, num_pages: int) -> None:
        self.backend, self.shape, self.dtype = backend, shape, dtype
        s = shape
        sizes = [
            (s.qkv_rows, s.hidden),
            (s.hidden, s.num_q_heads * s.head_dim),
            (2 * s.inner, s.hidden),
            (s.hidden, s.inner),
        ]
        self._memory = empty_huge((s.layer_weights * s.num_layers + s.vocab * s.hidden,), dtype)
        self._used = 0
        self.layers = [[self._weight(*size) for size in sizes] for _ in range(s.num_layers)]
        self.head = self._weight(s.vocab, s.hidden)
        self.norm = torch.ones(s.hidden, dtype=dtype)
        angles = torch.rand(8192, s.head_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        pool_shape = (num_pages, s.num_kv_heads, s.num_layers, 2, s.page_size, s.head_dim)
        self.pool = empty_huge(pool_shape, dtype).normal_()

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = self._memory[self._used : self._used + rows * columns].view(rows, columns)
        self._used += rows * columns
        return weight.normal_(std=columns**-0.5)

    def batch(self, contexts: list[int], queries: list[int]) -> AttentionBatch:
        page = self.shape.page_size
        needed = [-(-length // page) for length in contexts]
        table = torch.zeros((len(contexts), max(needed)), dtype=torch.int32)
        order, taken = torch.randperm(self.pool.shape[0]).to(torch.int32), 0
        for row, count in enumerate(needed):
            table[row, :count] = order[taken : taken + count]
            taken += count
        pairs = list(zip(contexts, queries, strict=True))
        return AttentionBatch(
            query_starts=torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            page_table=table,
            positions=torch.cat([torch.arange(context - new, context) for context, new in pairs]),
            sequence_ids=torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(queries)).to(torch.int32),
            max_query_len=max(queries),
            max_context_len=max(contexts),
            page_size=page,
        )

    def step(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Logits of each sequence's last token."""
        b, s = self.backend, self.shape
        x = b.embedding(token_ids, self.head)
        for index, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(self.layers):
            layer = self.pool[:, :, index]
            qkv = b.norm_linear(x, self.norm, 1e-5, qkv_weight)
            q = b.rope_and_store(qkv, self.cos_sin, layer, batch, s.num_q_heads)
            attended = b.paged_attention(q, layer, batch, s.head_dim**-0.5)
            b.linear_residual(attended.flatten(1), o_weight, x)
            b.linear_residual(b.norm_gate_up(x, self.norm, 1e-5, gate_up_weight), down_weight, x)
        last = x[batch.query_starts[1:].long() - 1]
        return b.logits(last, self.norm, 1e-5, self.head)

    def runner(self, contexts: list[int], queries: list[int]) -> Callable[[], None]:
        batch = self.batch(contexts, queries)
        ids = torch.randint(self.shape.vocab, (sum(queries),))

        def run() -> None:
            self.step(ids, batch)

        return run

    def attention_runner(self, contexts: list[int], queries: list[int]) -> Callable[[], None]:
        """The attention of all layers alone."""
        batch, s = self.batch(contexts, queries), self.shape
        q = torch.randn(sum(queries), s.num_q_heads, s.head_dim).to(self.dtype)

        def run() -> None:
            for index in range(s.num_layers):
                self.backend.paged_attention(q, self.pool[:, :, index], batch, s.head_dim**-0.5)

        return run


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def read_gigabytes_per_second(num_bytes: int = 2**28) -> Callable[[], float]:
    """A probe that reads memory once with torch's threads and returns the rate."""
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    return lambda: num_bytes / _milliseconds(memory.sum) / 1e6


def matmul_gigaflops(dtype: torch.dtype, size: int = 2048) -> Callable[[], float]:
    """A probe that multiplies square matrices and returns the rate."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return lambda: 2 * size**3 / _milliseconds(lambda: torch.nn.functional.linear(a, b)) / 1e6


def _limit_ms(
    s: ModelShape, contexts: list[int], queries: list[int], size: int, bandwidth: float, peak: float
) -> tuple[float, float]:
    """(limit of linear layers, limit of attention) in ms at GB/s and GFLOP/s."""
    tokens, layers = sum(queries), s.layer_weights * s.num_layers
    linear = max(layers * size / bandwidth, 2 * layers * tokens / peak) / 1e6
    head = s.vocab * s.hidden
    linear += max(head * size / bandwidth, 2 * head * len(queries) / peak) / 1e6
    kv_bytes = sum(contexts) * 2 * s.num_kv_heads * s.head_dim * size * s.num_layers
    pairs = sum(new * context - new * (new - 1) // 2 for context, new in zip(contexts, queries, strict=True))
    flops = 4 * pairs * s.num_q_heads * s.head_dim * s.num_layers
    return linear, max(kv_bytes / bandwidth, flops / peak) / 1e6


def report(model: BenchModel, contexts: list[int], queries: list[int], label: str, repeats: int) -> None:
    """Print minimum and median of the step and of its attention, beside the limits measured between them."""
    step, attention = model.runner(contexts, queries), model.attention_runner(contexts, queries)
    read, matmul = read_gigabytes_per_second(), matmul_gigaflops(model.dtype)
    step(), attention()
    samples: dict[str, list[float]] = {"step": [], "attention": [], "read": [], "matmul": []}
    for _ in range(repeats):
        samples["step"].append(_milliseconds(step))
        samples["attention"].append(_milliseconds(attention))
        samples["read"].append(read())
        samples["matmul"].append(matmul())
    bandwidth, peak = max(samples["read"]), max(samples["matmul"])
    size = 2 if model.dtype is torch.bfloat16 else 4
    linear, attended = _limit_ms(model.shape, contexts, queries, size, bandwidth, peak)
    middle = {name: sorted(values)[repeats // 2] for name, values in samples.items()}
    print(
        f"{label:14s} step {min(samples['step']):7.2f} / {middle['step']:7.2f} ms, of it attention "
        f"{min(samples['attention']):6.2f} / {middle['attention']:6.2f} (min / median); limit {linear + attended:6.2f} "
        f"(linear {linear:.2f}, attention {attended:.2f}) at {bandwidth:.1f} GB/s, {peak:.0f} GFLOP/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 1500])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    for name, value in vars(ModelShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = vars(parser.parse_args())
    shape = ModelShape(**{name: options[name] for name in vars(ModelShape())})
    torch.set_num_threads(options["threads"])
    longest = max([size * (options["context"] + 64) for size in options["batch"]] + options["prefill"])
    backend = CpuBackend(options["threads"])
    model = BenchModel(backend, shape, getattr(torch, options["dtype"]), longest // shape.page_size + 2)
    for size in options["batch"]:
        report(model, [options["context"]] * size, [1] * size, f"decode {size}", options["repeats"])
    for length in options["prefill"]:
        report(model, [length], [length], f"prefill {length}", max(3, options["repeats"] // 3))


if __name__ == "__main__":
    main()
